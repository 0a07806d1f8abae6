"""One reliable-connected queue pair for bulk work: its slots, what is outstanding, and its end.

Owns the count of work requests on both queues and the proof that the device is done with them:
the error state, then one marker on each queue, whose flush comes after everything before it. It
does not know what a work request is for; handlers do. It never destroys itself while a window may
be bound on it: `close` is its owner's call, after the windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import (
    BusyError,
    ClosedError,
    CompletionError,
    DeadlineExceeded,
    DeviceError,
    OrbitError,
    Unquiesced,
)
from . import records
from .lane import Handler, Lane
from .offload import Offload, finish
from .outcomes import take_exception
from .provider import NativeQueuePair, QueuePairCaps
from .rail_pairs import common_prefix_bits, is_gid
from .records import Completion, QueuePairAttributes
from .settings import RdmaPathConfig
from .status import WR_FLUSH_ERR, status_name
from .turn import PostResult, Turn


class QueuePairState(enum.Enum):
    IDLE = "idle"  # created, not connected
    READY = "ready"
    FAILED = "failed"  # no new work; being moved to ERR, or there
    DRAINED = "drained"  # in ERR, and nothing outstanding
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    """What RTR and RTS need to know about the other side."""

    gid: str
    lid: int
    qpn: int
    psn: int
    path_mtu: int
    rd_atomic: int  # READs in flight, as agreed for the direction that has any
    link_layer: str = "ethernet"


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """Where this queue pair sits."""

    port: int
    gid_index: int
    pkey_index: int
    psn: int
    remote_read: bool  # the peer may read through windows bound here
    remote_write: bool = False
    gid: str = ""  # empty: not known
    service_level: int = 0
    traffic_class: int = 0
    # What the device has: for the direction without READs the agreed number may be too many.
    initiator_depth_max: int = 255
    responder_depth_max: int = 255


class Retries(Protocol):
    """How hard a queue pair tries; message and bulk queue pairs have their own numbers."""

    @property
    def min_rnr_timer(self) -> int: ...
    @property
    def qp_timeout(self) -> int: ...
    @property
    def retry_cnt(self) -> int: ...
    @property
    def rnr_retry(self) -> int: ...


class Posting:
    """One work request: how to pack it once its id is known, and who hears of its completion."""

    __slots__ = ("on_completion", "opcode", "pack")

    def __init__(self, opcode: str, pack: Callable[[int], bytes], on_completion: Handler) -> None:
        self.opcode = opcode
        self.pack = pack
        self.on_completion = on_completion


class Connecting:
    """The transitions of one queue pair to RTS, which may outlast whoever waited for them."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None

    @property
    def succeeded(self) -> bool:
        """All of them were made, in time or later."""
        done = self._done
        return done is not None and done.done() and done.exception() is None

    async def run(
        self,
        what: str,
        offload: Offload,
        native: NativeQueuePair,
        steps: Sequence[QueuePairAttributes],
        timeout_s: float,
    ) -> None:
        """Make them, off the loop. Raises DeviceError, DeadlineExceeded."""

        def modify() -> None:
            for attributes in steps:
                native.modify(attributes)

        self._done = offload.start(modify)
        await finish(what, timeout_s, self._done)

    async def settle(self, deadline: float, timeout_s: float) -> None:
        """A modify in progress, perhaps blocked for a second, uses the object still. Raises
        DeadlineExceeded, naming `timeout_s`.
        """
        if self._done is not None and not self._done.done():
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            await asyncio.wait([self._done], timeout=left_s)
            if not self._done.done():
                raise DeadlineExceeded("a modify in progress", timeout_s)


FailedHandler = Callable[[OrbitError], None]

_SUBNET_BITS = 64  # of a GID: the prefix that the subnet manager gives


# No event comes from a lane that has failed.
_FAILED_LANE_POLL_S = 0.02


