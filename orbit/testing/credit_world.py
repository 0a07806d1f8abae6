"""A closed world of message links under credits, for exploring every order of events (D5, D6).

Credit books, cutters and assemblers are the real machines. Around them stand the links
(credit_link.py), a shared receive queue on each node with batched refill, ordered wires, and
applications: calls that nest, notes, streams, a drain. Moves change a world in place or, through
`after`, a copy of it. A broken rule raises `Violation`. There is no time: whatever waits here
waits for another node, never for a deadline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import permutations

from ..protocol.messaging.credits import CONTROL_SLABS, REFILL_MAX, CreditBook, SlabLedger, Windows
from ..protocol.messaging.packets import (
    REPORT_BIT,
    WINDOW_OF,
    PacketKind,
    Window,
)
from .credit_applications import Contact, Handler, Stage, Step
from .credit_link import HEADER_BYTES, SEQUENCE_BYTES, Frame, Label, Link, Op, unpack_label
from .search import require

Pair = tuple[int, int]  # an end: (the node it belongs to, the peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The sizes of a world, and the mistakes that can be planted into it."""

    windows: Windows = field(default_factory=lambda: Windows(1, 1))
    slab_bytes: int = 32
    inbound_bytes_max: int = 32  # of one peer's messages that nobody has consumed
    payload_bytes_max: int = 64  # the ceiling
    admission_frames: int = 1  # of messages that wait at their sender, per peer
    send_slots: int | None = None  # packets between a sender and the slabs; None: they land at once
    stream_credit: int = 2  # items

    book: type[CreditBook] = CreditBook
    refill_batch: int | None = None  # None: the windows' own
    refill_margin: bool = True  # the receive queue is deeper than the windows by one batch
    refill_at_pass_end: bool = True
    charge_until_queued: bool = False  # of a request, not until its answer has left
    keeps_charge: bool = False  # of a handler that waits for a peer
    charges_segments: bool = False  # before their message is whole
    ordered: bool = False  # a note or a nesting call runs only when all before it have ended

    @property
    def refill(self) -> int:
        return self.refill_batch or self.windows.refill


class Node:
    """A node's receive queue: slabs posted, and slabs polled but not posted again."""

    __slots__ = ("draining", "pending", "posted")

    def __init__(self, posted: int) -> None:
        self.posted = posted
        self.pending = 0
        self.draining = False

    def key(self) -> Hashable:
        return (self.posted, self.pending, self.draining)


