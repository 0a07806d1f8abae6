"""The one door to pyverbs: PyverbsProvider creates with pyverbs, destroys natively, and never lets
pyverbs destroy.

It owns the knowledge of pyverbs' object layout (checked against known fields before use), undoes
what importing pyverbs does to the root logger, and turns foreign exceptions into DeviceError.
pyverbs is imported on first use. It knows no lane, no policy, and no order of closing beyond
"children first" (`device.py` has the order).
"""

from __future__ import annotations

import ctypes
import errno as errnos
import functools
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DeviceError
from .async_events import AsyncEvent, Subject, event_of, kind_of, subject_of
from .discovery import read_gids
from .gid_ranking import GidEntry
from .pinned import Field, PinnedObject, native_pointer
from .provider import (
    DeviceLimits,
    NativeChannel,
    NativeObject,
    NativeSharedReceive,
    PortFacts,
    QueuePairCaps,
)
from .records import QueuePairAttributes
from .registration_hints import registration_hint
from .turn import Turn, library_path

if TYPE_CHECKING:
    from pyverbs.cq import CQ, CompChannel
    from pyverbs.device import AsyncEvent as PyverbsAsyncEvent
    from pyverbs.device import Context
    from pyverbs.mr import MR, MW
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPInitAttr
    from pyverbs.srq import SRQ

# Values of the verbs ABI; pyverbs keeps them in a module that was renamed between releases.
_QPT_RC, _MW_TYPE_2 = 2, 2
_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24
_LINK_LAYERS = {1: "infiniband", 2: "ethernet"}
_PORT_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_PORT_ACTIVE = 4

# Where an object keeps its pointer, counted from the end of the class that all of them extend. The
# leading members of MR and MW differ.
_MR_MEMBERS_BYTES, _MW_MEMBERS_BYTES = 16, 8
_QP_NUM_OFFSET = 52  # in struct ibv_qp

_SRQ_LIMIT = 2  # the mask bit of ibv_modify_srq
_SRQ_ATTR = struct.Struct("=3I")  # struct ibv_srq_attr: max_wr, max_sge, srq_limit
_PKEY = struct.Struct(">H")  # big-endian on every host
# struct ibv_async_event, which pyverbs keeps at the end of its object: element, event_type.
_ASYNC_EVENT = struct.Struct("=QI4x")

_HINT = "install python3-pyverbs and ibverbs-providers, and use the distribution's python3"


