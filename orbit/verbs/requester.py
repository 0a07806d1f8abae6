"""The requester's shell: one queue pair of a bulk array at the consumer, and the transfers on it.

It runs one `GrantRequester` machine per transfer and carries out its effects: READs or WRITEs, the
fenced receipt, and the end of the whole queue pair. It takes no decision about a transfer's life
and knows nothing of where the local memory came from.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import BusyError, ClosedError, DeviceError, OrbitError, PathFailed, Unquiesced
from ..model import Direction, PathName, PathReason
from ..protocol.binding import BINDING_BYTES, GrantRecord
from ..protocol.grants import (
    Cancel,
    Complete,
    Drained,
    DrainUnproven,
    Fail,
    GrantRequester,
    GrantTimeouts,
    KillQueuePair,
    Piece,
    PieceFailed,
    PiecesCompleted,
    Post,
    PostFailed,
    QueuePairFailed,
    ReceiptCompleted,
    ReceiptFailed,
    ReleaseTarget,
    RequesterEffect,
    RequesterInput,
    RequesterState,
    Retain,
    RoundPlanner,
    SessionClosed,
    Start,
)
from ..transport.interface import Progress
from ..transport.timer import DeadlineTimer
from . import records
from .admission import SendAdmission, Share
from .block_places import BlockPlaces
from .bulk_context import BulkContext
from .device import DeviceContext
from .endpoints import EndpointSlot
from .grant_ends import GrantEnds
from .outcomes import settle, take_exception
from .queue_pair import BulkQueuePair, Posting, QueuePairState, RemoteEnd, completion_error
from .records import Completion
from .registration import Segment

# Send slots beside the shares: a transfer that is given up before it got a share still returns its
# grant by a receipt.
_SPARE_SLOTS = 2
_INLINE_BYTES = BINDING_BYTES


# A device reaches memory whether or not somebody still holds the path: an event loop that ends in
# the middle must not free what is being used. The last reference goes when the transfer ends.
_in_flight: set[Transfer] = set()


class LocalMemory:
    """What a transfer fills or empties: segments in payload order, and what must stay alive
    meanwhile.
    """

    __slots__ = ("_segments", "_starts", "keep")

    def __init__(self, segments: Sequence[Segment], keep: object) -> None:
        self.keep = keep
        self._segments = segments
        starts, start = [], 0
        for segment in segments:
            starts.append(start)
            start += segment.nbytes
        self._starts = starts

    @property
    def borders(self) -> Sequence[int]:
        """Offsets at which the key changes."""
        return self._starts[1:]

    def locate(self, offset: int) -> tuple[int, int]:
        """Address and local key of the byte at `offset`, good until the next border."""
        index = bisect_right(self._starts, offset) - 1
        segment = self._segments[index]
        return segment.address + offset - self._starts[index], segment.lkey

    def cut(self, offset: int, nbytes: int) -> LocalMemory:
        """A part of it, which keeps alive what the whole does."""
        parts, end = [], offset + nbytes
        for start, (address, lkey, size) in zip(self._starts, self._segments, strict=True):
            low, high = max(offset, start), min(end, start + size)
            if low < high:
                parts.append(Segment(address + low - start, lkey, high - low))
        return LocalMemory(parts, self.keep)


class Transfer:
    """One granted range on its way into local memory, or out of it.

    `finished` ends when nothing can reach the local memory any more (PathFailed), when every byte
    has moved (None), or with Unquiesced. `ended` comes later: the receipt's completion is
    accounted.
    """

    def __init__(
        self, member: RequesterMember, record: GrantRecord, timeouts: GrantTimeouts
    ) -> None:
        self.member = member
        self.record = record
        self.memory: LocalMemory | None = None
        self.progress: Progress | None = None
        self.share: Share | None = None
        self._posted_at = 0.0
        self._arrived_at = 0.0
        self._completed = 0  # pieces of this batch of completions that the machine has not heard of
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._on_timer)
        self._machine = GrantRequester(self._new_planner(record.length, 2), timeouts)

    @property
    def ended(self) -> bool:
        return self._machine.ended

    @property
    def started(self) -> bool:
        return self.memory is not None

    @property
    def delivered(self) -> bool:
        """Every byte has moved, and nothing failed."""
        return self.finished.done() and self.finished.exception() is None

    @property
    def moved_between(self) -> tuple[float, float]:
        """When its first piece was posted, and its last one completed, by time.perf_counter."""
        return self._posted_at, self._arrived_at

    @property
    def startable(self) -> bool:
        """Neither started nor given up, and its queue pair lives."""
        return self._machine.state is RequesterState.READY

    def start(self, memory: LocalMemory, share: Share, progress: Progress | None) -> None:
        """Begin. The share comes back when the transfer has ended."""
        self.memory, self.share, self.progress = memory, share, progress
        inflight_bytes = share.inflight_bytes or self.record.length
        self._machine.planner = self._new_planner(inflight_bytes, share.slots, memory.borders)
        self.feed(Start())

    def cancel(self, cause: str) -> None:
        """Give up; `finished` still comes only when the local memory is out of reach."""
        if not self.ended:
            self.feed(Cancel(cause))

    def feed(self, event: RequesterInput) -> None:
        try:
            self._count_completed()
        finally:  # the caller's `progress` may raise
            self._carry_out(self._machine.step(event, self._loop.time()))

    def posted(self, at: float) -> None:
        """Work requests of this transfer went out, the first of them at that time."""
        self._posted_at = self._posted_at or at

    def post_failed(self, error: OrbitError) -> None:
        """They did not all go out."""
        if not self.ended:
            self.feed(PostFailed(str(error)))

    def piece_completed(self, completion: Completion, opcode: str, nbytes: int) -> None:
        if self.ended:
            return
        if completion.status != 0:
            qp_num = self.member.queue_pair.qp_num
            self.feed(PieceFailed(str(completion_error(completion, qp_num, opcode))))
            return
        self._arrived_at = self.member.queue_pair.lane.found_at
        self.member.count_moved(nbytes)
        self._completed += 1
        if self._completed > 1:
            return
        if not self.member.queue_pair.lane.after_batch(self._count_completed):
            self._count_completed()

    def _count_completed(self) -> None:
        """Let the machine hear of them together, before anything else that comes."""
        count, self._completed = self._completed, 0
        if not count or self.ended:
            return
        self._carry_out(self._machine.step(PiecesCompleted(count), self._loop.time()))
        if self.progress is not None:
            self.progress(self._machine.planner.completed_bytes)

    def receipt_completed(self, completion: Completion) -> None:
        if self.ended:
            return
        if completion.status == 0:
            if self._arrived_at:
                found_at = self.member.queue_pair.lane.found_at
                self.member.context.counters.receipt_s += found_at - self._arrived_at
            self.feed(ReceiptCompleted())
        else:
            qp_num = self.member.queue_pair.qp_num
            self.feed(ReceiptFailed(str(completion_error(completion, qp_num, "receipt"))))

    def _new_planner(
        self, inflight_bytes: int, slots: int, borders: Sequence[int] = ()
    ) -> RoundPlanner:
        return RoundPlanner(
            self.record.length,
            piece_bytes=self.member.device.config.piece_bytes,
            inflight_bytes_max=inflight_bytes,
            send_slots=slots,
            borders=borders,
        )

    def _on_timer(self) -> None:
        self._carry_out(self._machine.on_deadline(self._loop.time()))

    def _carry_out(self, effects: list[RequesterEffect]) -> None:
        for effect in effects:
            self._apply(effect)
        self._timer.arm(self._machine.deadline)
        if self._machine.ended:
            self.member.release(self)

    def _apply(self, effect: RequesterEffect) -> None:
        match effect:
            case Post(pieces, receipt):
                self.member.post(self, pieces, receipt=receipt)
            case Complete():
                self._let_go()
                settle(self.finished)
            case Fail(cause, _):
                self._let_go()
                detail = f"{self.member.device.name}: {cause}"  # of several rails, this one
                settle(self.finished, PathFailed(PathName.RDMA, PathReason.GET_FAILED, detail))
            case KillQueuePair(cause):
                self.member.abort(OrbitError(cause))
            case Retain(cause):
                self.member.retain(self, cause)
                settle(self.finished, Unquiesced("local memory", self.record.length, cause))
            case ReleaseTarget():
                self.member.context.retained.remove(self)

    def _let_go(self) -> None:
        """Nothing reaches the memory any more: it need not live as long as the receipt's wait."""
        if self.memory is not None:
            self.memory.keep = None


