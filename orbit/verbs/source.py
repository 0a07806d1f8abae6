"""The source's shell: one queue pair of a bulk array at the owner, and the grants on it.

It runs one `GrantSource` machine per grant and carries out its effects: binds, receives, window
frees, and the abort of the whole queue pair. It takes no decision about a grant's life. Receipts
are matched by the invalidated key and all 141 bytes, never by the buffer they arrive in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import BusyError, ClosedError, DeviceError, OrbitError, PathUnavailable, Unquiesced
from ..model import Direction, PathName
from ..protocol.binding import (
    BINDING_BYTES,
    BindingError,
    GrantRecord,
    verify_binding,
)
from ..protocol.grants import (
    Bind,
    BindCompleted,
    BindFailed,
    BindRefused,
    Drained,
    DrainUnproven,
    FailExposure,
    FreeWindow,
    GrantSource,
    GrantTimeouts,
    KillQueuePair,
    PostBind,
    PostReceive,
    Publish,
    QueuePairFailed,
    Receipt,
    ReceivePosted,
    RecycleWindow,
    ReleaseMemory,
    Retain,
    SessionClosed,
    SourceEffect,
    SourceInput,
    WindowFreed,
    WindowFreeFailed,
)
from ..transport.interface import PinnedBuffer
from ..transport.timer import DeadlineTimer
from . import records
from .block_places import BlockPlaces
from .bulk_context import BulkContext
from .device import DeviceContext
from .endpoints import EndpointSlot
from .grant_ends import GrantEnds, GrantPart
from .outcomes import settle, take_exception
from .queue_pair import BulkQueuePair, Posting, QueuePairState, RemoteEnd, completion_error
from .records import Completion
from .status import WR_FLUSH_ERR
from .windows import FreshWindow, WindowPool

logger = logging.getLogger("orbit.verbs")


class MemberNews(NamedTuple):
    """What a queue pair tells its array. `unused`: nothing is left to do, in a domain that was
    left.
    """

    lost: Callable[[SourceMember], None]
    unused: Callable[[], None]


class SourceGrant:
    """One grant: its machine, its window, its receive, and the futures that its effects settle.

    Made by `SourceMember.reserve`, which posts nothing; then its `bind`, or `forget`.
    """

    def __init__(
        self,
        member: SourceMember,
        record: GrantRecord,
        window: FreshWindow,
        pinned: PinnedBuffer,
        parent: int,
        receive: int,
        timeouts: GrantTimeouts,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.member = member
        self.record = record
        self.window = window
        self.keep: PinnedBuffer | None = pinned  # the memory outlives the grant
        self.parent = parent  # native registration that the window is bound in
        self.receive: int | None = receive  # where its receipt's receive may lie; None once posted
        self.bind_posted_at = 0.0  # by time.perf_counter
        self.published: asyncio.Future[None] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        self._machine = GrantSource(timeouts)
        self._loop = loop
        self._timer = DeadlineTimer(self._on_timer)
        self._unused: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self._machine.ended

    def watch_unused(self) -> asyncio.Future[None]:
        """Done when nobody uses it any more: it has ended, or its receipt was seen."""
        if self._unused is None:
            self._unused = self._loop.create_future()
            if self.ended or self.receipted:
                settle(self._unused)
        return self._unused

    @property
    def receipted(self) -> bool:
        """The requester's receipt came. What it wrote before is in place."""
        return self._machine.receipted

    def feed(self, event: SourceInput) -> None:
        self._carry_out(self._machine.step(event, self._loop.time()))

    def _on_timer(self) -> None:
        self._carry_out(self._machine.on_deadline(self._loop.time()))

    def _carry_out(self, effects: list[SourceEffect]) -> None:
        for effect in effects:
            self._apply(effect)
        if self._unused is not None and (self.ended or self.receipted):
            settle(self._unused)
        self._timer.arm(self._machine.deadline)

    def _apply(self, effect: SourceEffect) -> None:
        match effect:
            case PostBind():
                self.member.post_bind(self)
            case PostReceive():
                self.feed(ReceivePosted())  # it went before the bind, in the same post
            case Publish():
                settle(self.published)
            case FailExposure(reason, cause):
                settle(self.published, PathUnavailable(PathName.RDMA, reason, cause))
            case RecycleWindow():
                self.member.recycle_window(self)
            case FreeWindow():
                self.member.free_window(self)
            case KillQueuePair(cause):
                self.member.abort(OrbitError(cause))
            case ReleaseMemory():
                self.member.remove(self)
                self.keep = None  # the grant itself may live on, in a cycle with its timer
                settle(self.released)
            case Retain(cause):
                self.member.retain(self, cause)
                settle(
                    self.released,
                    Unquiesced(f"lease on {self.member}", self.record.length, cause),
                )


