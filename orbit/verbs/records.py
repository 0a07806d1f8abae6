"""The helper's records (`_turn/turn.h`) as Python packs and unpacks them: work requests,
completions, attributes.

Owns the layouts and the numbers of the verbs API that orbit uses. It knows no library and makes no
call.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..errors import UsageError

# ibv_access_flags, as `register` and the INIT transition take them.
ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ, ACCESS_MW_BIND = 1, 2, 4, 16
# turn_opcode, turn_flags and turn_access.
SEND, SEND_WITH_INV, READ, WRITE, BIND_WINDOW, LOCAL_INV = range(6)
SIGNALED, FENCE, INLINE = 1, 2, 4
WINDOW_READ, WINDOW_WRITE = 1, 2
_KEY_NOW = 1 << 32  # TURN_KEY_NOW
# ibv_qp_state, the part that `modify` takes.
STATE_RESET, STATE_INIT, STATE_RTR, STATE_RTS, STATE_ERR = 0, 1, 2, 3, 6
STATE_NAMES = {0: "RESET", 1: "INIT", 2: "RTR", 3: "RTS", 6: "ERR"}

WR = struct.Struct("=QQQQQQIIHHI")
RECV = struct.Struct("=QQII")
WC = struct.Struct("=QIIIIIII4x")
ATTR = struct.Struct("=20I16s")
# turn_sizes() of a helper that was built from the same header.
SIZES = WR.size | RECV.size << 8 | WC.size << 16 | ATTR.size << 24


@dataclass(frozen=True, slots=True)
class QueuePairAttributes:
    """struct turn_qp_attr; what does not matter for the target state is ignored."""

    state: int  # 1 INIT, 2 RTR, 3 RTS, 6 ERR
    access: int = 0
    port: int = 1
    pkey_index: int = 0
    path_mtu: int = 1024
    dest_qpn: int = 0
    rq_psn: int = 0
    sq_psn: int = 0
    rd_atomic: int = 1
    max_dest_rd_atomic: int = 1
    min_rnr_timer: int = 1
    timeout: int = 14
    retry_cnt: int = 6
    rnr_retry: int = 6
    is_global: bool = True
    sgid_index: int = 0
    hop_limit: int = 64
    dlid: int = 0
    service_level: int = 0
    traffic_class: int = 0
    dgid: str = "::"

    def pack(self) -> bytes:
        try:
            dgid = socket.inet_pton(socket.AF_INET6, self.dgid)
        except OSError as error:
            raise UsageError(f"not a GID: {self.dgid!r}") from error
        return ATTR.pack(
            self.state,
            self.access,
            self.port,
            self.pkey_index,
            self.path_mtu,
            self.dest_qpn,
            self.rq_psn,
            self.sq_psn,
            self.rd_atomic,
            self.max_dest_rd_atomic,
            self.min_rnr_timer,
            self.timeout,
            self.retry_cnt,
            self.rnr_retry,
            int(self.is_global),
            self.sgid_index,
            self.hop_limit,
            self.dlid,
            self.service_level,
            self.traffic_class,
            dgid,
        )

    @classmethod
    def unpack(cls, packed: bytes) -> QueuePairAttributes:
        """Inverse of `pack`."""
        *numbers, dgid = ATTR.unpack(packed)
        names = [f.name for f in fields(cls)][:-1]
        values = dict(zip(names, numbers, strict=True))
        values["is_global"] = bool(values["is_global"])
        return cls(**values, dgid=socket.inet_ntop(socket.AF_INET6, dgid))


class Completion(NamedTuple):
    """struct turn_wc. A tuple, because a drained queue makes many of them at once."""

    wr_id: int
    status: int
    opcode: int  # raw ibv_wc_opcode; means nothing when status is not 0
    byte_len: int
    qp_num: int
    vendor_err: int
    wc_flags: int
    invalidated: int  # the key of a receive with invalidate, else 0


def pack_read(
    wr_id: int,
    local_addr: int,
    lkey: int,
    length: int,
    remote_addr: int,
    rkey: int,
    flags: int = SIGNALED,
) -> bytes:
    return WR.pack(wr_id, local_addr, remote_addr, 0, 0, length, lkey, rkey, READ, flags, 0)


def pack_write(
    wr_id: int,
    local_addr: int,
    lkey: int,
    length: int,
    remote_addr: int,
    rkey: int,
    flags: int = SIGNALED,
) -> bytes:
    return WR.pack(wr_id, local_addr, remote_addr, 0, 0, length, lkey, rkey, WRITE, flags, 0)


def pack_send(wr_id: int, local_addr: int, lkey: int, length: int, flags: int = SIGNALED) -> bytes:
    return WR.pack(wr_id, local_addr, 0, 0, 0, length, lkey, 0, SEND, flags, 0)


def pack_send_with_inv(
    wr_id: int,
    local_addr: int,
    lkey: int,
    length: int,
    invalidate: int,
    flags: int = SIGNALED | FENCE,
) -> bytes:
    """Fenced by default: the invalidate must not overtake the reads through the same window."""
    return WR.pack(wr_id, local_addr, 0, 0, 0, length, lkey, invalidate, SEND_WITH_INV, flags, 0)


def pack_bind(
    wr_id: int,
    window: int,
    region: int,
    address: int,
    length: int,
    key: int,
    access: int,
    flags: int = SIGNALED,
    key_now: int | None = None,
) -> bytes:
    """`window` and `region` are native addresses; `access` is WINDOW_READ or WINDOW_WRITE.
    `key_now`: what the window was bound or allocated with last. Without it, that is what its object
    holds, and on success the new key must be written back with `set_window_key`, else the next bind
    of this window fails."""
    now = 0 if key_now is None else _KEY_NOW | key_now
    return WR.pack(wr_id, address, now, window, region, length, 0, key, BIND_WINDOW, flags, access)


def pack_local_inv(wr_id: int, key: int, flags: int = SIGNALED) -> bytes:
    """At most once per bind: an rdma_rxe kernel panics when the window is not bound."""
    return WR.pack(wr_id, 0, 0, 0, 0, 0, 0, key, LOCAL_INV, flags, 0)


def pack_recv(wr_id: int, address: int, length: int, lkey: int) -> bytes:
    return RECV.pack(wr_id, address, length, lkey)