class CreditWorld:
    """`programs`: what the applications of each end will do, in order. `drains`: the nodes that
    will drain, at any moment. `seen`: the kinds of packet that were sent, in this world and its
    copies together.
    """

    def __init__(
        self,
        nodes: int,
        rules: Rules,
        programs: Mapping[Pair, tuple[Step, ...]],
        drains: frozenset[int] = frozenset(),
    ) -> None:
        self.rules = rules
        peers = nodes - 1
        # The ledger promises with the largest batch in mind; the queue here is the tightest one
        # that the argument allows.
        ledger = SlabLedger(peers * rules.windows.slabs + REFILL_MAX)
        for _ in range(peers):
            require(ledger.promise(rules.windows) == rules.windows, "the ledger gives less")
        require(ledger.free == 0, "the ledger gives more")
        depth = peers * rules.windows.slabs + rules.refill_margin * rules.windows.refill
        self._depth = depth
        self.nodes = [Node(depth) for _ in range(nodes)]
        self.drains = drains
        self.seen: set[int] = set()
        self.links: dict[Pair, Link] = {}
        self.contacts: dict[Pair, Contact] = {}
        for pair in permutations(range(nodes), 2):
            book = rules.book(rules.windows, rules.windows, rules.inbound_bytes_max)
            self.links[pair] = Link(book, rules.slab_bytes)
            self.contacts[pair] = Contact(programs.get(pair, ()), rules.stream_credit)

    # --- exploring --------------------------------------------------------------------------------

    def key(self) -> Hashable:
        return (
            self.drains,
            tuple(node.key() for node in self.nodes),
            tuple(link.key() for link in self.links.values()),
            tuple(contact.key() for contact in self.contacts.values()),
        )

    def after(self, act: Callable[[CreditWorld], None]) -> CreditWorld:
        """A copy in which `act` has happened and every rule was checked."""
        twin = copy.copy(self)
        twin.nodes = [copy.copy(node) for node in self.nodes]
        twin.links = {pair: link.clone() for pair, link in self.links.items()}
        twin.contacts = {pair: contact.clone() for pair, contact in self.contacts.items()}
        act(twin)
        twin.check()
        return twin

    def settled(self) -> bool:
        return all(link.resting for link in self.links.values()) and all(
            contact.resting for contact in self.contacts.values()
        )

    # --- the device -------------------------------------------------------------------------------

    def land(self, pair: Pair) -> None:
        """The oldest packet under way takes a slab of the receiving node."""
        link, receiver = self.links[pair], self.nodes[pair[1]]
        require(receiver.posted > 0, "the receive queue is empty: receiver not ready")
        receiver.posted -= 1
        link.landed += 1
        self._pump(pair[0])

    def poll(self, pair: Pair, count: int) -> None:
        """One drain pass at pair[0]: `count` packets of its peer pair[1]."""
        mine, theirs = self.links[pair], self.links[pair[1], pair[0]]
        node = self.nodes[pair[0]]
        for _ in range(count):
            data, theirs.wire = theirs.wire[0], theirs.wire[1:]
            theirs.landed -= 1
            rules = self.rules
            arrived = mine.receive(
                data, rules.payload_bytes_max + SEQUENCE_BYTES, rules.charges_segments
            )
            node.pending += 1
            if node.pending >= rules.refill:
                self._refill(node)
            if arrived is not None:
                self._dispatch(pair, *arrived)
        if self.rules.refill_at_pass_end:
            self._refill(node)
        self._pump(pair[0])

    def _refill(self, node: Node) -> None:
        node.posted += node.pending
        node.pending = 0

    def _pump(self, n: int) -> None:
        """All links of a node send what they can: outside a drain pass, or at its end."""
        slots = self.rules.send_slots
        for pair, link in self.links.items():
            if pair[0] == n:
                self._pump_link(pair, link, slots)

    def _pump_link(self, pair: Pair, link: Link, slots: int | None) -> None:
        receiver = self.nodes[pair[1]]

        def room() -> bool:
            return slots is None or len(link.wire) - link.landed < slots

        def push(data: bytes) -> None:
            self.seen.add(data[1])
            link.wire = (*link.wire, data)
            if slots is None:
                require(receiver.posted > 0, "the receive queue is empty: receiver not ready")
                receiver.posted -= 1
                link.landed += 1

        link.pump(room, push)

    # --- the applications -------------------------------------------------------------------------

    def admits(self, pair: Pair) -> bool:
        return len(self.links[pair].queues[Window.MESSAGES]) < self.rules.admission_frames

    def issue(self, pair: Pair) -> None:
        """The next step of that end's program."""
        contact = self.contacts[pair]
        step, contact.program = contact.program[0], contact.program[1:]
        if step.op is Op.CALL:
            self._call(pair, Label(Op.CALL, step.depth, step.ident, step.nbytes, step.answer))
        else:
            if step.op is Op.ITEM:
                contact.stream_credit -= 1
            label = Label(step.op, 0, step.ident, step.nbytes)
            self.links[pair].queue(PacketKind.MESSAGE, label, step.nbytes)
        self._pump(pair[0])

    def drain(self, n: int) -> None:
        self.drains -= {n}
        self.nodes[n].draining = True

    def _call(self, pair: Pair, label: Label) -> None:
        contact = self.contacts[pair]
        contact.calls |= {(label.ident, label.depth)}
        self.links[pair].queue(PacketKind.MESSAGE, label, label.nbytes)

    def _dispatch(self, pair: Pair, frame: Frame, charge: int) -> None:
        link, contact = self.links[pair], self.contacts[pair]
        label = unpack_label(frame.header)
        if frame.kind in (PacketKind.RESPONSE, PacketKind.SHUTTING_DOWN):
            self._answered(pair, label)
        elif frame.kind == PacketKind.EVENT:
            contact.stream_credit += label.answer
        elif label.op is Op.ITEM:
            # A stream has promised room of its own: the link's bound is not its business.
            link.book.on_consumed(charge)
            contact.unread += 1
            require(contact.unread <= self.rules.stream_credit, "a stream's buffer overflows")
        elif self.nodes[pair[0]].draining:
            self._reply(link, PacketKind.SHUTTING_DOWN, label, 0, charge)
        else:
            contact.handlers = (*contact.handlers, Handler(label, charge, Stage.READY))

    def _answered(self, pair: Pair, label: Label) -> None:
        contact = self.contacts[pair]
        if label.op is Op.NOTE:  # an echo, of which nobody waits
            return
        call = (label.ident, label.depth)
        require(call in contact.calls, "an answer to no call")
        contact.calls -= {call}
        for other, outer in self.contacts.items():
            if other[0] == pair[0]:
                outer.answer(label.ident, label.depth + 1)

    def may_run(self, pair: Pair, place: int) -> bool:
        """Whether the handler at that place can go on without anybody else."""
        handlers = self.contacts[pair].handlers
        stage = handlers[place].stage
        if stage is Stage.READY and self.rules.ordered and handlers[place].nests_or_notes:
            return not any(earlier.nests_or_notes for earlier in handlers[:place])
        if stage is Stage.WANTING:
            return self.admits(self._next(pair))
        return stage is not Stage.WAITING

    def run_handler(self, pair: Pair, place: int) -> None:
        """One step: call the next node, with the charge given back before that, or finish."""
        contact, link = self.contacts[pair], self.links[pair]
        handler = contact.handlers[place]
        label = handler.label
        if handler.nests and handler.stage is not Stage.ANSWERED:
            charge = handler.charge
            if not self.rules.keeps_charge:
                link.book.on_consumed(charge)
                charge = 0
            admitted = self.admits(self._next(pair))
            stage = Stage.WAITING if admitted else Stage.WANTING
            contact.replace(place, Handler(label, charge, stage))
            if admitted:
                self._call(self._next(pair), label._replace(depth=label.depth - 1))
        else:
            contact.replace(place, None)
            if label.op is Op.CALL:
                answer = Label(Op.ANSWER, label.depth, label.ident, 0)
                charge = self._renew(link, handler)
                self._reply(link, PacketKind.RESPONSE, answer, label.answer, charge)
            else:
                link.book.on_consumed(handler.charge)
        self._pump(pair[0])

    def _renew(self, link: Link, handler: Handler) -> int:
        """The charge that its answer holds: one that was given back for a wait is taken again."""
        if handler.charge or self.rules.charge_until_queued:
            return handler.charge
        charge = HEADER_BYTES + SEQUENCE_BYTES + handler.label.nbytes
        link.book.on_renewed(charge)
        return charge

    def _reply(self, link: Link, kind: int, label: Label, nbytes: int, charge: int) -> None:
        if self.rules.charge_until_queued:
            link.book.on_consumed(charge)
            charge = 0
        link.queue(kind, label, nbytes, charge)

    def _next(self, pair: Pair) -> Pair:
        """Where a handler of messages from pair[1] calls: the next node of the ring."""
        n = pair[0]
        return n, (n + 1) % len(self.nodes)

    def read_item(self, pair: Pair) -> None:
        contact = self.contacts[pair]
        contact.unread -= 1
        contact.read += 1
        if 2 * contact.read >= self.rules.stream_credit or not contact.unread:
            label = Label(Op.CREDIT, 0, 0, 0, contact.read)
            contact.read = 0
            self.links[pair].queue(PacketKind.EVENT, label, 0)
            self._pump(pair[0])

    # --- the rules --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises Violation."""
        for (n, peer), link in self.links.items():
            self._check_credits(link, self.links[peer, n])
            self._check_memory(link)
        for n, node in enumerate(self.nodes):
            landed = sum(link.landed for (_, to), link in self.links.items() if to == n)
            require(node.posted + node.pending + landed == self._depth, "a slab is lost")
            require(node.pending < self.rules.refill, "a refill is late")

    def _check_credits(self, sender: Link, receiver: Link) -> None:
        """Granted = at hand + in flight + with the receiver + on their way back."""
        windows = self.rules.windows
        kinds = [data[1] for data in sender.wire]
        back = receiver.wire
        for window, granted, at in (
            (Window.MESSAGES, windows.messages, 3),
            (Window.REPLIES, windows.replies, 4),
        ):
            total = sender.book.available(window) + receiver.book.owed(window)
            total += sum(data[at] for data in back)
            total += sum(WINDOW_OF[kind] is window for kind in kinds)
            require(total == granted, f"{window.name.lower()}: {total} credits of {granted}")
        controls = [kind for kind in kinds if kind in REPORT_BIT]
        require(len(controls) == len(set(controls)), "two control packets of one kind in flight")
        total = sender.book.available(Window.CONTROL) + receiver.book.owed(Window.CONTROL)
        total += len(controls) + sum(data[5].bit_count() for data in back)
        require(total == CONTROL_SLABS, f"control: {total} slabs of {CONTROL_SLABS}")

    def _check_memory(self, link: Link) -> None:
        rules = self.rules
        # A message of which all but the last segment is here counts with that last one.
        partial = rules.payload_bytes_max + SEQUENCE_BYTES + HEADER_BYTES
        limit = rules.inbound_bytes_max + rules.windows.messages * rules.slab_bytes + partial
        # What answers have taken again is bounded by the handlers that waited.
        answers = link.queues[Window.REPLIES]
        renewed = sum(frame.charge for frame in answers if unpack_label(frame.header).depth)
        held = link.book.unconsumed_bytes + link.open_message_bytes() - renewed
        require(held <= limit, f"{held} bytes of one peer's messages; limit {limit}")