class BulkQueuePair:
    """Its work is charged to its lane already, and repaid by `close`. It never leaves the lane."""

    def __init__(
        self,
        native: NativeQueuePair,
        lane: Lane,
        turn: Turn,
        offload: Offload,
        config: RdmaPathConfig,
        on_failed: FailedHandler,
    ) -> None:
        self._native = native
        self._lane = lane
        self._turn = turn
        self._offload = offload
        self._config = config
        self._on_failed = on_failed
        self._outstanding: dict[int, tuple[Posting, bool]] = {}  # by wr_id; bool: a receive
        self._connecting = Connecting()
        self._draining: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()  # something completed while draining
        self.state = QueuePairState.IDLE
        self.cause: OrbitError | None = None
        self.posted_at = 0.0  # the latest post of send work, by time.perf_counter
        self.send_free = config.send_depth
        self.recv_free = config.recv_depth
        lane.attach(self)

    @staticmethod
    def asked_caps(config: RdmaPathConfig, inline_bytes: int) -> QueuePairCaps:
        """One slot more than is used on either queue: the drain's markers need room."""
        return QueuePairCaps(config.send_depth + 1, config.recv_depth + 1, inline_bytes)

    @property
    def qp_num(self) -> int:
        return self._native.qp_num

    @property
    def native(self) -> int:
        return self._native.native

    @property
    def inline_bytes(self) -> int:
        """Granted by the device; 0 when it has none."""
        return self._native.caps.inline_bytes

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def sends(self) -> int:
        """Unresolved ones, markers included."""
        return self._config.send_depth - self.send_free

    @property
    def receives(self) -> int:
        return self._config.recv_depth - self.recv_free

    @property
    def lane(self) -> Lane:
        return self._lane

    async def connect(self, local: LocalEnd, remote: RemoteEnd, timeout_s: float) -> None:
        """INIT, RTR, RTS. Raises DeviceError, DeadlineExceeded; the queue pair has failed then."""
        if self.state is not QueuePairState.IDLE:
            raise BusyError(f"queue pair {self.qp_num} is {self.state.value}")
        steps = connect_steps(local, remote, self._config)

        try:
            await self._connecting.run(
                "connecting a queue pair", self._offload, self._native, steps, timeout_s
            )
        except (DeviceError, DeadlineExceeded) as error:
            self.fail(error)
            raise
        if self.state is QueuePairState.IDLE:  # else it failed meanwhile
            self.state = QueuePairState.READY

    def post_send(self, postings: Sequence[Posting]) -> None:
        """Post one chain. Raises BusyError (no room), ClosedError (the queue pair has failed),
        DeviceError: then the queue pair has failed, what was accepted still completes, and the
        handlers of the rest are never called.
        """
        self._check_room(len(postings), self.send_free)
        wr_ids = [self._expect(posting, receive=False) for posting in postings]
        packed = [posting.pack(wr_id) for posting, wr_id in zip(postings, wr_ids, strict=True)]
        self.posted_at = time.perf_counter()
        self._settle_post("post_send", self._turn.post_send(self.native, packed), wr_ids)

    def post_with_receives(self, receives: Sequence[Posting], sends: Sequence[Posting]) -> None:
        """Post the receives, and then one chain, in one call. As `post_send`; no send work is
        posted before all receives were taken.
        """
        self._check_room(len(receives), self.recv_free)
        self._check_room(len(sends), self.send_free)
        receive_ids = [self._expect(posting, receive=True) for posting in receives]
        send_ids = [self._expect(posting, receive=False) for posting in sends]
        self.posted_at = time.perf_counter()
        posted = self._lane.post(
            self.native,
            [posting.pack(wr_id) for posting, wr_id in zip(receives, receive_ids, strict=True)],
            [posting.pack(wr_id) for posting, wr_id in zip(sends, send_ids, strict=True)],
        )
        if posted.sends.errno:
            self._lane.poll_before_failing()  # what others have received by now counts
        if posted.receives.errno:
            self._forget_rest(posted.sends, send_ids)
        self._settle_post("post_recv", posted.receives, receive_ids)
        self._settle_post("post_send", posted.sends, send_ids)

    def fail(self, cause: OrbitError) -> None:
        """No new work from now on. The first cause stays, and is told once."""
        if self.state in (QueuePairState.IDLE, QueuePairState.READY):
            self.state = QueuePairState.FAILED
            self.cause = cause
            self._on_failed(cause)

    async def drain(self, cause: OrbitError) -> None:
        """Move to ERR and wait for the proof that the device is done with every buffer.

        Any number of callers; cancelling one changes nothing. Raises Unquiesced.
        """
        self.fail(cause)
        if self.state in (QueuePairState.DRAINED, QueuePairState.CLOSED):
            return
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            self._draining.add_done_callback(take_exception)
        await asyncio.shield(self._draining)

    async def close(self) -> None:
        """Destroy it. Drained, and without a bound window. Raises DeviceError, DeadlineExceeded."""
        if self.state is QueuePairState.CLOSED:
            return
        await self._offload.run(
            "destroying a queue pair", self._config.drain_timeout_s, self._native.close
        )
        self.state = QueuePairState.CLOSED
        for wr_id in self._outstanding:
            self._lane.table.forget(wr_id)
        self._outstanding.clear()
        self._lane.detach(self)
        self._lane.repay(self._config.work_entries)

    def _check_room(self, count: int, free: int) -> None:
        if self.state is not QueuePairState.READY:
            raise ClosedError(f"queue pair {self.qp_num}")
        if count > free:
            raise BusyError(f"queue pair {self.qp_num}: {count} requests, room for {free}")

    def _expect(self, posting: Posting, *, receive: bool) -> int:
        wr_id = self._lane.table.reserve(self._completed, self.qp_num)
        self._outstanding[wr_id] = posting, receive
        if receive:
            self.recv_free -= 1
        else:
            self.send_free -= 1
        return wr_id

    def _settle_post(self, verb: str, result: PostResult, wr_ids: Sequence[int]) -> None:
        if result.errno == 0:
            return
        self._forget_rest(result, wr_ids)
        error = DeviceError(f"queue pair {self.qp_num}", verb, result.errno)
        self.fail(error)
        raise error

    def _forget_rest(self, result: PostResult, wr_ids: Sequence[int]) -> None:
        """What was certainly not taken completes never."""
        if result.accepted is not None:
            for wr_id in wr_ids[result.accepted :]:
                self._lane.table.forget(wr_id)
                self._give_slot_back(wr_id)

    def _give_slot_back(self, wr_id: int) -> Posting:
        posting, receive = self._outstanding.pop(wr_id)
        if receive:
            self.recv_free += 1
        else:
            self.send_free += 1
        return posting

    def _completed(self, completion: Completion) -> None:
        posting = self._give_slot_back(completion.wr_id)
        self._progress.set()
        posting.on_completion(completion)
        if completion.status != 0:
            self.fail(completion_error(completion, self.qp_num, posting.opcode))

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        try:
            await self._connecting.settle(deadline, self._config.drain_timeout_s)
            # Before it was ready nothing was posted, and nothing could be bound or answered.
            if self._connecting.succeeded:
                markers = await self._to_error_state(deadline)
                await self._wait_flushed(markers, deadline)
        except (DeviceError, DeadlineExceeded) as error:
            self._draining = None  # a later call may find the device better
            raise Unquiesced(f"queue pair {self.qp_num}", 0, str(error)) from error
        self.state = QueuePairState.DRAINED

    async def _to_error_state(self, deadline: float) -> list[_Marker]:
        """Move to ERR, with a marker behind everything on each queue that is not empty.

        The receive marker goes first: rdma_rxe looks at the receive queue when the state changes,
        not when something is posted in the error state.
        """
        markers: list[_Marker] = []
        if any(receive for _, receive in self._outstanding.values()):
            markers.append(self._post_marker(receive=True))
        attributes = QueuePairAttributes(state=records.STATE_ERR)
        await self._offload.run(
            "moving a queue pair to the error state",
            deadline - asyncio.get_running_loop().time(),
            lambda: self._native.modify(attributes),
        )
        self._lane.poll()
        if not all(receive for _, receive in self._outstanding.values()):
            markers.append(self._post_marker(receive=False))
        return markers

    async def _wait_flushed(self, markers: list[_Marker], deadline: float) -> None:
        """Until everything came back, or every marker did: behind it nothing can complete."""
        loop = asyncio.get_running_loop()
        while self._outstanding and not (markers and all(m.flushed for m in markers)):
            self._progress.clear()
            self._lane.poll()
            if self._progress.is_set():
                continue
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise DeadlineExceeded(
                    f"the flush of {len(self._outstanding)} work requests",
                    self._config.drain_timeout_s,
                )
            if self._lane.failed is not None:
                left_s = min(left_s, _FAILED_LANE_POLL_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), left_s)
        # What is left was lost, or was never taken by the device.
        for wr_id in list(self._outstanding):
            self._lane.table.forget(wr_id)
            self._completed(Completion(wr_id, WR_FLUSH_ERR, 0, 0, self.qp_num, 0, 0, 0))

    def _post_marker(self, *, receive: bool) -> _Marker:
        """One that is refused (the queue is full, the count of an earlier post being unknown) never
        flushes: then only the completions themselves prove the end. One of an earlier drain that
        is still owed will do.
        """
        for posting, is_receive in self._outstanding.values():
            if is_receive is receive and isinstance(posting.on_completion, _Marker):
                return posting.on_completion
        marker = _Marker()
        if receive:
            posting = Posting("marker", lambda wr_id: records.pack_recv(wr_id, 0, 0, 0), marker)
        else:
            posting = Posting("marker", lambda wr_id: records.pack_send(wr_id, 0, 0, 0), marker)
        wr_id = self._expect(posting, receive=receive)
        post = self._turn.post_recv if receive else self._turn.post_send
        if post(self.native, [posting.pack(wr_id)]).errno != 0:
            self._lane.table.forget(wr_id)
            self._give_slot_back(wr_id)
        return marker