@dataclass(frozen=True, slots=True)
class _Pyverbs:
    """What is used of pyverbs and libibverbs, loaded once."""

    context: type[Context]
    pd: type[PD]
    channel: type[CompChannel]
    cq: type[CQ]
    mr: type[MR]
    mw: type[MW]
    qp: type[QP]
    make_init_attr: Callable[[CQ, CQ, QueuePairCaps, SRQ | None], QPInitAttr]
    make_srq: Callable[[PD, int], tuple[SRQ, int]]
    list_devices: Callable[[], list[str]]
    error: type[Exception]
    base_bytes: int
    library: ctypes.CDLL


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """pyverbs calls logging.basicConfig at import; a library has no business there."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        added = [handler for handler in root.handlers if handler not in handlers]
        for handler in added:
            root.removeHandler(handler)
        if added:
            root.setLevel(level)


@functools.cache
def _pyverbs() -> _Pyverbs:
    """DeviceError (ENOENT) when pyverbs or libibverbs is not there."""
    try:
        with _root_logger_kept():
            from pyverbs import base, cq, device, mr, pd, pyverbs_error, qp, srq
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except (ImportError, OSError) as error:
        raise DeviceError("pyverbs", "import", errnos.ENOENT, str(error), hint=_HINT) from error

    def make_init_attr(send: CQ, recv: CQ, caps: QueuePairCaps, shared: SRQ | None) -> QPInitAttr:
        cap = qp.QPCap(
            max_send_wr=caps.send_depth,
            max_recv_wr=0 if shared is not None else caps.recv_depth,
            max_send_sge=1,
            max_recv_sge=0 if shared is not None else 1,
            max_inline_data=caps.inline_bytes,
        )
        return qp.QPInitAttr(qp_type=_QPT_RC, scq=send, rcq=recv, srq=shared, cap=cap, sq_sig_all=0)

    def make_srq(domain: PD, depth: int) -> tuple[SRQ, int]:
        init = srq.SrqInitAttr(srq.SrqAttr(max_wr=depth, max_sge=1))
        made = srq.SRQ(domain, init)
        return made, init.max_wr  # as granted

    def list_devices() -> list[str]:
        return [_text(found.name) for found in device.get_device_list()]

    return _Pyverbs(
        context=device.Context,
        pd=pd.PD,
        channel=cq.CompChannel,
        cq=cq.CQ,
        mr=mr.MR,
        mw=mr.MW,
        qp=qp.QP,
        make_init_attr=make_init_attr,
        make_srq=make_srq,
        list_devices=list_devices,
        error=pyverbs_error.PyverbsError,
        base_bytes=base.PyverbsCM.__basicsize__,
        library=library,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextmanager
def _typed(device: str, verb: str) -> Iterator[None]:
    """Foreign exceptions end here."""
    try:
        yield
    except _pyverbs().error as error:
        code = getattr(error, "error_code", -1)
        errno = code if isinstance(code, int) and code > 0 else 0
        hint = registration_hint(errno) if verb == "reg_mr" else ""
        raise DeviceError(device, verb, errno, "" if errno else str(error), hint=hint) from error


def _native_call(name: str) -> Callable[[int], int]:
    """A destroying function of libibverbs, called without the GIL: 0 or an errno."""
    function = getattr(_pyverbs().library, name)
    function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int

    def call(native: int) -> int:
        rc: int = function(native)
        if rc < 0:  # ibv_close_device and some others: -1 and errno
            return ctypes.get_errno() or errnos.EIO
        return rc

    return call


class PyverbsChannel(PinnedObject):
    def __init__(self, context: PyverbsContext, channel: CompChannel, turn: Turn) -> None:
        device = context.device
        offset = _pyverbs().base_bytes
        native = native_pointer(channel, offset, [Field("context", 0, 8, context.native)], device)
        destroy = _native_call("ibv_destroy_comp_channel")
        super().__init__(
            device, channel, offset, native, destroy, "destroy_comp_channel", [context]
        )
        self.binding = channel
        self._fd = turn.channel_fd(native)
        os.set_blocking(self._fd, False)

    @property
    def fd(self) -> int:
        self._alive()
        return self._fd


class PyverbsCompletionQueue(PinnedObject):
    """Its events are read and acknowledged by the helper alone: pyverbs' own count would make the
    destroy hang."""

    def __init__(self, context: PyverbsContext, channel: PyverbsChannel, cq: CQ) -> None:
        offset = _pyverbs().base_bytes
        fields = [
            Field("context", 0, 8, context.native),
            Field("channel", 8, 8, channel.native),
            Field("cqe", 28, 4, cq.cqe),
        ]
        native = native_pointer(cq, offset, fields, context.device)
        destroy = _native_call("ibv_destroy_cq")
        parents = [context, channel]
        super().__init__(context.device, cq, offset, native, destroy, "destroy_cq", parents)
        self.binding = cq


class PyverbsRegion(PinnedObject):
    def __init__(self, domain: PyverbsDomain, mr: MR) -> None:
        offset = _pyverbs().base_bytes + _MR_MEMBERS_BYTES
        fields = [
            Field("pd", 8, 8, domain.native),
            Field("lkey", 36, 4, mr.lkey),
            Field("rkey", 40, 4, mr.rkey),
        ]
        native = native_pointer(mr, offset, fields, domain.device)
        destroy = _native_call("ibv_dereg_mr")
        super().__init__(domain.device, mr, offset, native, destroy, "dereg_mr", [domain])
        self._lkey, self._rkey = mr.lkey, mr.rkey

    @property
    def lkey(self) -> int:
        return self._lkey

    @property
    def rkey(self) -> int:
        return self._rkey


class PyverbsWindow(PinnedObject):
    def __init__(self, domain: PyverbsDomain, mw: MW, turn: Turn) -> None:
        offset = _pyverbs().base_bytes + _MW_MEMBERS_BYTES
        fields = [
            Field("pd", 8, 8, domain.native),
            Field("rkey", 16, 4, mw.rkey),
            Field("handle", 20, 4, mw.handle),
        ]
        native = native_pointer(mw, offset, fields, domain.device)
        super().__init__(
            domain.device, mw, offset, native, self._deallocate, "dealloc_mw", [domain]
        )
        self._binding = mw
        self._turn = turn

    @property
    def key(self) -> int:
        return self._turn.window_key(self.native)

    def _deallocate(self, _native: int) -> int:
        """ibv_dealloc_mw is an inline function, so pyverbs makes this call; it takes microseconds.
        Freeing a bound window revokes its key at once."""
        with _typed(self._device, "dealloc_mw"):
            self._binding.close()
        return 0


class PyverbsSharedReceive(PinnedObject):
    """pyverbs' own `modify` would hold the GIL for a command of the firmware."""

    def __init__(self, domain: PyverbsDomain, srq: SRQ, depth: int) -> None:
        offset = _pyverbs().base_bytes
        fields = [
            Field("context", 0, 8, domain.context_native),
            Field("pd", 16, 8, domain.native),
        ]
        native = native_pointer(srq, offset, fields, domain.device)
        destroy = _native_call("ibv_destroy_srq")
        super().__init__(domain.device, srq, offset, native, destroy, "destroy_srq", [domain])
        self.binding = srq
        self._depth = depth
        self._modify = _pyverbs().library.ibv_modify_srq
        self._modify.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
        self._modify.restype = ctypes.c_int

    @property
    def depth(self) -> int:
        return self._depth

    def arm_limit(self, limit: int) -> None:
        self._alive()
        rc = self._modify(self._native, _SRQ_ATTR.pack(0, 0, limit), _SRQ_LIMIT)
        if rc:
            raise DeviceError(self._device, "modify_srq", abs(rc))


