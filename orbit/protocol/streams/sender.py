"""A producer's end of a stream: sends items in order while the receiver has room, ends once, and
beats while it has nothing to say.

Sends that find no credit wait here, in the order in which they were issued; the machine knows them
by ticket and length only. It knows no link, no bytes of items and no clock: the runtime carries out
the effects, in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from ...errors import InternalError
from ..transitions import Table, TableMachine
from .ends import END_OF_NOTE, MISSED_MAX, EndKind, StreamEnd, StreamWindow
from .frames import NoteKind


class SenderState(StrEnum):
    ATTACHED = "attached"
    FINISHING = "finishing"  # finalized; sends that were issued before still wait for credit
    CLOSING = "closing"  # the end is on its way; staged items may still be fetched
    ENDED = "ended"


# --- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Send an item of that length. `ticket` is new."""

    ticket: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget a send that still waits. Nothing happens when it does not."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Credited:
    """The receiver's word on how much may be sent in all. It is heard from, at least."""

    items_limit: int
    bytes_limit: int


@dataclass(frozen=True, slots=True)
class Finalize:
    """Nothing follows what was issued."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """End at once, behind what was sent: FAILED or DROPPED. `sequence`: the first item that was
    handed out for sending and never left; None when all did.
    """

    kind: NoteKind
    text: str = ""
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The receiver wants no more."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The receiver has everything."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The link is gone, and with it whatever was on its way."""

    text: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline. Feed it through `on_deadline`."""


SenderInput = (
    Submit | Withdraw | Credited | Finalize | Abandon | Cancelled | Finished | LinkLost | TimedOut
)

# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendItem:
    """Hand the item to the link, as number `sequence`."""

    ticket: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """That send will never be: the waiting caller gets the end's error."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SendTerminal:
    kind: NoteKind
    sequence: int
    text: str


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Nothing else was said for a while."""


@dataclass(frozen=True, slots=True)
class Release:
    """Over: nothing of this stream is needed here any more, its staged items neither."""


SenderEffect = SendItem | Refuse | SendTerminal | SendHeartbeat | Release


def _to(*states: SenderState) -> frozenset[SenderState]:
    return frozenset(states)


_S = SenderState
_OVER: dict[type, frozenset[SenderState]] = {
    kind: _to(_S.ENDED) for kind in (Cancelled, Finished, LinkLost)
}

SENDER_TABLE: Table[SenderState] = {
    _S.ATTACHED: {
        Submit: _to(_S.ATTACHED),
        Withdraw: _to(_S.ATTACHED),
        Credited: _to(_S.ATTACHED, _S.ENDED),
        Finalize: _to(_S.FINISHING, _S.CLOSING),
        Abandon: _to(_S.CLOSING),
        TimedOut: _to(_S.ATTACHED, _S.ENDED),
        **_OVER,
    },
    _S.FINISHING: {
        Withdraw: _to(_S.FINISHING, _S.CLOSING),
        Credited: _to(_S.FINISHING, _S.CLOSING, _S.ENDED),
        Abandon: _to(_S.CLOSING),
        TimedOut: _to(_S.FINISHING, _S.ENDED),
        **_OVER,
    },
    _S.CLOSING: {
        Withdraw: _to(_S.CLOSING),
        Credited: _to(_S.CLOSING, _S.ENDED),
        Abandon: _to(_S.CLOSING),
        TimedOut: _to(_S.CLOSING, _S.ENDED),
        **_OVER,
    },
    _S.ENDED: {
        Withdraw: _to(_S.ENDED),
        Credited: _to(_S.ENDED),
        Abandon: _to(_S.ENDED),
        **_OVER,
    },
}


class StreamSender(TableMachine[SenderState, SenderInput, SenderEffect]):
    """`window` is what the receiver granted at the attach; `heartbeat_s` the smaller of both sides'
    periods.
    """

    def __init__(self, window: StreamWindow, heartbeat_s: float, now: float) -> None:
        super().__init__(SENDER_TABLE, SenderState.ATTACHED)
        self._window = window
        self._heartbeat_s = heartbeat_s
        self._waiting: OrderedDict[int, int] = OrderedDict()  # ticket -> charge
        self._items_sent = 0
        self._bytes_sent = 0
        self._items_limit = window.items
        self._bytes_limit = window.nbytes
        self._last_sent = now
        self._unanswered = 0
        self.end: StreamEnd | None = None  # known from the terminal on, settled when ENDED
        self.deadline = now + heartbeat_s

    # --- what the runtime asks ---

    @property
    def waiting(self) -> int:
        """Sends without credit."""
        return len(self._waiting)

    @property
    def items_sent(self) -> int:
        return self._items_sent

    @property
    def items_taken(self) -> int:
        """How many items the receiver's reader has taken, as far as it has said so."""
        return self._items_limit - self._window.items

    def has_room(self, nbytes: int) -> bool:
        """Whether an item of that length would leave at once."""
        return not self._waiting and self._fits(self._window.charge(nbytes))

    def on_deadline(self, now: float) -> list[SenderEffect]:
        if self.deadline is None or now < self.deadline:
            return []
        return self.step(TimedOut(), now)

    # --- within ---

    def _react(self, event: SenderInput, now: float) -> tuple[SenderState, list[SenderEffect]]:
        match event:
            case Submit(ticket, nbytes):
                if ticket in self._waiting:
                    raise InternalError(f"ticket {ticket} was submitted twice")
                self._waiting[ticket] = self._window.charge(nbytes)
                return self.state, self._send(now)
            case Withdraw(ticket):
                if self._waiting.pop(ticket, None) is None:
                    return self.state, []
                return self._settle(self._send(now))
            case Credited(items_limit, bytes_limit):
                return self._credited(items_limit, bytes_limit, now)
            case Finalize():
                self.end = StreamEnd(EndKind.FINALIZED)
                return self._settle([])
            case Abandon(kind, text, sequence):
                return self._abandon(kind, text, sequence)
            case Cancelled(text):
                return self._over(StreamEnd(EndKind.CANCELLED, text))
            case Finished():
                if self.state is not SenderState.CLOSING and self.state is not SenderState.ENDED:
                    return self._broken("the receiver finished a stream that goes on")
                return self._over(self.end or StreamEnd(EndKind.PROTOCOL))
            case LinkLost(text):
                return self._over(StreamEnd(EndKind.LOST, text))
            case TimedOut():
                return self._timed_out(now)

    def _entered(self, now: float) -> None:
        if self.state is SenderState.ENDED:
            self.deadline = None

    def _fits(self, charge: int) -> bool:
        return (
            self._items_sent < self._items_limit and self._bytes_sent + charge <= self._bytes_limit
        )

    def _send(self, now: float) -> list[SenderEffect]:
        """Whatever the credit allows, the oldest first: a short item never overtakes a long one."""
        effects: list[SenderEffect] = []
        while self._waiting:
            ticket, charge = next(iter(self._waiting.items()))
            if not self._fits(charge):
                break
            del self._waiting[ticket]
            effects.append(SendItem(ticket, self._items_sent))
            self._items_sent += 1
            self._bytes_sent += charge
            self._last_sent = now
        return effects

    def _settle(self, effects: list[SenderEffect]) -> tuple[SenderState, list[SenderEffect]]:
        """After something may have emptied the queue: a finalized stream sends its end then."""
        if self.state is SenderState.CLOSING or self.end is None:
            return self.state, effects
        if self._waiting:
            return SenderState.FINISHING, effects
        return SenderState.CLOSING, [
            *effects,
            SendTerminal(NoteKind.FINALIZED, self._items_sent, ""),
        ]

    def _credited(
        self, items_limit: int, bytes_limit: int, now: float
    ) -> tuple[SenderState, list[SenderEffect]]:
        if self.state is SenderState.ENDED:
            return self.state, []
        if (
            items_limit > self._items_sent + self._window.items
            or bytes_limit > self._bytes_sent + self._window.nbytes
        ):
            return self._broken("the receiver credits more than was sent")
        self._unanswered = 0
        self._items_limit = max(self._items_limit, items_limit)
        self._bytes_limit = max(self._bytes_limit, bytes_limit)
        return self._settle(self._send(now))

    def _abandon(
        self, kind: NoteKind, text: str, sequence: int | None
    ) -> tuple[SenderState, list[SenderEffect]]:
        if self.state in (SenderState.CLOSING, SenderState.ENDED) and sequence is None:
            return self.state, []  # its end is said already
        if self.state is SenderState.ENDED:
            return self.state, []
        self.end = StreamEnd(END_OF_NOTE[kind], text)
        last = self._items_sent if sequence is None else sequence
        return SenderState.CLOSING, [*self._refuse_all(), SendTerminal(kind, last, text)]

    def _broken(self, text: str) -> tuple[SenderState, list[SenderEffect]]:
        return self._give_up(StreamEnd(EndKind.PROTOCOL, text))

    def _give_up(self, end: StreamEnd) -> tuple[SenderState, list[SenderEffect]]:
        """End here, and say so to the receiver unless it has its end already."""
        said = self.state is SenderState.CLOSING
        terminal = SendTerminal(NoteKind.FAILED, self._items_sent, end.text)
        state, effects = self._over(end)
        return state, effects if said else [terminal, *effects]

    def _over(self, end: StreamEnd) -> tuple[SenderState, list[SenderEffect]]:
        if self.state is SenderState.ENDED:
            return self.state, []
        self.end = end
        return SenderState.ENDED, [*self._refuse_all(), Release()]

    def _refuse_all(self) -> list[SenderEffect]:
        refused: list[SenderEffect] = [Refuse(ticket) for ticket in self._waiting]
        self._waiting.clear()
        return refused

    def _timed_out(self, now: float) -> tuple[SenderState, list[SenderEffect]]:
        if self._unanswered >= MISSED_MAX:
            text = f"no answer to {MISSED_MAX} heartbeats"
            return self._give_up(StreamEnd(EndKind.LOST, text))
        # Items push the deadline out only here: an item must not cost a timer.
        due = self._last_sent + self._heartbeat_s
        if now < due:
            self.deadline = due
            return self.state, []
        self._unanswered += 1
        self._last_sent = now
        self.deadline = now + self._heartbeat_s
        return self.state, [SendHeartbeat()]