class _Round(NamedTuple):
    """What one transfer posts at once."""

    transfer: Transfer
    postings: Sequence[Posting]
    pieces: int
    receipt: bool


class RequesterMember:
    """One queue pair that reads from one source, or writes to it. Made connected by its array; ends
    by `abort`.
    """

    def __init__(
        self,
        device: DeviceContext,
        direction: Direction,
        index: int,
        slot: EndpointSlot,
        context: BulkContext,
        on_lost: Callable[[RequesterMember], None],
    ) -> None:
        """The slot is this queue pair's from here on. Raises DeviceError, ClosedError, and then it
        is not.
        """
        config = device.config
        self.device = device
        self.direction = direction
        self.index = index
        self.ends: GrantEnds | None = None  # once connected
        self.domain = device.domain
        self.queue_pair: BulkQueuePair = device.create_queue_pair(
            self._queue_pair_failed, _INLINE_BYTES
        )
        self.context = context
        self.admission = SendAdmission(
            max(2, config.send_depth - _SPARE_SLOTS),
            config.inflight_bytes,
            config.piece_bytes,
            config.nap_bytes_max,
        )
        self._bindings: BlockPlaces | None = None
        self._slot = slot
        self._on_lost = on_lost
        self._transfers: dict[int, Transfer] = {}
        self._held: list[_Round] | None = None  # of one chain that has not left
        self._idle = asyncio.Event()  # nothing that was accepted has not ended
        self._idle.set()
        self._ending: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"queue pair {self.queue_pair.qp_num} of {self.device.name}"

    @property
    def ready(self) -> bool:
        return self.queue_pair.state is QueuePairState.READY

    @property
    def load(self) -> int:
        """Transfers that have not ended."""
        return len(self._transfers)

    async def prepare(self) -> None:
        """Register the buffers that bindings are sent from. Raises DeviceError."""
        self._bindings = await BlockPlaces.open(self.domain, self.device.config.send_depth)

    async def connect(self, psn: int, remote: RemoteEnd, ends: GrantEnds, timeout_s: float) -> None:
        """Raises DeviceError, DeadlineExceeded."""
        self.ends = ends
        local = self.device.local_end(psn, remote_read=False)
        await self.queue_pair.connect(local, remote, timeout_s)
        self.context.counters.connects += 1

    def mismatch(self, record: GrantRecord) -> tuple[str, ...]:
        """Fields in which a grant record differs from this connection; empty when it fits."""
        return ("connection",) if self.ends is None else self.ends.mismatch(record)

    def accept(self, record: GrantRecord) -> Transfer:
        """A transfer of that grant, not started. From here on it ends with the queue pair."""
        if not self.ready:
            raise ClosedError(str(self))
        transfer = Transfer(self, record, self.context.timeouts)
        self._transfers[id(transfer)] = transfer
        self._idle.clear()
        _in_flight.add(transfer)
        return transfer

    def abort(self, cause: OrbitError) -> None:
        """Kill the queue pair: every transfer on it ends, by proof or retained. Idempotent."""
        self.queue_pair.fail(cause)  # calls back into _queue_pair_failed
        self._start_ending(cause)

    def close_session(self, cause: OrbitError) -> None:
        """The epoch is over: as `abort`, and completed transfers stop waiting for receipts."""
        for transfer in list(self._transfers.values()):
            transfer.feed(SessionClosed())
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

    async def wait_idle(self) -> None:
        """Until every transfer has ended, its receipt included; each has its own deadlines."""
        await self._idle.wait()

    # --- effects of the machines ---

    @contextlib.contextmanager
    def one_post(self) -> Iterator[None]:
        """What transfers post within is one chain, which leaves at the end."""
        if self._held is not None:  # as part of a chain that leaves later
            yield
            return
        self._held = []
        try:
            yield
        finally:
            self._post_held()

    def post(self, transfer: Transfer, pieces: tuple[Piece, ...], *, receipt: bool) -> None:
        try:
            postings = [self._piece(transfer, piece) for piece in pieces]
            if receipt:
                postings.append(self._receipt(transfer))
        except (BusyError, ClosedError) as error:
            transfer.post_failed(error)
            return
        round_ = _Round(transfer, postings, len(pieces), receipt)
        if self._held is not None:
            self._held.append(round_)
        elif self.queue_pair.lane.after_batch(self._post_held):
            self._held = [round_]  # what other completions cause leaves with it
        else:
            self._post([round_])

    def release(self, transfer: Transfer) -> None:
        """The transfer has ended."""
        self._transfers.pop(id(transfer), None)
        _in_flight.discard(transfer)
        self.context.retained.remove(transfer)
        share, transfer.share = transfer.share, None
        if share is not None:
            self.admission.release(share)
        if not self._transfers:
            self._idle.set()
            self._slot.idle()

    def retain(self, transfer: Transfer, cause: str) -> None:
        now = asyncio.get_running_loop().time()
        what = "target" if self.direction is Direction.READ else "source"
        self.context.retained.add(transfer, f"{what} on {self}", transfer.record.length, cause, now)

    def count_moved(self, nbytes: int) -> None:
        if self.direction is Direction.READ:
            self.context.counters.read_bytes += nbytes
        else:
            self.context.counters.written_bytes += nbytes

    def _piece(self, transfer: Transfer, piece: Piece) -> Posting:
        record, memory = transfer.record, transfer.memory
        if memory is None:
            raise ClosedError("a transfer without local memory")
        address, lkey = memory.locate(piece.offset)
        remote = record.address + piece.offset
        read = self.direction is Direction.READ
        pack_piece = records.pack_read if read else records.pack_write
        opcode = "read" if read else "write"
        return Posting(
            opcode,
            lambda wr_id: pack_piece(wr_id, address, lkey, piece.nbytes, remote, record.key),
            lambda completion: transfer.piece_completed(completion, opcode, piece.nbytes),
        )

    def _receipt(self, transfer: Transfer) -> Posting:
        """The binding leaves inline where the device granted that, else from registered memory."""
        places, ends = self._bindings, self.ends
        if places is None or ends is None or not places.free:
            raise BusyError("no buffer for a receipt")
        block, offset = places.block, places.free.pop()
        block.view[offset : offset + BINDING_BYTES] = transfer.record.binding().encode(
            ends.session_key
        )
        flags = records.SIGNALED | records.FENCE
        if self.queue_pair.inline_bytes >= BINDING_BYTES:
            flags |= records.INLINE

        def pack(wr_id: int) -> bytes:
            return records.pack_send_with_inv(
                wr_id, block.address + offset, block.lkey, BINDING_BYTES, transfer.record.key, flags
            )

        def completed(completion: Completion) -> None:
            places.free.append(offset)
            transfer.receipt_completed(completion)

        return Posting("receipt", pack, completed)

    def _post_held(self) -> None:
        held, self._held = self._held, None
        if held:
            self._post(held)

    def _post(self, rounds: Sequence[_Round]) -> None:
        try:
            self.queue_pair.post_send([posting for one in rounds for posting in one.postings])
        except (BusyError, ClosedError, DeviceError) as error:
            for one in rounds:
                one.transfer.post_failed(error)
            return
        counters, reads = self.context.counters, self.direction is Direction.READ
        for one in rounds:
            one.transfer.posted(self.queue_pair.posted_at)
            if reads:
                counters.reads += one.pieces
            else:
                counters.writes += one.pieces
            counters.receipts_sent += one.receipt

    # --- what the device says ---

    def _queue_pair_failed(self, cause: OrbitError) -> None:
        for transfer in list(self._transfers.values()):
            transfer.feed(QueuePairFailed(str(cause)))
        self._start_ending(cause)

    def _start_ending(self, cause: OrbitError) -> None:
        if self._ending is None:
            self.context.counters.aborts += 1
            self.admission.close()
            self._slot.leave()
            self._ending = asyncio.get_running_loop().create_task(self._end(cause))
            self._ending.add_done_callback(take_exception)
            self._on_lost(self)

    async def _end(self, cause: OrbitError) -> None:
        try:
            await self.queue_pair.drain(cause)
        except Unquiesced as error:
            for transfer in list(self._transfers.values()):
                transfer.feed(DrainUnproven(error.cause))
            self._retain_self(error.cause)
            raise
        for transfer in list(self._transfers.values()):
            transfer.feed(Drained())
        try:
            await self.device.destroy_queue_pair(self.queue_pair)
            self._slot.give_back()
            if self._bindings is not None:
                await self._bindings.close()
        except (DeviceError, TimeoutError) as error:
            self._retain_self(str(error))
            raise Unquiesced(str(self), 0, str(error)) from error
        self.context.retained.remove(self)

    def _retain_self(self, cause: str) -> None:
        self._slot.keep()
        now = asyncio.get_running_loop().time()
        self.context.retained.add(self, str(self), 0, cause, now)
