"""The receiving end of a stream: checks the order, holds places for what was promised, credits what
was taken, and ends once.

Items are known here by their place only; staged ones are fetched at once, since the window bounds
them too, and are read in their turn. Whatever ends the stream, the items that are complete before
the end can still be taken. It knows no link, no bytes of items and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from ...errors import InternalError
from ..transitions import Table, TableMachine
from .ends import END_OF_NOTE, MISSED_MAX, EndKind, StreamEnd, StreamWindow
from .frames import NoteKind


class ReceiverState(StrEnum):
    OPEN = "open"  # no producer yet
    ATTACHED = "attached"
    DRAINING = "draining"  # nothing follows; items are left to take
    ENDED = "ended"


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attach:
    """A producer has attached, and was granted `window`."""

    window: StreamWindow


@dataclass(frozen=True, slots=True)
class ItemArrived:
    """`staged`: it has to be fetched first."""

    sequence: int
    nbytes: int
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """A staged item is in this node's memory."""

    sequence: int


@dataclass(frozen=True, slots=True)
class ItemBroken:
    """An item that cannot be had (a fetch failed), or cannot be read (not of the stream's type).
    LOST: because the producer, or the way to it, is gone.
    """

    sequence: int
    text: str
    kind: EndKind = EndKind.FAILED


@dataclass(frozen=True, slots=True)
class Taken:
    """The reader has the first item. Only while `ready`."""


@dataclass(frozen=True, slots=True)
class TerminalArrived:
    """The producer's end: `sequence` items were sent."""

    kind: NoteKind
    sequence: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The producer is alive."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The reader wants no more, buffered items included."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The producer's link is gone."""

    text: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline. Feed it through `on_deadline`."""


ReceiverInput = (
    Attach
    | ItemArrived
    | Fetched
    | ItemBroken
    | Taken
    | TerminalArrived
    | Heartbeat
    | Cancel
    | LinkLost
    | TimedOut
)

# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the staged item, then feed Fetched or ItemBroken."""

    sequence: int


@dataclass(frozen=True, slots=True)
class SendCredit:
    items_limit: int
    bytes_limit: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    text: str


@dataclass(frozen=True, slots=True)
class SendFinished:
    """Every item and the end are here."""


@dataclass(frozen=True, slots=True)
class Unbind:
    """Nothing is expected from the producer any more: forget its link, stop fetching."""


ReceiverEffect = Fetch | SendCredit | SendCancel | SendFinished | Unbind


def _to(*states: ReceiverState) -> frozenset[ReceiverState]:
    return frozenset(states)


_R = ReceiverState
_LEAVES = _to(_R.DRAINING, _R.ENDED)

RECEIVER_TABLE: Table[ReceiverState] = {
    _R.OPEN: {Attach: _to(_R.ATTACHED), Cancel: _to(_R.ENDED)},
    _R.ATTACHED: {
        ItemArrived: _to(_R.ATTACHED, _R.DRAINING, _R.ENDED),
        Fetched: _to(_R.ATTACHED),
        ItemBroken: _to(_R.ATTACHED, _R.DRAINING, _R.ENDED),
        Taken: _to(_R.ATTACHED),
        TerminalArrived: _LEAVES,
        Heartbeat: _to(_R.ATTACHED),
        Cancel: _to(_R.ENDED),
        LinkLost: _LEAVES,
        TimedOut: _to(_R.ATTACHED, _R.DRAINING, _R.ENDED),
    },
    _R.DRAINING: {
        ItemArrived: _LEAVES,
        Fetched: _to(_R.DRAINING),
        ItemBroken: _LEAVES,
        Taken: _LEAVES,
        TerminalArrived: _LEAVES,
        Heartbeat: _to(_R.DRAINING),
        Cancel: _to(_R.ENDED),
        LinkLost: _LEAVES,
    },
    _R.ENDED: {
        Fetched: _to(_R.ENDED),
        ItemBroken: _to(_R.ENDED),
        Cancel: _to(_R.ENDED),
        LinkLost: _to(_R.ENDED),
    },
}


