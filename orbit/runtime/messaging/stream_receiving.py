"""The receiving end of one stream: keeps its items, carries out what its machine decides, and wakes
the reader.

Items are taken out of the link's count at once, since the stream's window was promised for them.
Staged ones are fetched beside each other and are read in their turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, Protocol

from ...errors import (
    BudgetExceeded,
    BusyError,
    InternalError,
    OrbitError,
    PeerError,
    PeerProtocolError,
    UnknownHandle,
)
from ...model import Handle, Lease, PeerIdentity
from ...protocol.codec import decode
from ...protocol.streams import receiver as machines
from ...protocol.streams.ends import EndKind, StreamEnd, StreamWindow
from ...protocol.streams.frames import TERMINALS, Note, NoteKind
from ...protocol.streams.handle import StreamHandle
from ...transport.timer import DeadlineTimer
from .contract import release_current_charge
from .routes import Route
from .stream_frames import ItemStore, StreamFrame

ItemTypes = type | tuple[type, ...]

_BROKEN: Final = object()


class ReceiverRegistry(Protocol):
    """What `Streams` is to a receiving end."""

    @property
    def store(self) -> ItemStore: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a background task of the node."""

    def item_refused(self) -> None:
        """An item was larger than this node takes."""

    def receiver_ended(self, stream: ReceivingStream, end: StreamEnd) -> None: ...