class PyverbsQueuePair(PinnedObject):
    def __init__(
        self,
        domain: PyverbsDomain,
        queues: tuple[PyverbsCompletionQueue, PyverbsCompletionQueue],
        qp: QP,
        shared: PyverbsSharedReceive | None,
        caps: QueuePairCaps,
        turn: Turn,
    ) -> None:
        offset = _pyverbs().base_bytes
        fields = [
            Field("pd", 16, 8, domain.native),
            Field("send_cq", 24, 8, queues[0].native),
            Field("recv_cq", 32, 8, queues[1].native),
            Field("srq", 40, 8, shared.native if shared else 0),
            Field("qp_num", _QP_NUM_OFFSET, 4, qp.qp_num),
        ]
        native = native_pointer(qp, offset, fields, domain.device)
        destroy = _native_call("ibv_destroy_qp")
        parents = [domain, *queues, *([shared] if shared else [])]
        super().__init__(domain.device, qp, offset, native, destroy, "destroy_qp", parents)
        self._qp_num: int = qp.qp_num
        self._caps = caps
        self._turn = turn

    @property
    def qp_num(self) -> int:
        return self._qp_num

    @property
    def caps(self) -> QueuePairCaps:
        return self._caps

    def modify(self, attributes: QueuePairAttributes) -> None:
        self._alive()
        self._turn.modify(self._native, attributes, self._device)


