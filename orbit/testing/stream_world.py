"""Both ends of one stream with the roads between them, and the rules that hold in every state.

Items and ends travel on one ordered road, heartbeats and the receiver's notes on roads of their
own, so each can overtake the others. The link may die at any moment: each end hears of it some time
later, and what was on the roads is gone. `stream_explorer` searches through what may happen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..protocol.streams import receiver as r
from ..protocol.streams import sender as s
from ..protocol.streams.ends import EndKind, StreamWindow
from ..protocol.streams.frames import NoteKind

HEARTBEAT_S = 1.0


class Violation(AssertionError):
    """A rule of streams does not hold."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise Violation(rule)


@dataclass(slots=True)
class Script:
    """What the two users still want to do. `lengths` are the items; a negative one is staged."""

    lengths: tuple[int, ...]
    ends: tuple[str, ...] = ("finalize",)  # of which the producer picks one, after all its items
    faults: tuple[str, ...] = ()  # each may happen once, at any time


@dataclass(slots=True)
class Roads:
    """What is on its way, and who knows that nothing is any more."""

    ordered: deque[object] = field(default_factory=deque)  # to the receiver: items and the end
    beats: deque[object] = field(default_factory=deque)
    back: deque[object] = field(default_factory=deque)  # to the sender
    link: str = "up"
    sender_knows: bool = False
    receiver_knows: bool = False


@dataclass(slots=True)
class Seen:
    """`sent`: tickets that left, in order; `read`: what the reader got of them."""

    issued: int = 0
    refused: int = 0
    sent: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    terminals: int = 0
    released: int = 0
    unbound: int = 0


