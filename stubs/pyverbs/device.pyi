from pyverbs.base import PyverbsCM

class Device:
    @property
    def name(self) -> str | bytes: ...

class DeviceAttr:
    max_qp_wr: int
    max_cqe: int
    max_sge: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_mw: int
    max_mr_size: int
    max_srq_wr: int
    device_cap_flags: int
    vendor_id: int

class PortAttr:
    state: int
    active_mtu: int
    lid: int
    link_layer: int
    gid_tbl_len: int
    pkey_tbl_len: int
    max_msg_sz: int

class GIDText: ...

class AsyncEvent:
    @property
    def event_type(self) -> int: ...
    def ack(self) -> None: ...

class Context(PyverbsCM):
    def __init__(self, *, name: str) -> None: ...
    @property
    def cmd_fd(self) -> int: ...
    @property
    def num_comp_vectors(self) -> int: ...
    def query_device(self) -> DeviceAttr: ...
    def query_port(self, port_num: int) -> PortAttr: ...
    def query_gid(self, port_num: int, index: int) -> GIDText: ...
    def get_async_event(self) -> AsyncEvent: ...

def get_device_list() -> list[Device]: ...