class _Marker:
    """Handler of a drain marker."""

    __slots__ = ("flushed",)

    def __init__(self) -> None:
        self.flushed = False

    def __call__(self, completion: Completion) -> None:
        self.flushed = True


def completion_error(completion: Completion, qp_num: int, opcode: str) -> CompletionError:
    return CompletionError(
        completion.status, status_name(completion.status), completion.vendor_err, qp_num, opcode
    )


def connect_steps(
    local: LocalEnd, remote: RemoteEnd, config: Retries
) -> tuple[QueuePairAttributes, ...]:
    """INIT, RTR, RTS."""
    ethernet = remote.link_layer == "ethernet"
    access = records.ACCESS_REMOTE_READ if local.remote_read else 0
    access |= records.ACCESS_REMOTE_WRITE if local.remote_write else 0
    return (
        QueuePairAttributes(
            state=records.STATE_INIT,
            access=access,
            port=local.port,
            pkey_index=local.pkey_index,
        ),
        QueuePairAttributes(
            state=records.STATE_RTR,
            port=local.port,
            path_mtu=remote.path_mtu,
            dest_qpn=remote.qpn,
            rq_psn=remote.psn,
            max_dest_rd_atomic=min(remote.rd_atomic, local.responder_depth_max),
            min_rnr_timer=config.min_rnr_timer,
            is_global=ethernet or not _in_one_subnet(local, remote),
            sgid_index=local.gid_index,
            dlid=0 if ethernet else remote.lid,
            service_level=local.service_level,
            traffic_class=local.traffic_class,
            dgid=remote.gid,
        ),
        QueuePairAttributes(
            state=records.STATE_RTS,
            sq_psn=local.psn,
            rd_atomic=min(remote.rd_atomic, local.initiator_depth_max),
            timeout=config.qp_timeout,
            retry_cnt=config.retry_cnt,
            rnr_retry=config.rnr_retry,
        ),
    )


def _in_one_subnet(local: LocalEnd, remote: RemoteEnd) -> bool:
    """Of InfiniBand ends: the LID is enough, and a global route would only cost bytes."""
    if not is_gid(remote.gid):
        return True
    return bool(remote.lid) and common_prefix_bits(local.gid, remote.gid) >= _SUBNET_BITS
