"""Every state x input of the table machines, as text, and their diagrams.

Run as a program it rewrites the snapshots and the generated diagrams; the tests compare. A state is
reached by real inputs, never by assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit.errors import (
    ClosedError,
    InternalError,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
    PeerRefused,
)
from orbit.model import Direction, Incarnation, PathReason, Transport, WorkerId
from orbit.protocol import connection as c
from orbit.protocol import fetch as f
from orbit.protocol import grants as g
from orbit.protocol import parent as e
from orbit.protocol import put as p
from orbit.protocol import region_life as r
from orbit.protocol import transfer as t
from orbit.protocol.messages import AcquireReply, RdmaAnswer, ReadyAnswer
from orbit.protocol.transitions import TableMachine, mermaid

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[2] / "docs" / "design"

Build = Callable[[], TableMachine[Any, Any, Any]]

_BOUND = [g.Bind(), g.BindCompleted()]
_PUBLISHED = [*_BOUND, g.ReceivePosted()]
_ABORTING = [*_PUBLISHED, g.QueuePairFailed("gone")]
SOURCE_ROADS: Mapping[str, Sequence[object]] = {
    "new": [],
    "binding": [g.Bind()],
    "bound": _BOUND,
    "published": _PUBLISHED,
    "receipted": [*_PUBLISHED, g.Receipt(matches=True)],
    "awaiting_receipt": [*_PUBLISHED, g.Done(transferred=True)],
    "aborting": _ABORTING,
    "freeing": [*_ABORTING, g.Drained()],
    "unquiesced": [*_ABORTING, g.DrainUnproven("stuck")],
    "reusable": [*_PUBLISHED, g.Receipt(matches=True), g.Done(transferred=True)],
}
SOURCE_INPUTS: Sequence[object] = [
    g.Bind(),
    g.BindCompleted(),
    g.BindRefused("full"),
    g.BindFailed("flush"),
    g.ReceivePosted(),
    g.ReceiveRefused("full"),
    g.Receipt(matches=True),
    g.Receipt(matches=False),
    g.Done(transferred=True),
    g.Done(transferred=False),
    g.WindowFreed(),
    g.WindowFreeFailed("busy"),
    g.QueuePairFailed("gone"),
    g.Drained(),
    g.DrainUnproven("stuck"),
    g.SessionClosed(),
    g.TimedOut(),
]

# Four pieces of one byte, two of them in flight at a time.
_CLOSING = [g.Start(), g.PiecesCompleted(1), g.PiecesCompleted(1)]
_SETTLING = [*_CLOSING, g.PiecesCompleted(2)]
_KILLING = [g.Start(), g.QueuePairFailed("gone")]
REQUESTER_ROADS: Mapping[str, Sequence[object]] = {
    "ready": [],
    "moving": [g.Start()],
    "closing": _CLOSING,
    "settling": _SETTLING,
    "stopping": [g.Start(), g.Cancel("why")],
    "returning": [g.Cancel("why")],
    "killing": _KILLING,
    "unquiesced": [*_KILLING, g.DrainUnproven("stuck")],
    "finished": [*_SETTLING, g.ReceiptCompleted()],
    "failed": [*_KILLING, g.Drained()],
}
REQUESTER_INPUTS: Sequence[object] = [
    g.Start(),
    g.Cancel("why"),
    g.PiecesCompleted(1),
    g.PiecesCompleted(2),
    g.PieceFailed("access"),
    g.PostFailed("full"),
    g.ReceiptCompleted(),
    g.ReceiptFailed("rnr"),
    g.QueuePairFailed("gone"),
    g.Drained(),
    g.DrainUnproven("stuck"),
    g.SessionClosed(),
    g.TimedOut(),
]

RDMA = AcquireReply(rdma=RdmaAnswer(7, b"d", b"g", 30_000, total_len=100))
READY = AcquireReply(ready=ReadyAnswer(8, 3, 100, "below_min"))
INLINE = AcquireReply(ready=ReadyAnswer(8, 0, 3, "below_min", b"abc"))
LOST = PeerLost("peer", "reset")
BROKEN = PathFailed("rdma", "get_failed")
STALE = PathUnavailable("rdma", PathReason.CONNECT_FAILED)
_OFFERED = [t.Begin(), t.PathsReady(PathReason.OK)]
_PULLING = [*_OFFERED, t.AcquireAnswered(RDMA)]
FETCH_ROADS: Mapping[str, Sequence[object]] = {
    "idle": [],
    "preparing": [t.Begin()],
    "acquiring": _OFFERED,
    "moving": _PULLING,
    "stopping": [*_PULLING, t.Cancelled()],
    "abandoning": [*_OFFERED, t.Cancelled()],
    "finished": [*_PULLING, t.Moved()],
    "failed": [t.Begin(), t.Cancelled()],
}
_GIVING_UP: Sequence[object] = [
    t.Cancelled(),
    t.Stopped(ClosedError("the region")),
    t.DeadlinePassed(),
    t.PeerGone(LOST),
]
FETCH_INPUTS: Sequence[object] = [
    t.Begin(),
    t.PathsReady(PathReason.OK),
    t.PathsReady(PathReason.PEER_WITHOUT),
    t.AcquireAnswered(RDMA),
    t.AcquireAnswered(READY),
    t.AcquireAnswered(INLINE),
    t.AcquireFailed(LOST),
    t.Moved(),
    t.MoveFailed(PathReason.GET_FAILED, BROKEN),
    *_GIVING_UP,
]

_WRITE = int(Direction.WRITE)
PUT_RDMA = AcquireReply(
    rdma=RdmaAnswer(7, b"d", b"g", 30_000, total_len=100, direction=_WRITE),
)
PUT_READY = AcquireReply(ready=ReadyAnswer(8, 3, 100, "below_min", direction=_WRITE))
_PUSHING = [*_OFFERED, t.AcquireAnswered(PUT_RDMA)]
_RETURNING = [*_PUSHING, t.MoveFailed(PathReason.GET_FAILED, BROKEN)]
PUT_ROADS: Mapping[str, Sequence[object]] = {
    "idle": [],
    "preparing": [t.Begin()],
    "acquiring": [*_RETURNING, t.Ended()],
    "returning": _RETURNING,
    "moving": _PUSHING,
    "completing": [*_PUSHING, t.Moved()],
    "stopping": [*_PUSHING, t.Cancelled()],
    "abandoning": [*_OFFERED, t.Cancelled()],
    "finished": [*_PUSHING, t.Moved(), t.Ended()],
    "failed": [t.Begin(), t.Cancelled()],
}
PUT_INPUTS: Sequence[object] = [
    t.Begin(),
    t.PathsReady(PathReason.OK),
    t.PathsReady(PathReason.PEER_WITHOUT),
    t.AcquireAnswered(PUT_RDMA),
    t.AcquireAnswered(PUT_READY),
    t.AcquireAnswered(READY),
    t.AcquireFailed(LOST),
    t.Moved(),
    t.MoveFailed(PathReason.GET_FAILED, BROKEN),
    t.Ended(),
    t.EndFailed(BROKEN),
    t.EndFailed(LOST),
    *_GIVING_UP,
]

_PARENT_MOVING = [*_OFFERED, t.AcquireAnswered(PUT_RDMA)]
PARENT_ROADS: Mapping[str, Sequence[object]] = {
    "idle": [],
    "preparing": [*_OFFERED, t.AcquireFailed(STALE)],
    "acquiring": _OFFERED,
    "returning": [*_PARENT_MOVING, t.MoveFailed(PathReason.GET_FAILED, BROKEN)],
    "moving": _PARENT_MOVING,
    "completing": [*_PARENT_MOVING, t.Moved()],
    "stopping": [*_PARENT_MOVING, t.Cancelled()],
    "abandoning": [*_OFFERED, t.Cancelled()],
    "finished": [*_PARENT_MOVING, t.Moved(), t.Ended()],
    "failed": [t.Begin(), t.Cancelled()],
}
PARENT_INPUTS: Sequence[object] = [*PUT_INPUTS, t.AcquireFailed(STALE)]


LIFE, NEXT_LIFE, THIRD_LIFE = Incarnation(7), Incarnation(8), Incarnation(9)


def connection(own: int = 1, *, authenticated: bool = False) -> c.Connection:
    """Of worker 1 to worker 2, whose attempts wait; or the other way round."""
    settings = c.ConnectionSettings(WorkerId(own), WorkerId(3 - own), authenticated)
    machine = c.Connection(settings)
    machine.step(c.LifeAdded(LIFE), 0.0)
    return machine


def yielding() -> c.Connection:
    return connection(2)


_DIALED = [c.Wanted(b"d1")]
_FIRST = c.Proven(c.Offer(b"p1", LIFE, 1))
CONNECTION_ROADS: Mapping[str, Sequence[object]] = {
    "idle": [],
    "dialing": _DIALED,
    "parking": [*_DIALED, _FIRST],
    "open": [_FIRST],
    "crossed": [yielding, *_DIALED, _FIRST],
    "checking": [_FIRST, c.Proven(c.Offer(b"q1", NEXT_LIFE, 1))],
    "closed": [c.Close()],
}
CONNECTION_INPUTS: Sequence[object] = [
    c.Wanted(b"d2"),
    c.DialSucceeded(LIFE),
    c.DialFailed(LOST, b"d2"),
    c.DialFailed(PeerRefused(c.SUPERSEDED), b"d2"),
    _FIRST,
    c.Proven(c.Offer(b"p2", LIFE, 2)),
    c.Proven(c.Offer(b"p2", LIFE, 2, b"p1")),
    c.Proven(c.Offer(b"p2", LIFE, 2, b"d1")),
    c.Proven(c.Offer(b"q2", NEXT_LIFE, 2)),
    c.OfferGone(),
    c.SessionLost(),
    c.PingAnswered(),
    c.LifeAdded(LIFE),
    c.LifeAdded(NEXT_LIFE),
    c.LifeAdded(THIRD_LIFE),
    c.TimedOut(),
    c.Close(),
]


def source() -> g.GrantSource:
    return g.GrantSource()


def requester() -> g.GrantRequester:
    return g.GrantRequester(g.RoundPlanner(4, piece_bytes=1, inflight_bytes_max=2, send_slots=4))


def auto_fetch() -> f.Fetch:
    return f.Fetch(f.FetchPlan(Transport.AUTO, PathReason.OK), deadline=9.0, timeout_s=9.0)


def auto_put() -> p.PutMachine:
    plan = p.PutPlan(Transport.AUTO, PathReason.OK, nbytes=100)
    return p.PutMachine(plan, deadline=9.0, timeout_s=9.0)


def rdma_parent() -> e.ParentMachine:
    plan = e.ParentPlan(Transport.RDMA, PathReason.OK, direction=Direction.WRITE, nbytes=100)
    return e.ParentMachine(plan, deadline=9.0, timeout_s=9.0)


MACHINES: Mapping[str, tuple[Build, Mapping[str, Sequence[object]], Sequence[object]]] = {
    "grant_source": (source, SOURCE_ROADS, SOURCE_INPUTS),
    "grant_requester": (requester, REQUESTER_ROADS, REQUESTER_INPUTS),
    "fetch": (auto_fetch, FETCH_ROADS, FETCH_INPUTS),
    "put": (auto_put, PUT_ROADS, PUT_INPUTS),
    "parent": (rdma_parent, PARENT_ROADS, PARENT_INPUTS),
    "connection": (connection, CONNECTION_ROADS, CONNECTION_INPUTS),
}


def reach(build: Build, road: Sequence[object]) -> TableMachine[Any, Any, Any]:
    """A road may begin with a machine of its own."""
    if road and callable(road[0]):
        build, road = road[0], road[1:]
    machine = build()
    for event in road:
        machine.step(event, 0.0)
    return machine


def snapshot(name: str) -> str:
    """One line for each state and input: what follows, the deadline at time 0, and the effects."""
    build, roads, inputs = MACHINES[name]
    lines = []
    for state, road in roads.items():
        assert reach(build, road).state == state, f"{name}: the road to {state} leads elsewhere"
        for event in inputs:
            machine = reach(build, road)
            try:
                effects = machine.step(event, 0.0)
            except InternalError:
                assert machine.state == state
                lines.append(f"{state} + {_text(event)}: not allowed")
                continue
            due = "" if machine.deadline is None else f" within {machine.deadline:g} s"
            done = "".join(f"\n    {_text(effect)}" for effect in effects)
            lines.append(f"{state} + {_text(event)}: {machine.state}{due}{done}")
    return "\n".join(lines) + "\n"


def _text(thing: object) -> str:
    if isinstance(thing, t.AcquireAnswered):
        kind = "rdma" if thing.reply.rdma else "ready"
        inline = thing.reply.ready is not None and thing.reply.ready.inline is not None
        answer = thing.reply.rdma or thing.reply.ready
        write = " to write" if answer is not None and answer.direction == _WRITE else ""
        return f"AcquireAnswered({'inline' if inline else kind}{write})"
    fields = getattr(thing, "__dataclass_fields__", {})
    values = ", ".join(_value(getattr(thing, name)) for name in fields)
    return f"{type(thing).__name__}({values})"


def _value(value: object) -> str:
    if isinstance(value, OrbitError):
        return type(value).__name__
    if isinstance(value, RdmaAnswer | ReadyAnswer):
        return type(value).__name__
    return str(value)


def diagrams() -> dict[Path, str]:
    note = (
        "<!-- Drawn from the transition tables by tests/unit/protocol/machine_snapshots.py. -->\n"
    )
    source_part = mermaid(g.SOURCE_TABLE, g.SourceState.NEW)
    requester_part = mermaid(g.REQUESTER_TABLE, g.RequesterState.READY)
    return {
        DOCS / "grants-diagram.md": (
            f"# Grant machines\n\n{note}\nInputs that leave a state as it is are left out; see"
            " [the life of a grant](grants.md).\n\n"
            f"## Source\n\n```mermaid\n{source_part}```\n\n"
            f"## Requester\n\n```mermaid\n{requester_part}```\n"
        ),
        DOCS / "connection-diagram.md": (
            f"# The connection of two nodes\n\n{note}\nInputs that leave a state as it is are"
            " left out; see [connections](connections.md).\n\n"
            f"```mermaid\n{mermaid(c.CONNECTION_TABLE, c.ConnectionState.IDLE)}```\n"
        ),
        DOCS / "fetch-diagram.md": (
            f"# The consumer's get and put\n\n{note}\n"
            f"## Get\n\n```mermaid\n{mermaid(f.FETCH_TABLE, t.TransferState.IDLE)}```\n\n"
            f"## Put\n\n```mermaid\n{mermaid(p.PUT_TABLE, t.TransferState.IDLE)}```\n"
        ),
        DOCS / "parent-diagram.md": (
            f"# One request of a transfer engine\n\n{note}\nInputs that leave a state as it is are"
            " left out.\n\n"
            f"```mermaid\n{mermaid(e.PARENT_TABLE, t.TransferState.IDLE)}```\n"
        ),
        DOCS / "region-diagram.md": (
            f"# The life of a region\n\n{note}\nInputs that leave a state as it is are left out;"
            " see [registered memory](registered-memory.md).\n\n"
            f"```mermaid\n{mermaid(r.REGION_TABLE, r.RegionState.REGISTERING)}```\n"
        ),
    }


def files() -> dict[Path, str]:
    texts = {HERE / "snapshots" / f"{name}.txt": snapshot(name) for name in MACHINES}
    return {**texts, **diagrams()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path)