@dataclass(slots=True)
class _Place:
    charge: int
    ready: bool


class StreamReceiver(TableMachine[ReceiverState, ReceiverInput, ReceiverEffect]):
    """`heartbeat_s` is what the producer was told at its attach."""

    def __init__(self, heartbeat_s: float) -> None:
        super().__init__(RECEIVER_TABLE, ReceiverState.OPEN)
        self._heartbeat_s = heartbeat_s
        self._window = StreamWindow()
        self._places: deque[_Place] = deque()
        self._taken = 0  # items that left the buffer, and
        self._taken_bytes = 0  # what they were charged
        self._buffered_bytes = 0
        self._items_limit = 0
        self._bytes_limit = 0
        self._unfetched = 0
        self._last_heard = 0.0
        self.bound = False  # to a producer's link
        self.end: StreamEnd | None = None  # settled when ENDED

    # --- what the runtime asks ---

    @property
    def ready(self) -> bool:
        """Whether the first item can be taken now."""
        return bool(self._places) and self._places[0].ready

    @property
    def buffered(self) -> int:
        """Items here, those that are still being fetched included."""
        return len(self._places)

    @property
    def buffered_bytes(self) -> int:
        """What they are charged; never above the window."""
        return self._buffered_bytes

    @property
    def items_taken(self) -> int:
        return self._taken

    def on_deadline(self, now: float) -> list[ReceiverEffect]:
        if self.deadline is None or now < self.deadline:
            return []
        return self.step(TimedOut(), now)

    # --- within ---

    def _react(
        self, event: ReceiverInput, now: float
    ) -> tuple[ReceiverState, list[ReceiverEffect]]:
        match event:
            case Attach(window):
                self._window = window
                self._items_limit, self._bytes_limit = window.items, window.nbytes
                self._last_heard = now
                self.bound = True
                return ReceiverState.ATTACHED, []
            case ItemArrived():
                return self._arrived(event, now)
            case Fetched(sequence):
                return self._fetched(sequence)
            case ItemBroken(sequence, text, kind):
                return self._item_broken(sequence, StreamEnd(kind, text))
            case Taken():
                return self._take()
            case TerminalArrived(kind, sequence, text):
                return self._terminal(kind, sequence, text)
            case Heartbeat():
                self._last_heard = now
                return self.state, [self._credit()]
            case Cancel():
                return self._cancel()
            case LinkLost(text):
                return self._cut(StreamEnd(EndKind.LOST, text), say=False)
            case TimedOut():
                return self._timed_out(now)

    def _entered(self, now: float) -> None:
        attached = self.state is ReceiverState.ATTACHED
        self.deadline = now + MISSED_MAX * self._heartbeat_s if attached else None

    def _arrived(self, item: ItemArrived, now: float) -> tuple[ReceiverState, list[ReceiverEffect]]:
        due = self._taken + len(self._places)
        charge = self._window.charge(item.nbytes)
        total = self._taken_bytes + self._buffered_bytes + charge
        if self.state is not ReceiverState.ATTACHED:
            return self._cut(StreamEnd(EndKind.PROTOCOL, "an item behind the end"))
        if item.sequence != due:
            return self._cut(StreamEnd(EndKind.PROTOCOL, f"item {item.sequence} in place of {due}"))
        if item.sequence >= self._items_limit or total > self._bytes_limit:
            return self._cut(StreamEnd(EndKind.PROTOCOL, "more items than were credited"))
        self._last_heard = now
        self._places.append(_Place(charge, not item.staged))
        self._buffered_bytes += charge
        if not item.staged:
            return self.state, []
        self._unfetched += 1
        return self.state, [Fetch(item.sequence)]

    def _fetched(self, sequence: int) -> tuple[ReceiverState, list[ReceiverEffect]]:
        place = self._place(sequence)
        if place is None or place.ready:
            return self.state, []  # it was given up meanwhile
        place.ready = True
        self._unfetched -= 1
        return self.state, self._finish()

    def _item_broken(
        self, sequence: int, end: StreamEnd
    ) -> tuple[ReceiverState, list[ReceiverEffect]]:
        if self._place(sequence) is None:
            return self.state, []  # it was given up meanwhile
        return self._cut(end, first=sequence - self._taken)

    def _take(self) -> tuple[ReceiverState, list[ReceiverEffect]]:
        if not self.ready:
            raise InternalError("no item is ready to be taken")
        place = self._places.popleft()
        self._buffered_bytes -= place.charge
        self._taken += 1
        self._taken_bytes += place.charge
        if self.state is ReceiverState.DRAINING:
            return self._left(), []
        items = self._taken + self._window.items - self._items_limit
        nbytes = self._taken_bytes + self._window.nbytes - self._bytes_limit
        return self.state, [self._credit()] if self._window.due(items, nbytes) else []

    def _terminal(
        self, kind: NoteKind, sequence: int, text: str
    ) -> tuple[ReceiverState, list[ReceiverEffect]]:
        arrived = self._taken + len(self._places)
        if self.state is not ReceiverState.ATTACHED:
            return self._cut(StreamEnd(EndKind.PROTOCOL, "a second end"))
        if sequence != arrived:
            detail = f"the end of {sequence} items, and {arrived} have arrived"
            return self._cut(StreamEnd(EndKind.PROTOCOL, detail))
        self.end = StreamEnd(END_OF_NOTE[kind], text)
        return self._left(), self._finish(ended=True)

    def _cancel(self) -> tuple[ReceiverState, list[ReceiverEffect]]:
        if self.state is ReceiverState.ENDED:
            return self.state, []
        return self._cut(StreamEnd(EndKind.CANCELLED), first=0)

    def _timed_out(self, now: float) -> tuple[ReceiverState, list[ReceiverEffect]]:
        # What arrives pushes the deadline out only here: an item must not cost a timer.
        due = self._last_heard + MISSED_MAX * self._heartbeat_s
        if now < due:
            self.deadline = due
            return self.state, []
        return self._cut(StreamEnd(EndKind.LOST, f"{MISSED_MAX} heartbeats are missing"))

    def _cut(
        self, end: StreamEnd, *, first: int | None = None, say: bool = True
    ) -> tuple[ReceiverState, list[ReceiverEffect]]:
        """End here: keep the places before `first` and before the first that is not complete, which
        nobody fetches any more.
        """
        if first is None and self.end is not None and not self._unfetched:
            return self.state, []  # all of it is here, the end too
        unready = (i for i, place in enumerate(self._places) if not place.ready)
        kept = next(unready, len(self._places))
        if first is not None:
            kept = min(kept, first)
        while len(self._places) > kept:
            place = self._places.pop()
            self._buffered_bytes -= place.charge
            self._unfetched -= not place.ready
        self.end = end
        effects: list[ReceiverEffect] = []
        if self.bound:
            self.bound = False
            effects = [SendCancel(end.text), Unbind()] if say else [Unbind()]
        return self._left(), effects

    def _finish(self, *, ended: bool = False) -> list[ReceiverEffect]:
        if not self.bound or self._unfetched or not (ended or self.end is not None):
            return []
        self.bound = False
        return [SendFinished(), Unbind()]

    def _credit(self) -> SendCredit:
        self._items_limit = self._taken + self._window.items
        self._bytes_limit = self._taken_bytes + self._window.nbytes
        return SendCredit(self._items_limit, self._bytes_limit)

    def _left(self) -> ReceiverState:
        return ReceiverState.DRAINING if self._places else ReceiverState.ENDED

    def _place(self, sequence: int) -> _Place | None:
        index = sequence - self._taken
        return self._places[index] if 0 <= index < len(self._places) else None