class PyverbsDomain(PinnedObject):
    def __init__(self, context: PyverbsContext, pd: PD, turn: Turn) -> None:
        offset = _pyverbs().base_bytes
        fields = [Field("context", 0, 8, context.native), Field("handle", 8, 4, pd.handle)]
        native = native_pointer(pd, offset, fields, context.device)
        destroy = _native_call("ibv_dealloc_pd")
        super().__init__(context.device, pd, offset, native, destroy, "dealloc_pd", [context])
        self._pd = pd
        self._turn = turn
        self.context_native = context.native

    def register(self, address: int, length: int, access: int) -> PyverbsRegion:
        self._alive()
        with _typed(self._device, "reg_mr"):
            mr = _pyverbs().mr(self._pd, length, access, address=address)
        return PyverbsRegion(self, mr)

    def allocate_window(self) -> PyverbsWindow:
        self._alive()
        with _typed(self._device, "alloc_mw"):
            mw = _pyverbs().mw(self._pd, _MW_TYPE_2)
        return PyverbsWindow(self, mw, self._turn)

    def create_shared_receive(self, depth: int) -> PyverbsSharedReceive:
        self._alive()
        with _typed(self._device, "create_srq"):
            srq, granted = _pyverbs().make_srq(self._pd, depth)
        return PyverbsSharedReceive(self, srq, granted)

    def create_queue_pair(
        self,
        send_cq: NativeObject,
        recv_cq: NativeObject,
        caps: QueuePairCaps,
        shared_receive: NativeSharedReceive | None = None,
    ) -> PyverbsQueuePair:
        self._alive()
        if (
            not isinstance(send_cq, PyverbsCompletionQueue)
            or not isinstance(recv_cq, PyverbsCompletionQueue)
            or not (shared_receive is None or isinstance(shared_receive, PyverbsSharedReceive))
        ):
            raise DeviceError(self._device, "create_qp", errnos.EINVAL, "not this provider's queue")
        shared = shared_receive.binding if shared_receive is not None else None
        with _typed(self._device, "create_qp"):
            init = _pyverbs().make_init_attr(send_cq.binding, recv_cq.binding, caps, shared)
            qp = _pyverbs().qp(self._pd, init)
        receives = 0 if shared is not None else init.max_recv_wr
        granted = QueuePairCaps(init.max_send_wr, receives, init.max_inline_data)
        return PyverbsQueuePair(self, (send_cq, recv_cq), qp, shared_receive, granted, self._turn)


class PyverbsContext(PinnedObject):
    def __init__(self, name: str, context: Context, turn: Turn) -> None:
        offset = _pyverbs().base_bytes
        fields = [
            Field("cmd_fd", 264, 4, context.cmd_fd),
            Field("num_comp_vectors", 272, 4, context.num_comp_vectors),
        ]
        native = native_pointer(context, offset, fields, name)
        destroy = _native_call("ibv_close_device")
        super().__init__(name, context, offset, native, destroy, "close_device")
        self._context = context
        self._turn = turn
        self._async_fd = turn.async_fd(native)
        # Before anything is read from it: a get_async_event that waits would hold the GIL for ever.
        os.set_blocking(self._async_fd, False)
        self._async_ready = select.poll()
        self._async_ready.register(self._async_fd, select.POLLIN)

    @property
    def async_fd(self) -> int:
        self._alive()
        return self._async_fd

    def next_async_event(self) -> AsyncEvent | None:
        """Got and acknowledged here, in one breath: the destroy of an object waits for the
        acknowledgement of what was told about it, in whichever thread that runs."""
        self._alive()
        if not self._async_ready.poll(0):
            return None  # asked first: pyverbs 44 drops the errno, so EAGAIN could not be told
        with _typed(self._device, "get_async_event"):
            event = self._context.get_async_event()
        try:
            return self._read(event)
        finally:
            event.ack()

    def _read(self, event: PyverbsAsyncEvent) -> AsyncEvent:
        """pyverbs 44 tells the type alone; what the event is about stands before it."""
        at = type(event).__basicsize__ - _ASYNC_EVENT.size
        element, number = _ASYNC_EVENT.unpack(ctypes.string_at(id(event) + at, _ASYNC_EVENT.size))
        if number != event.event_type:
            raise DeviceError(
                self._device,
                "get_async_event",
                errnos.EPROTO,
                f"event_type is {number} there, expected {event.event_type}",
                hint="this pyverbs lays its objects out in another way; orbit knows that of 44",
            )
        qp_num = 0
        if subject_of(kind_of(number)) is Subject.QUEUE_PAIR:
            qp_num = ctypes.c_uint32.from_address(element + _QP_NUM_OFFSET).value
        return event_of(number, element, qp_num)

    def limits(self) -> DeviceLimits:
        self._alive()
        with _typed(self._device, "query_device"):
            found = self._context.query_device()
        return DeviceLimits(
            max_qp_wr=found.max_qp_wr,
            max_cqe=found.max_cqe,
            max_sge=found.max_sge,
            max_rd_atomic=found.max_qp_rd_atom,
            max_init_rd_atomic=found.max_qp_init_rd_atom,
            max_windows=found.max_mw,
            max_region_bytes=found.max_mr_size,
            window_type_2b=bool(found.device_cap_flags & _DEVICE_MEM_WINDOW_TYPE_2B),
            vendor_id=found.vendor_id,
            max_shared_receives=found.max_srq_wr,
        )

    def port(self, number: int) -> PortFacts:
        self._alive()
        with _typed(self._device, "query_port"):
            found = self._context.query_port(number)
        known = 0 <= found.state < len(_PORT_STATES)
        return PortFacts(
            active=found.state == _PORT_ACTIVE,
            state=_PORT_STATES[found.state] if known else str(found.state),
            mtu=128 << found.active_mtu,
            lid=found.lid,
            link_layer=_LINK_LAYERS.get(found.link_layer, "unspecified"),
            gid_count=found.gid_tbl_len,
            max_message_bytes=found.max_msg_sz,
            pkey_count=found.pkey_tbl_len,
        )

    def gid(self, port: int, index: int) -> str:
        self._alive()
        with _typed(self._device, "query_gid"):
            text = str(self._context.query_gid(port, index))
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, text))

    def gid_entries(self, port: int) -> Sequence[GidEntry]:
        self._alive()
        return read_gids(self._device, port)

    def pkey(self, port: int, index: int) -> int:
        self._alive()
        query = _pyverbs().library.ibv_query_pkey
        query.argtypes = (ctypes.c_void_p, ctypes.c_uint8, ctypes.c_int, ctypes.c_void_p)
        found = ctypes.create_string_buffer(_PKEY.size)
        if query(self._native, port, index, found):
            raise DeviceError(self._device, "query_pkey", ctypes.get_errno())
        (pkey,) = _PKEY.unpack(found.raw)
        return int(pkey)

    def allocate_domain(self) -> PyverbsDomain:
        self._alive()
        with _typed(self._device, "alloc_pd"):
            pd = _pyverbs().pd(self._context)
        return PyverbsDomain(self, pd, self._turn)

    def create_channel(self) -> PyverbsChannel:
        self._alive()
        with _typed(self._device, "create_comp_channel"):
            channel = _pyverbs().channel(self._context)
        return PyverbsChannel(self, channel, self._turn)

    def create_cq(self, depth: int, channel: NativeChannel) -> PyverbsCompletionQueue:
        self._alive()
        if not isinstance(channel, PyverbsChannel):
            raise DeviceError(
                self._device, "create_cq", errnos.EINVAL, "not this provider's channel"
            )
        with _typed(self._device, "create_cq"):
            cq = _pyverbs().cq(self._context, depth, None, channel.binding, 0)
        return PyverbsCompletionQueue(self, channel, cq)