class StreamWorld:
    """One stream, with a script for its two users."""

    def __init__(self, script: Script, window: StreamWindow) -> None:
        self.lengths = [abs(n) for n in script.lengths]
        self.staged = {i for i, n in enumerate(script.lengths) if n < 0}
        self.ends = list(script.ends)
        self.faults = list(script.faults)
        self.window = window
        self.sender = s.StreamSender(window, HEARTBEAT_S, 0.0)
        self.receiver = r.StreamReceiver(HEARTBEAT_S)
        self.receiver.step(r.Attach(window), 0.0)
        self.roads = Roads()
        self.seen = Seen()
        self.fetches: list[int] = []
        self.here: list[int] = []  # tickets in the receiver's places
        self.now = 0.0

    # --- moves ---

    def submit(self) -> None:
        ticket = self.seen.issued
        self.seen.issued += 1
        self._sender(s.Submit(ticket, self.lengths[ticket]))

    def withdraw(self) -> None:
        """The producer gives the last send up, if it still waits."""
        waiting = self.sender.waiting
        self._sender(s.Withdraw(self.seen.issued - 1))
        self.seen.refused += waiting - self.sender.waiting if self.roads.link == "up" else 0

    def finish(self, how: str) -> None:
        self.ends.clear()
        match how:
            case "finalize":
                self._sender(s.Finalize())
            case "fail":
                self._sender(s.Abandon(NoteKind.FAILED, "x"))
            case "drop":
                self._sender(s.Abandon(NoteKind.DROPPED))

    def arrives(self, road: str) -> None:
        match road:
            case "ordered":
                self._ordered_arrives(self.roads.ordered.popleft())
            case "beats":
                self.roads.beats.popleft()
                if self.receiver.bound:
                    self._receiver(r.Heartbeat())
            case "back":
                note = self.roads.back.popleft()
                assert isinstance(note, s.Credited | s.Cancelled | s.Finished)
                self._sender(note)

    def fetch(self, sequence: int, *, broken: bool = False) -> None:
        self.fetches.remove(sequence)
        event = r.ItemBroken(sequence, "gone") if broken else r.Fetched(sequence)
        self._receiver(event)

    def take(self) -> None:
        self.seen.read.append(self.here[0])
        self.here.pop(0)
        self._receiver(r.Taken())

    def cancel(self) -> None:
        self._receiver(r.Cancel())

    def die(self) -> None:
        self.roads.link = "down"
        self.roads.ordered.clear()
        self.roads.beats.clear()
        self.roads.back.clear()

    def sender_hears(self) -> None:
        self.roads.sender_knows = True
        self._sender(s.LinkLost("reset"))

    def receiver_hears(self) -> None:
        self.roads.receiver_knows = True
        if self.receiver.bound:
            self._receiver(r.LinkLost("reset"))

    def time_passes(self, end: str) -> None:
        """One end's deadline, at once."""
        machine = self.sender if end == "sender" else self.receiver
        assert machine.deadline is not None
        self.now = max(self.now, machine.deadline)
        if end == "sender":
            for effect in self.sender.on_deadline(self.now):
                self._of_sender(effect)
        else:
            for heard in self.receiver.on_deadline(self.now):
                self._of_receiver(heard)
            self._sync()

    # --- effects ---

    def _sender(self, event: s.SenderInput) -> None:
        for effect in self.sender.step(event, self.now):
            self._of_sender(effect)

    def _of_sender(self, effect: s.SenderEffect) -> None:
        up = self.roads.link == "up"
        match effect:
            case s.SendItem(ticket, sequence):
                require(sequence == len(self.seen.sent), "items are numbered in order")
                require(
                    not self.seen.sent or ticket > self.seen.sent[-1],
                    "items leave in order of issue",
                )
                self.seen.sent.append(ticket)
                if up:
                    self.roads.ordered.append(("item", ticket, sequence))
            case s.SendTerminal(kind, sequence, text):
                self.seen.terminals += 1
                if up:
                    self.roads.ordered.append(("end", kind, sequence, text))
            case s.SendHeartbeat():
                if up:
                    self.roads.beats.append("beat")
            case s.Refuse():
                self.seen.refused += 1
            case s.Release():
                self.seen.released += 1

    def _ordered_arrives(self, note: object) -> None:
        if not self.receiver.bound:
            return
        match note:
            case ("item", int(ticket), int(sequence)):
                before = self.receiver.buffered
                staged = ticket in self.staged
                self._receiver(r.ItemArrived(sequence, self.lengths[ticket], staged), ticket)
                require(self.receiver.buffered > before, "what was credited finds room")
            case ("end", NoteKind() as kind, int(sequence), str(text)):
                self._receiver(r.TerminalArrived(kind, sequence, text))

    def _receiver(self, event: r.ReceiverInput, ticket: int | None = None) -> None:
        effects = self.receiver.step(event, self.now)
        if ticket is not None and len(self.here) < self.receiver.buffered:
            self.here.append(ticket)
        for effect in effects:
            self._of_receiver(effect)
        self._sync()

    def _of_receiver(self, effect: r.ReceiverEffect) -> None:
        up = self.roads.link == "up"
        match effect:
            case r.Fetch(sequence):
                self.fetches.append(sequence)
            case r.SendCredit(items_limit, bytes_limit):
                if up:
                    self.roads.back.append(s.Credited(items_limit, bytes_limit))
            case r.SendCancel(text):
                if up:
                    self.roads.back.append(s.Cancelled(text))
            case r.SendFinished():
                if up:
                    self.roads.back.append(s.Finished())
            case r.Unbind():
                self.seen.unbound += 1
                self.fetches.clear()

    def _sync(self) -> None:
        del self.here[self.receiver.buffered :]

    # --- rules ---

    def check(self) -> None:
        """What holds in every state."""
        require(
            self.seen.read == self.seen.sent[: len(self.seen.read)],
            "the reader gets a prefix of what was sent",
        )
        require(self.receiver.buffered <= self.window.items, "places are bounded")
        require(self.receiver.buffered_bytes <= self.window.nbytes, "bytes are bounded")
        require(self.seen.terminals <= 1, "one end is sent")
        require(self.seen.released <= 1 and self.seen.unbound <= 1, "each end lets go once")
        require((self.seen.released == 1) == (self.sender.state == "ended"), "ended means released")
        for end in (self.sender.end, self.receiver.end):
            require(end is None or end.kind is not EndKind.PROTOCOL, f"nobody breaks rules: {end}")
        end = self.receiver.end
        if self.receiver.state == "ended" and end is not None and end.kind is EndKind.FINALIZED:
            whole = len(self.lengths) - self.seen.refused
            require(len(self.seen.read) == whole, "the good end comes behind every item")
        ours = self.sender.end
        if self.sender.state == "ended" and ours is not None and ours.kind is EndKind.FINALIZED:
            have = len(self.seen.read) + self.receiver.buffered
            seen = end is not None and end.kind in (EndKind.FINALIZED, EndKind.CANCELLED)
            require(seen, "finalized at the sender means ended at the receiver")
            cancelled = end is not None and end.kind is EndKind.CANCELLED
            require(cancelled or have == len(self.seen.sent), "and that every item is there")

    def settled(self) -> bool:
        return self.sender.state == "ended" and self.receiver.state == "ended"

    def key(self) -> object:
        sender, receiver = vars(self.sender).copy(), vars(self.receiver).copy()
        for machine in (sender, receiver):
            machine.pop("_table")
        around = (self.roads, self.seen, sorted(self.fetches), self.ends, self.faults, self.now)
        return repr((sender, receiver, around))