class SourceMember:
    """One queue pair that serves one requester. Made by `open`; ends by `abort`."""

    def __init__(
        self,
        device: DeviceContext,
        slot: EndpointSlot,
        context: BulkContext,
        tell: MemberNews,
    ) -> None:
        """The slot is this queue pair's from here on. Raises DeviceError, ClosedError, and then it
        is not.
        """
        self.device = device
        self.domain = device.domain
        self.ends: GrantEnds | None = None  # once connected
        self.queue_pair: BulkQueuePair = device.create_queue_pair(self._queue_pair_failed)
        self._windows: WindowPool = self.domain.windows.pool()
        self._receives: BlockPlaces | None = None
        self._reserved = 0  # grants whose bind is not posted yet
        self.found_dead = False  # it had died, and a post was the first to notice
        self._chain: list[tuple[SourceGrant, Posting]] = []  # binds that are posted next
        self._slot = slot
        self._context = context
        self._tell = tell
        self._grants: dict[int, SourceGrant] = {}  # by id; every grant that has not ended
        self._by_key: dict[int, SourceGrant] = {}  # receipt not seen yet
        self._ending: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"queue pair {self.queue_pair.qp_num} of {self.device.name}"

    @property
    def ready(self) -> bool:
        return self.queue_pair.state is QueuePairState.READY

    @property
    def load(self) -> int:
        return len(self._grants)

    @property
    def has_room(self) -> bool:
        """For one more grant: a send slot for its bind and a receive for its receipt."""
        binds = self.queue_pair.send_free - self._reserved
        return self.ready and binds > 0 and self._receives is not None and bool(self._receives.free)

    async def prepare(self) -> None:
        """Register the receive buffers. Raises DeviceError."""
        self._receives = await BlockPlaces.open(self.domain, self.device.config.recv_depth)

    async def connect(self, psn: int, remote: RemoteEnd, ends: GrantEnds, timeout_s: float) -> None:
        """Raises DeviceError, DeadlineExceeded."""
        self.ends = ends
        write = ends.direction == Direction.WRITE
        local = self.device.local_end(psn, remote_read=not write, remote_write=write)
        await self.queue_pair.connect(local, remote, timeout_s)
        self._context.counters.connects += 1

    def reserve(
        self, part: GrantPart, pinned: PinnedBuffer, length: int, parent: int
    ) -> SourceGrant:
        """A grant over `length` bytes of `pinned` that is not begun. The member has room. Raises
        PathUnavailable.
        """
        if self.ends is None or self._receives is None:
            raise ClosedError(str(self))
        window = self._windows.take()
        record = self.ends.record(part, pinned.address, length, window.key)
        receive = self._receives.free.pop()
        grant = SourceGrant(self, record, window, pinned, parent, receive, self._context.timeouts)
        self._grants[id(grant)] = grant
        self._by_key[window.key] = grant
        self._reserved += 1
        return grant

    def bind(self, grants: Sequence[SourceGrant]) -> None:
        """Begin grants that were reserved here. Receives for all of their receipts, and then all of
        their binds, are one post.
        """
        for grant in grants:
            self._reserved -= 1
            self._context.counters.grants += 1
            grant.feed(Bind())
        chain, self._chain = self._chain, []
        receives = [self._receive(grant) for grant, _ in chain]
        now = time.perf_counter()
        for grant, _ in chain:
            grant.bind_posted_at = now
        try:
            self.queue_pair.post_with_receives(receives, [posting for _, posting in chain])
        except (BusyError, ClosedError) as error:
            for grant, _ in chain:
                grant.feed(BindRefused(str(error)))
        except DeviceError as error:
            for grant, _ in chain:
                grant.feed(BindFailed(str(error)))
        else:
            for grant, _ in chain:
                grant.receive = None
            self._context.counters.binds += len(chain)

    def forget(self, grant: SourceGrant) -> None:
        """It will not begin."""
        self._reserved -= 1
        self.recycle_window(grant)
        self.remove(grant)

    def abort(self, cause: OrbitError) -> None:
        """Kill the queue pair: every grant on it ends, by proof or retained. Idempotent."""
        self.queue_pair.fail(cause)  # calls back into _queue_pair_failed
        self._start_ending(cause)

    def close_session(self, cause: OrbitError) -> None:
        """The epoch is over: as `abort`, and grants with a receipt stop waiting for DONE."""
        for grant in list(self._grants.values()):
            grant.feed(SessionClosed())
        self.abort(cause)

    async def wait_closed(self, *, again: bool = False) -> None:
        """After `abort`: until everything of it is gone. `again`: an end that was not proven is
        looked for once more; one that the device refused is not. Raises Unquiesced.
        """
        unproven = self.queue_pair.state is QueuePairState.FAILED
        if again and unproven and self._ending is not None and self._ending.done():
            cause = self.queue_pair.cause or OrbitError("it is over")
            self._ending = asyncio.get_running_loop().create_task(self._end(cause))
            self._ending.add_done_callback(take_exception)
        if self._ending is not None:
            await asyncio.shield(self._ending)

    # --- effects of the machines ---

    def post_bind(self, grant: SourceGrant) -> None:
        write = grant.record.direction == Direction.WRITE
        access = records.WINDOW_WRITE if write else records.WINDOW_READ

        def pack(wr_id: int) -> bytes:
            return records.pack_bind(
                wr_id,
                grant.window.window.native,
                grant.parent,
                grant.record.address,
                grant.record.length,
                grant.record.key,
                access,
                key_now=grant.window.key_now,
            )

        def bound(completion: Completion) -> None:
            if completion.status == 0:
                counters = self._context.counters
                counters.binds_completed += 1
                counters.bind_s += self.queue_pair.lane.found_at - grant.bind_posted_at
                grant.feed(BindCompleted())
            else:
                self._note_dead(completion)
                error = completion_error(completion, self.queue_pair.qp_num, "bind")
                grant.feed(BindFailed(str(error)))

        self._chain.append((grant, Posting("bind", pack, bound)))

    def _receive(self, grant: SourceGrant) -> Posting:
        """For a receipt: of this grant, or of one that was bound with it or before."""
        places, offset = self._receives, grant.receive
        if places is None or offset is None:
            raise ClosedError(str(self))
        block = places.block

        def pack(wr_id: int) -> bytes:
            # Exactly a binding's length: a longer message is a length error and kills the pair.
            return records.pack_recv(wr_id, block.address + offset, BINDING_BYTES, block.lkey)

        def received(completion: Completion) -> None:
            data = bytes(block.view[offset : offset + BINDING_BYTES])
            places.free.append(offset)
            if completion.status == 0:
                self._receipt(completion, data)
            else:
                self._note_dead(completion)

        return Posting("receive", pack, received)

    def _note_dead(self, completion: Completion) -> None:
        """A flush before anything else was heard: posted to a queue pair that had died."""
        self.found_dead |= self.ready and completion.status == WR_FLUSH_ERR

    def recycle_window(self, grant: SourceGrant) -> None:
        self._by_key.pop(grant.record.key, None)
        self._windows.give_back(grant.window, bound=grant.receipted)

    def free_window(self, grant: SourceGrant) -> None:
        self._by_key.pop(grant.record.key, None)
        try:
            self._windows.free(grant.window)
        except DeviceError as error:
            grant.feed(WindowFreeFailed(str(error)))
        else:
            grant.feed(WindowFreed())

    def remove(self, grant: SourceGrant) -> None:
        self._grants.pop(id(grant), None)
        self._by_key.pop(grant.record.key, None)
        self._context.retained.remove(grant)
        receive, grant.receive = grant.receive, None
        if receive is not None and self._receives is not None:
            self._receives.free.append(receive)
        if not self._grants:
            self._slot.idle()
            if self.domain.left:
                self._tell.unused()

    def retain(self, grant: SourceGrant, cause: str) -> None:
        now = asyncio.get_running_loop().time()
        self._context.retained.add(grant, f"grant on {self}", grant.record.length, cause, now)

    # --- what the device says ---

    def _receipt(self, completion: Completion, data: bytes) -> None:
        grant = self._by_key.pop(completion.invalidated, None)
        if grant is None or self.ends is None:
            self.abort(OrbitError("a receipt for no grant of this queue pair"))
            return
        matches = completion.byte_len == BINDING_BYTES
        try:
            verify_binding(data, grant.record.binding(), self.ends.session_key)
        except BindingError as error:
            logger.warning("%s: receipt refused: %s", self, error)
            matches = False
        if matches:
            self._context.counters.receipts += 1
        grant.feed(Receipt(matches))

    def _queue_pair_failed(self, cause: OrbitError) -> None:
        for grant in list(self._grants.values()):
            grant.feed(QueuePairFailed(str(cause)))
        self._start_ending(cause)

    def _start_ending(self, cause: OrbitError) -> None:
        if self._ending is None:
            self._context.counters.aborts += 1
            self._slot.leave()
            self._ending = asyncio.get_running_loop().create_task(self._end(cause))
            self._ending.add_done_callback(take_exception)
            self._tell.lost(self)

    async def _end(self, cause: OrbitError) -> None:
        """ERR and drain; then the windows; then the queue pair. In this order, or an rxe kernel
        waits 50 s in the destroy.
        """
        try:
            await self.queue_pair.drain(cause)
        except Unquiesced as error:
            for grant in list(self._grants.values()):
                grant.feed(DrainUnproven(error.cause))
            self._retain_self(error.cause)
            raise
        for grant in list(self._grants.values()):
            grant.feed(Drained())
        try:
            self._windows.close()
            await self.device.destroy_queue_pair(self.queue_pair)
            self._slot.give_back()
            if self._receives is not None:
                await self._receives.close()
        except (DeviceError, TimeoutError) as error:
            self._retain_self(str(error))
            raise Unquiesced(str(self), 0, str(error)) from error
        self._context.retained.remove(self)

    def _retain_self(self, cause: str) -> None:
        self._slot.keep()
        now = asyncio.get_running_loop().time()
        self._context.retained.add(self, str(self), 0, cause, now)


def oldest_bind_at(members: Iterable[SourceMember]) -> float | None:
    """When the oldest of their grants that have not ended was bound (time.perf_counter)."""
    posted = (grant.bind_posted_at for m in members for grant in m._grants.values())
    return min((at for at in posted if at), default=None)


def is_unused(member: SourceMember) -> bool:
    """Nobody would notice its end: every receipt of its grants was seen."""
    return all(grant.ended or grant.receipted for grant in member._grants.values())