class PyverbsProvider:
    """The provider over the distribution's pyverbs. Making one imports pyverbs and loads the native
    helper; DeviceError (verb "import" or "load", ENOENT) when either is not there."""

    def __init__(self) -> None:
        modify = ctypes.cast(_pyverbs().library.ibv_modify_qp, ctypes.c_void_p).value or 0
        self._turn = Turn(library_path("native"), modify)

    @property
    def turn(self) -> Turn:
        return self._turn

    def devices(self) -> Sequence[str]:
        try:
            return _pyverbs().list_devices()
        except _pyverbs().error:
            return []  # ENOSYS: this kernel has no RDMA, or its modules are not loaded

    def open(self, device: str) -> PyverbsContext:
        try:
            context = _pyverbs().context(name=device)
        except _pyverbs().error as error:
            errno, hint = self._why_not(device)
            raise DeviceError(device, "open_device", errno, hint=hint) from error
        return PyverbsContext(device, context, self._turn)

    def _why_not(self, device: str) -> tuple[int, str]:
        """pyverbs drops the errno of a failed open: find it out by opening the device node."""
        if device not in self.devices():
            return errnos.ENODEV, "`ibv_devices` lists what there is"
        for entry in sorted(Path("/sys/class/infiniband_verbs").glob("uverbs*")):
            try:
                if (entry / "ibdev").read_text().strip() != device:
                    continue
                node = f"/dev/infiniband/{entry.name}"
                os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                return error.errno or 0, f"see who may open {error.filename}"
        return 0, ""
