"""The producing end of one stream: carries out what its machine decides.

Items wait here for credit, then go to the link. One that is too long for a message is copied into
the node's own staging first and keeps its place: what follows waits for the copy. It knows the
route that the stream was attached over, and no other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ClosedError, InternalError, OrbitError, StreamError
from ...memory.buffer import BufferExport
from ...model import Handle
from ...protocol.streams import sender as machines
from ...protocol.streams.ends import EndKind, StreamEnd, StreamWindow
from ...protocol.streams.frames import Note, NoteKind
from ...protocol.streams.handle import StreamHandle
from ...transport.timer import DeadlineTimer
from .routes import Route
from .stream_frames import ItemStore, StreamFrame

STAGE_ABOVE_BYTES = 256 << 10  # as for messages: an item above it travels by rendezvous


class SenderRegistry(Protocol):
    """What `Streams` is to a sending end."""

    @property
    def store(self) -> ItemStore: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a background task of the node."""

    def sender_waits(self) -> None: ...

    def sender_ended(self, stream: SendingStream, end: StreamEnd) -> None: ...


@dataclass(slots=True, eq=False)
class PendingItem:
    """One item on its way out: its bytes, and who waits until it has left."""

    payload: bytes | BufferExport
    nbytes: int
    sent: asyncio.Future[None] | None = None
    settled: bool = False

    def settle(self, error: OrbitError | None = None) -> None:
        """It has left, or it never will. The caller's memory is the caller's again."""
        self.settled = True
        if isinstance(self.payload, BufferExport):
            self.payload.release()
        if self.sent is None or self.sent.done():
            return
        if error is None:
            self.sent.set_result(None)
        else:
            self.sent.set_exception(error)
            self.sent.exception()  # nobody has to wait for it


@dataclass(slots=True, eq=False)
class _Outgoing:
    """What left the machine and not this node: a note, behind an item that is being staged."""

    note: Note
    item: PendingItem | None


