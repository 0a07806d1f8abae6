"""A closed world of grants on one queue pair, for exploring every order of events.

Sources and requesters are the real machines. Around them stand two shells that only carry out
effects, a device with windows, an ordered wire, completion queues, and a control network that
delays, reorders and loses. `moves` lists what may happen next; each move is applied to a copy. A
broken rule raises `Violation`. Time is abstract: any deadline that is set may pass.

A world of WRITEs has the same moves. There the local memory is what is read, the owner's memory is
what changes, and an owner that is told that a push has ended believes it by the receipts alone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

from ..model import Direction
from ..protocol.grants import (
    BindCompleted,
    BindFailed,
    Complete,
    Done,
    Drained,
    DrainUnproven,
    Fail,
    FailExposure,
    FreeWindow,
    GrantRequester,
    GrantSource,
    KillQueuePair,
    PieceFailed,
    PiecesCompleted,
    Post,
    PostBind,
    PostReceive,
    Publish,
    QueuePairFailed,
    Receipt,
    ReceiptCompleted,
    ReceiptFailed,
    ReceivePosted,
    RecycleWindow,
    ReleaseMemory,
    ReleaseTarget,
    RequesterInput,
    RequesterState,
    Retain,
    RoundPlanner,
    SessionClosed,
    SourceInput,
    SourceState,
    WindowFreed,
)
from .search import require

CANCELLED = "cancelled by its caller"
_FOREVER = float("inf")


class QueuePair:
    """One end: rts; broken (the device knows, the shell does not); err; drained, or stuck
    without the proof.
    """

    __slots__ = ("cause", "completions", "state")

    def __init__(self) -> None:
        self.state = "rts"
        self.cause = ""
        self.completions: tuple[tuple[str, int], ...] = ()

    @property
    def serving(self) -> bool:
        return self.state == "rts"

    @property
    def killable(self) -> bool:
        return self.state in ("rts", "broken")

    def complete(self, what: str, i: int) -> None:
        self.completions = (*self.completions, (what, i))

    def poll(self) -> tuple[str, int]:
        first, self.completions = self.completions[0], self.completions[1:]
        return first

    def key(self) -> tuple[object, ...]:
        return (self.state, self.cause, self.completions)


class Grant:
    """One grant with both of its machines and what the device and the two processes hold for it."""

    __slots__ = (
        "delivered",
        "lease_open",
        "memory_held",
        "outcome",
        "pieces_served",
        "requester",
        "source",
        "target_held",
        "transferred",
        "window",
    )

    def __init__(self) -> None:
        self.source = GrantSource()
        self.requester: GrantRequester | None = None
        self.window = "unbound"  # binding, bound, invalidated, pooled, freed
        self.memory_held = True
        self.target_held = True
        self.lease_open = True
        self.transferred = False  # the consumer said so, and the owner heard it
        self.pieces_served = 0
        self.outcome = ""
        self.delivered = False  # the grant record reached the consumer, or is known to be lost

    def clone(self) -> Grant:
        twin = copy.copy(self)
        twin.source = copy.copy(self.source)
        if self.requester is not None:
            twin.requester = copy.copy(self.requester)
            twin.requester.planner = copy.deepcopy(self.requester.planner)
        return twin

    def key(self) -> tuple[object, ...]:
        r = self.requester
        return (
            self.source.state,
            self.source.receipted,
            self.window,
            self.memory_held,
            self.target_held,
            self.lease_open,
            self.transferred,
            self.pieces_served,
            self.outcome,
            self.delivered,
            None
            if r is None
            else (
                r.state,
                r.receipt_posted,
                r.cause,
                r.planner.completed_bytes,
                r.planner.pieces_in_flight,
            ),
        )


class GrantWorld:
    """`faults` bounds how often the world may misbehave; deadlines and lease expiry are free
    once nothing else can happen, since time always passes.
    """

    def __init__(
        self,
        grants: int = 2,
        faults: int = 2,
        pieces: int = 2,
        direction: Direction = Direction.READ,
    ) -> None:
        self.grants = [Grant() for _ in range(grants)]
        self.faults = faults
        self.source_qp = QueuePair()
        self.requester_qp = QueuePair()
        self.receives = 0
        self.wire: tuple[tuple[str, int], ...] = ()  # pieces and receipts, in order
        self.control: tuple[tuple[str, int], ...] = ()  # in flight; any of them may arrive next
        self.epoch = "open"  # then "closing" (the source's side knows), then "closed"
        self.pieces = pieces
        self.direction = direction
        self._to_source: deque[tuple[int, SourceInput]] = deque()
        self._to_requester: deque[tuple[int, RequesterInput]] = deque()

    # --- exploring --------------------------------------------------------------------------------

    def key(self) -> tuple[object, ...]:
        return (
            tuple(grant.key() for grant in self.grants),
            self.source_qp.key(),
            self.requester_qp.key(),
            self.receives,
            self.wire,
            tuple(sorted(self.control)),
            self.epoch,
            self.faults,
        )

    def after(self, act: Callable[[GrantWorld], None]) -> GrantWorld:
        """A copy in which `act` has happened and every effect was carried out."""
        twin = copy.copy(self)
        twin.grants = [grant.clone() for grant in self.grants]
        twin.source_qp = copy.copy(self.source_qp)
        twin.requester_qp = copy.copy(self.requester_qp)
        twin._to_source = deque()
        twin._to_requester = deque()
        act(twin)
        twin._run()
        _check(twin)
        return twin

    def settled(self) -> bool:
        """Nothing is left to wait for: every grant has ended on both sides, or is accounted as
        unquiesced.
        """
        return all(
            (g.source.state in (SourceState.NEW, SourceState.UNQUIESCED) or g.source.ended)
            and (
                g.requester is None
                or g.requester.ended
                or g.requester.state is RequesterState.UNQUIESCED
            )
            for g in self.grants
        )

    # --- the device and the networks --------------------------------------------------------------

    def bind(self, i: int) -> None:
        self.grants[i].window = "bound"
        self.source_qp.complete("bound", i)

    def bind_fails(self, i: int) -> None:
        self.grants[i].window = "unbound"
        self.source_qp.state = "broken"
        self.source_qp.complete("bind failed", i)

    def serve(self) -> None:
        """The source's device takes the next request off the wire, even one whose sender has
        died since.
        """
        (kind, i), self.wire = self.wire[0], self.wire[1:]
        grant = self.grants[i]
        if not self.source_qp.serving:
            self._refused(kind, i)
        elif kind == "receipt":
            require(grant.window == "bound", "a window is invalidated while it is not bound")
            require(self.receives > 0, "a receipt arrives before its receive was posted")
            self.receives -= 1
            grant.window = "invalidated"
            self.source_qp.complete("receipt", i)
            if self.requester_qp.serving:
                self.requester_qp.complete("receipt", i)
        elif grant.window == "bound":
            require(grant.memory_held, "a piece is served from or into memory that was released")
            if self.requester_qp.state in ("rts", "err", "broken"):
                require(grant.target_held, "a piece uses local memory that was released")
            grant.pieces_served += 1
            if self.requester_qp.serving:
                self.requester_qp.complete("piece", i)
        else:
            self.source_qp.state = "broken"  # an access error takes the responder down too
            self._refused(kind, i)

    def _refused(self, kind: str, i: int) -> None:
        if self.requester_qp.serving:
            self.requester_qp.state = "broken"
            self.requester_qp.complete(f"{kind} failed", i)
            for other in sorted({j for _, j in self.wire}):
                self.requester_qp.complete("flushed", other)
            self.wire = ()

    def lose_wire(self) -> None:
        self.wire = ()

    def send(self, what: str, i: int) -> None:
        if self.epoch == "open":
            self.control = (*self.control, (what, i))

    def lose(self, message: tuple[str, int]) -> None:
        remaining = list(self.control)
        remaining.remove(message)
        self.control = tuple(remaining)

    def arrive(self, message: tuple[str, int]) -> None:
        self.lose(message)
        what, i = message
        grant = self.grants[i]
        if what == "grant":
            if not self.requester_qp.serving:  # another generation of the queue pair by now
                self.send("done without transfer", i)
                return
            planner = RoundPlanner(
                self.pieces, piece_bytes=1, inflight_bytes_max=1, send_slots=self.pieces + 1
            )
            grant.requester = GrantRequester(planner)
            return
        self.end_lease(i, transferred=what == "done")

    def end_lease(self, i: int, *, transferred: bool) -> None:
        """The owner ends a lease once, whoever asks first."""
        if self.grants[i].lease_open:
            self.grants[i].lease_open = False
            self.grants[i].transferred = transferred
            self.feed_source(i, Done(transferred))

    def close_source(self) -> None:
        self.epoch = "closing"
        self.control = ()
        for i, grant in enumerate(self.grants):
            grant.lease_open = False
            if grant.source.state is not SourceState.NEW:
                self.feed_source(i, SessionClosed())

    def close_requester(self) -> None:
        self.epoch = "closed"
        for i, grant in enumerate(self.grants):
            if grant.requester is not None:
                self.feed_requester(i, SessionClosed())

    # --- the two shells ---------------------------------------------------------------------------

    def source_polls(self, *, matches: bool = True) -> None:
        what, i = self.source_qp.poll()
        match what:
            case "bound":
                self.feed_source(i, BindCompleted())
            case "bind failed":
                self.feed_source(i, BindFailed("bind error"))
            case _:
                self.feed_source(i, Receipt(matches))

    def requester_polls(self) -> None:
        what, i = self.requester_qp.poll()
        requester = self.grants[i].requester
        if requester is None or requester.ended:
            return
        match what:
            case "piece":
                self.feed_requester(i, PiecesCompleted(1))
            case "receipt":
                self.feed_requester(i, ReceiptCompleted())
            case "receipt failed":
                self.feed_requester(i, ReceiptFailed("receipt error"))
            case "piece failed":
                self.feed_requester(i, PieceFailed("piece error"))
            case _:
                settled = requester.state in (RequesterState.SETTLING, RequesterState.RETURNING)
                flushed = "flushed"
                self.feed_requester(i, ReceiptFailed(flushed) if settled else PieceFailed(flushed))

    def kill(self, end: str, cause: str) -> None:
        """To the error state, once; everyone on it hears the first cause."""
        pair = self.source_qp if end == "source" else self.requester_qp
        if not pair.killable:
            return
        pair.state, pair.cause = "err", cause
        for i, grant in enumerate(self.grants):
            if end == "source":
                if grant.window == "binding":
                    grant.window = "unbound"
                    self.source_qp.complete("bind failed", i)
                if grant.source.state is not SourceState.NEW:
                    self.feed_source(i, QueuePairFailed(cause))
            elif grant.requester is not None:
                self.feed_requester(i, QueuePairFailed(cause))

    def drain(self, end: str, event: Drained | DrainUnproven) -> None:
        pair = self.source_qp if end == "source" else self.requester_qp
        pair.state = "drained" if isinstance(event, Drained) else "stuck"
        for i, grant in enumerate(self.grants):
            if end == "source" and grant.source.state is not SourceState.NEW:
                self.feed_source(i, event)
            if end == "requester" and grant.requester is not None:
                self.feed_requester(i, event)

    def source_timeout(self, i: int) -> None:
        for effect in self.grants[i].source.on_deadline(_FOREVER):
            _carry_out_source(self, i, effect)

    def requester_timeout(self, i: int) -> None:
        requester = self.grants[i].requester
        assert requester is not None
        for effect in requester.on_deadline(_FOREVER):
            _carry_out_requester(self, i, effect)

    def feed_source(self, i: int, event: SourceInput) -> None:
        self._to_source.append((i, event))

    def feed_requester(self, i: int, event: RequesterInput) -> None:
        self._to_requester.append((i, event))

    def _run(self) -> None:
        while self._to_source or self._to_requester:
            if self._to_source:
                i, event = self._to_source.popleft()
                for effect in self.grants[i].source.step(event, 0.0):
                    _carry_out_source(self, i, effect)
            else:
                j, news = self._to_requester.popleft()
                requester = self.grants[j].requester
                assert requester is not None
                for outcome in requester.step(news, 0.0):
                    _carry_out_requester(self, j, outcome)


def _carry_out_source(world: GrantWorld, i: int, effect: object) -> None:
    grant = world.grants[i]
    match effect:
        case PostBind():
            grant.window = "binding"
            if not world.source_qp.serving:
                grant.window = "unbound"
                world.source_qp.complete("bind failed", i)
        case PostReceive():
            world.receives += 1
            world.feed_source(i, ReceivePosted())
        case Publish():
            require(grant.window == "bound", "a key is published that is not bound")
            world.send("grant", i)
        case FailExposure():
            grant.lease_open = False
        case RecycleWindow():
            require(grant.window in ("invalidated", "unbound"), "a bound window goes to the pool")
            grant.window = "pooled"
        case KillQueuePair(cause):
            world.kill("source", cause)
        case FreeWindow():
            require(
                world.source_qp.state == "drained",
                "a window is freed before its queue pair is drained",
            )
            require(grant.window not in ("pooled", "freed"), "a window is freed twice")
            grant.window = "freed"
            world.feed_source(i, WindowFreed())
        case ReleaseMemory():
            require(grant.memory_held, "memory is released twice")
            reachable = grant.window == "bound" and world.source_qp.serving
            require(not reachable, "memory is released while its key is alive")
            if grant.transferred and grant.source.receipted:
                require(
                    grant.pieces_served == world.pieces or world.direction is Direction.READ,
                    "a push counts as whole with bytes missing",
                )
            grant.memory_held = False
        case _:
            require(isinstance(effect, Retain), f"{effect} is not known")


def _carry_out_requester(world: GrantWorld, i: int, effect: object) -> None:
    grant = world.grants[i]
    match effect:
        case Post(pieces, receipt):
            posted = (*(("piece", i) for _ in pieces), *((("receipt", i),) if receipt else ()))
            if world.requester_qp.serving:
                world.wire = (*world.wire, *posted)
            else:
                world.requester_qp.complete("flushed", i)
        case KillQueuePair(cause):
            world.kill("requester", cause)
        case Complete():
            require(grant.pieces_served == world.pieces, "a payload completes with bytes missing")
            _end(grant, "complete")
            world.send("done", i)
        case Fail(cause, returned):
            _check_cause(world, cause)
            _end(grant, "failed")
            _release_target(world, i)
            moved = says_transferred(world.direction, returned=returned)
            world.send("done" if moved else "done without transfer", i)
        case Retain():
            _end(grant, "unquiesced")
            world.send("done without transfer", i)
        case _:
            require(isinstance(effect, ReleaseTarget), f"{effect} is not known")
            _release_target(world, i)


def says_transferred(direction: Direction, *, returned: bool) -> bool:
    """What a consumer may tell about a transfer that failed: the receipt of a grant that was handed
    back ends the owner's authority over it, but it does not prove that every byte came.
    """
    return returned and direction is Direction.READ


def _end(grant: Grant, outcome: str) -> None:
    require(not grant.outcome, "a transfer ends twice")
    grant.outcome = outcome


def _release_target(world: GrantWorld, i: int) -> None:
    moving = any(op == ("piece", i) for op in world.wire)
    live = world.requester_qp.state in ("rts", "broken", "err")
    require(not (moving and live), "a target is released while a piece may still use it")
    world.grants[i].target_held = False


def _check_cause(world: GrantWorld, cause: str) -> None:
    own = (CANCELLED, "the epoch is over")
    known = cause in own or cause == world.requester_qp.cause
    require(known, f"a transfer fails with {cause!r}, not with its queue pair's cause")


def _check(world: GrantWorld) -> None:
    for grant in world.grants:
        if grant.source.ended:
            require(not grant.memory_held, "an ended grant holds memory")
            require(grant.window in ("pooled", "freed"), "an ended grant holds a window")
        if grant.requester is not None and grant.requester.ended:
            require(grant.outcome != "", "a transfer ended without an outcome")