class ReceivingStream:
    """One stream of this node. The registry holds it, not the user's object, whose end it hears of.

    `producer` and `attachment` say whose notes are its; `route` is known from the first of them on.
    """

    def __init__(
        self,
        registry: ReceiverRegistry,
        handle: StreamHandle,
        items: int,
        item_types: ItemTypes | None,
        heartbeat_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.handle = handle
        self.items = items
        self.machine = machines.StreamReceiver(heartbeat_s)
        self.producer: PeerIdentity | None = None
        self.attachment = 0
        self.window_bytes = 0
        self.route: Route | None = None
        self._registry = registry
        self._item_types = item_types
        self._payloads: deque[memoryview | None] = deque()  # one for each place of the machine
        self._fetching: dict[int, asyncio.Task[None]] = {}  # by sequence
        self._reader: asyncio.Future[None] | None = None
        self._timer = DeadlineTimer(self._deadline_passed)
        self._released = False

    @property
    def typed(self) -> bool:
        return self._item_types is not None

    @property
    def ended(self) -> bool:
        """Nothing is left to read."""
        return self.machine.state is machines.ReceiverState.ENDED

    # --- the producer ---

    def attach(self, producer: PeerIdentity, attachment: int, window_bytes: int) -> None:
        self.producer, self.attachment = producer, attachment
        self.window_bytes = window_bytes
        self._feed(machines.Attach(StreamWindow(self.items, window_bytes)))

    def on_note(self, route: Route, note: Note, payload: memoryview) -> None:
        """From the attached producer. `payload` is this node's own memory."""
        if self.route is None:
            self.route = route
            route.holds += 1
        if route is not self.route or not self.machine.bound:
            return  # it crossed an end that this side has sent
        match note.kind:
            case NoteKind.ITEM:
                self._feed(machines.ItemArrived(note.sequence, len(payload)), payload)
            case NoteKind.STAGED:
                self._staged(note, route.peer)
            case NoteKind.HEARTBEAT:
                self._feed(machines.Heartbeat())
            case kind if kind in TERMINALS:
                self._feed(machines.TerminalArrived(kind, note.sequence, note.text))
            case _:
                raise InternalError(f"note {note.kind.name} for a receiver")

    def lost(self, text: str) -> None:
        """The route is gone."""
        self._feed(machines.LinkLost(text))

    def frame_failed(self, text: str) -> None:
        if self.machine.bound:
            self.lost(text)

    # --- the reader ---

    async def next(self) -> object:
        """The next item. Raises StopAsyncIteration at the good end, StreamError at another, and
        BusyError while another task waits here.
        """
        while True:
            if self.machine.ready:
                value = self._first()
                if value is not _BROKEN:
                    self._payloads.popleft()
                    self._feed(machines.Taken())
                    return value
            elif self.ended:
                error = None if self.machine.end is None else self.machine.end.error()
                raise StopAsyncIteration if error is None else error
            else:
                await self._news()

    def cancel(self) -> None:
        """The reader wants no more, what is buffered included. Nothing happens after the end."""
        self._feed(machines.Cancel())

    # --- within ---

    async def _news(self) -> None:
        if self._reader is not None:
            raise BusyError(f"another task reads {self.handle}")
        release_current_charge()
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _first(self) -> object:
        """The first item as the reader wants it; _BROKEN when it ends the stream instead."""
        payload = self._payloads[0]
        if self._item_types is None:
            return payload
        assert payload is not None
        sequence = self.machine.items_taken
        try:
            value = decode(payload)
        except PeerProtocolError as error:
            text = f"item {sequence} is no msgpack value: {error}"
        else:
            if isinstance(value, self._item_types):
                return value
            text = f"item {sequence} is of type {type(value).__name__}"
        self._feed(machines.ItemBroken(sequence, text))
        return _BROKEN

    def _staged(self, note: Note, peer: PeerIdentity) -> None:
        handle = note.handle
        assert handle is not None
        if handle.worker_id != peer.worker_id:
            raise PeerProtocolError(f"an item staged at another node: {handle}")
        for effect in self._step(machines.ItemArrived(note.sequence, note.nbytes, staged=True)):
            if isinstance(effect, machines.Fetch):
                self._payloads.append(None)
                work = self._fetch(note.sequence, handle, note.nbytes)
                task = self._registry.spawn(work, f"item {note.sequence} of {self.handle}")
                self._fetching[note.sequence] = task
            else:
                self._carry_out(effect)
        self._settle()

    async def _fetch(self, sequence: int, handle: Handle, nbytes: int) -> None:
        try:
            # No bound in time: a stream whose item was dropped could not go on.
            data, lease = await self._registry.store.fetch(handle, None)
        except OrbitError as error:
            self._fetching.pop(sequence, None)
            if isinstance(error, BudgetExceeded):
                self._registry.item_refused()
            # A producer that hears of a dead link before this side does takes its items back.
            gone = isinstance(error, PeerError | UnknownHandle)
            kind = EndKind.LOST if gone else EndKind.FAILED
            text = f"item {sequence} was not fetched: {error}"
            self._feed(machines.ItemBroken(sequence, text, kind))
            return
        self._fetching.pop(sequence, None)
        # The producer's slot goes with the release, whatever became of the stream meanwhile.
        self._registry.spawn(self._give_back(handle, lease), f"release of item {sequence}")
        index = sequence - self.machine.items_taken
        if len(data) != nbytes:
            text = f"item {sequence} has {len(data)} bytes in place of {nbytes}"
            self._feed(machines.ItemBroken(sequence, text))
        elif 0 <= index < len(self._payloads):
            self._payloads[index] = data
            self._feed(machines.Fetched(sequence))

    async def _give_back(self, handle: Handle, lease: Lease) -> None:
        with suppress(OrbitError):  # it ended with its epoch, or its owner took it back
            await self._registry.store.release(handle, lease)

    def _feed(self, event: machines.ReceiverInput, payload: memoryview | None = None) -> None:
        effects = self._step(event)
        if payload is not None and len(self._payloads) < self.machine.buffered:
            self._payloads.append(payload)
        for effect in effects:
            self._carry_out(effect)
        self._settle()

    def _step(self, event: machines.ReceiverInput) -> list[machines.ReceiverEffect]:
        return self.machine.step(event, self._loop.time())

    def _deadline_passed(self) -> None:
        for effect in self.machine.on_deadline(self._loop.time()):
            self._carry_out(effect)
        self._settle()

    def _carry_out(self, effect: machines.ReceiverEffect) -> None:
        match effect:
            case machines.SendCredit(items_limit, bytes_limit):
                self._send(NoteKind.CREDIT, items_limit, bytes_limit=bytes_limit)
            case machines.SendCancel(text):
                self._send(NoteKind.CANCEL, text=text)
            case machines.SendFinished():
                self._send(NoteKind.FINISHED)
            case machines.Unbind():
                if self.route is not None:
                    self.route.holds -= 1
                for task in self._fetching.values():
                    task.cancel()
                self._fetching.clear()
            case machines.Fetch():
                raise InternalError("a fetch without a handle")

    def _settle(self) -> None:
        """After each step: what the machine has given up goes, the reader hears what is new."""
        while len(self._payloads) > self.machine.buffered:
            self._payloads.pop()
        self._timer.arm(self.machine.deadline)
        news = self.machine.ready or self.ended
        if news and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.ended and not self._released:
            self._released = True
            assert self.machine.end is not None
            self._registry.receiver_ended(self, self.machine.end)

    def _send(
        self, kind: NoteKind, sequence: int = 0, *, bytes_limit: int = 0, text: str = ""
    ) -> None:
        if self.route is None:
            return  # the producer was never heard of: it will not hear of this either
        note = Note(kind, self.handle.stream_id, self.attachment, sequence, bytes_limit, text=text)
        self.route.link.send(StreamFrame(self, note))