class SendingStream:
    """One attachment. The registry holds it, not the user's object, whose end it hears of."""

    def __init__(
        self,
        registry: SenderRegistry,
        handle: StreamHandle,
        attachment: int,
        route: Route,
        window: StreamWindow,
        heartbeat_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.handle = handle
        self.attachment = attachment
        self.route = route
        self.machine = machines.StreamSender(window, heartbeat_s, self._loop.time())
        self.over = asyncio.Event()
        self.ended: asyncio.Future[StreamEnd] = self._loop.create_future()
        self._registry = registry
        self._eager_bytes = min(STAGE_ABOVE_BYTES, route.link.ceiling_bytes, window.nbytes // 2)
        self._items: dict[int, PendingItem] = {}  # by ticket: waiting for credit
        self._last_ticket = 0
        self._line: deque[_Outgoing] = deque()  # behind an item that is being staged
        self._staging: PendingItem | None = None
        self._staged: dict[int, Handle] = {}  # by sequence, until the receiver's reader took it
        self._timer = DeadlineTimer(self._deadline_passed)
        route.holds += 1
        self._timer.arm(self.machine.deadline)
        self._send(NoteKind.HEARTBEAT)  # it also tells the receiver which route this is

    # --- what the user's object asks ---

    def submit(self, payload: bytes | BufferExport, nbytes: int) -> tuple[int, PendingItem]:
        """Send an item as soon as there is room. Raises StreamError when there will never be."""
        self._last_ticket = ticket = self._last_ticket + 1
        item = PendingItem(payload, nbytes)
        self._items[ticket] = item
        self._feed(machines.Submit(ticket, nbytes))
        if ticket in self._items:
            self._registry.sender_waits()
        if not item.settled:
            item.sent = self._loop.create_future()
        return ticket, item

    def has_room(self, nbytes: int) -> bool:
        return self.machine.has_room(nbytes) and not self._line and nbytes <= self._eager_bytes

    def withdraw(self, ticket: int) -> None:
        """Forget a send that still waits for room."""
        item = self._items.pop(ticket, None)
        if item is not None:
            item.settle()
            self._feed(machines.Withdraw(ticket))

    def finalize(self) -> None:
        if self.machine.state is machines.SenderState.ATTACHED:
            self._feed(machines.Finalize())

    def abandon(self, kind: NoteKind, text: str = "") -> None:
        """End it now, unless it ends already."""
        self._feed(machines.Abandon(kind, text))

    def check_sendable(self) -> None:
        """Raises StreamError, or ClosedError after this side's own end."""
        if self.machine.state is machines.SenderState.ATTACHED:
            return
        end = self.machine.end
        if end is None or end.kind is EndKind.FINALIZED:
            raise ClosedError(f"sending to {self.handle}")
        raise end.error() or InternalError("an end without an error")

    # --- what the other side says ---

    def on_note(self, note: Note) -> None:
        match note.kind:
            case NoteKind.CREDIT:
                self._forget_withdrawn()
                self._feed(machines.Credited(note.sequence, note.bytes_limit))
                for sequence in [s for s in self._staged if s < self.machine.items_taken]:
                    del self._staged[sequence]  # fetched: the receiver has released it
            case NoteKind.CANCEL:
                self._feed(machines.Cancelled(note.text))
            case NoteKind.FINISHED:
                self._staged.clear()
                self._feed(machines.Finished())
            case _:
                raise InternalError(f"note {note.kind.name} for a sender")

    def lost(self, text: str) -> None:
        """The route is gone."""
        self._feed(machines.LinkLost(text))

    def frame_failed(self, text: str) -> None:
        self.lost(text)

    # --- effects ---

    def _feed(self, event: machines.SenderInput) -> None:
        for effect in self.machine.step(event, self._loop.time()):
            self._carry_out(effect)
        self._timer.arm(self.machine.deadline)

    def _deadline_passed(self) -> None:
        for effect in self.machine.on_deadline(self._loop.time()):
            self._carry_out(effect)
        self._timer.arm(self.machine.deadline)

    def _carry_out(self, effect: machines.SenderEffect) -> None:
        match effect:
            case machines.SendItem(ticket, sequence):
                item = self._items.pop(ticket)
                kind = NoteKind.ITEM if item.nbytes <= self._eager_bytes else NoteKind.STAGED
                note = self._note(kind, sequence)._replace(nbytes=item.nbytes)
                self._put_in_line(_Outgoing(note, item))
            case machines.Refuse(ticket):
                self._items.pop(ticket).settle(self._error())
            case machines.SendTerminal(kind, sequence, text):
                self._put_in_line(_Outgoing(self._note(kind, sequence)._replace(text=text), None))
            case machines.SendHeartbeat():
                self._send(NoteKind.HEARTBEAT)
            case machines.Release():
                self._release()

    def _put_in_line(self, outgoing: _Outgoing) -> None:
        if self._line:
            self._line.append(outgoing)  # somebody is at work on the first
        elif outgoing.note.kind is NoteKind.STAGED:
            self._line.append(outgoing)
            self._registry.spawn(self._work_off_line(), f"items of {self.handle}")
        else:
            self._let_go(outgoing)

    async def _work_off_line(self) -> None:
        while self._line:
            outgoing = self._line[0]
            if outgoing.note.kind is NoteKind.STAGED:
                staged = await self._stage(outgoing)
                if staged is None:
                    return
                outgoing = staged
            if self._line:
                self._line.popleft()
                self._let_go(outgoing)

    async def _stage(self, outgoing: _Outgoing) -> _Outgoing | None:
        """The note with its handle, or None: the stream is over."""
        item = outgoing.item
        assert item is not None
        payload = item.payload
        self._staging = item
        try:
            handle = await self._registry.store.stage_copy(
                payload.view if isinstance(payload, BufferExport) else payload
            )
        except (OrbitError, MemoryError) as error:
            text = f"an item was not staged: {error}"
            item.settle(StreamError(EndKind.FAILED.value, text))
            self._clear_line(StreamError(EndKind.FAILED.value, text))
            sequence = outgoing.note.sequence
            self._feed(machines.Abandon(NoteKind.FAILED, text, sequence))
            return None
        finally:
            self._staging = None
        if not self._line:  # the stream ended meanwhile
            item.settle(self._error())
            await self._take_back([handle])
            return None
        self._staged[outgoing.note.sequence] = handle
        return _Outgoing(outgoing.note._replace(handle=handle), item)

    def _let_go(self, outgoing: _Outgoing) -> None:
        item, payload = outgoing.item, b""
        if item is not None:
            if outgoing.note.kind is NoteKind.ITEM:
                held = item.payload
                payload = held if isinstance(held, bytes) else bytes(held.view)
            item.settle()
        self.route.link.send(StreamFrame(self, outgoing.note, payload))

    def _clear_line(self, error: OrbitError) -> None:
        for outgoing in self._line:
            # What is being copied cannot be let go: it is settled when the copy is made.
            if outgoing.item is not None and outgoing.item is not self._staging:
                outgoing.item.settle(error)
        self._line.clear()

    def _release(self) -> None:
        end = self.machine.end
        assert end is not None
        self._clear_line(self._error())
        self.route.holds -= 1
        self.over.set()
        staged = list(self._staged.values())
        self._staged.clear()
        if staged:
            self._registry.spawn(self._take_back(staged), f"staged items of {self.handle}")
        if not self.ended.done():
            self.ended.set_result(end)
        self._registry.sender_ended(self, end)

    async def _take_back(self, handles: list[Handle]) -> None:
        for handle in handles:
            with suppress(OrbitError):  # the receiver has it, and has released it
                await self._registry.store.withdraw(handle)

    def _send(self, kind: NoteKind) -> None:
        self.route.link.send(StreamFrame(self, self._note(kind, 0)))

    def _note(self, kind: NoteKind, sequence: int) -> Note:
        return Note(kind, self.handle.stream_id, self.attachment, sequence)

    def _error(self) -> OrbitError:
        end = self.machine.end
        error = None if end is None else end.error()
        return error or ClosedError(f"sending to {self.handle}")

    def _forget_withdrawn(self) -> None:
        """Sends whose callers gave up in this very round of the loop: they must not go out now."""
        for ticket in [t for t, i in self._items.items() if i.sent and i.sent.cancelled()]:
            self.withdraw(ticket)
