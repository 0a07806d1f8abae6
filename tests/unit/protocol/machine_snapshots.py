"""Every state x input of the table machines, as text, and their diagrams.

Run as a program it rewrites the snapshots and the generated diagrams; the tests compare. A state is
reached by real inputs, never by assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit.errors import InternalError, OrbitError, PathFailed, PeerLost
from orbit.model import PathReason, Transport
from orbit.protocol import fetch as f
from orbit.protocol import grants as g
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
_CLOSING = [g.Start(), g.ReadsCompleted(1), g.ReadsCompleted(1)]
_SETTLING = [*_CLOSING, g.ReadsCompleted(2)]
_KILLING = [g.Start(), g.QueuePairFailed("gone")]
REQUESTER_ROADS: Mapping[str, Sequence[object]] = {
    "ready": [],
    "reading": [g.Start()],
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
    g.ReadsCompleted(1),
    g.ReadsCompleted(2),
    g.ReadFailed("access"),
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
_OFFERED = [f.Begin(), f.PathsReady(PathReason.OK)]
_PULLING = [*_OFFERED, f.AcquireAnswered(RDMA)]
FETCH_ROADS: Mapping[str, Sequence[object]] = {
    "idle": [],
    "preparing": [f.Begin()],
    "acquiring": _OFFERED,
    "pulling": _PULLING,
    "stopping": [*_PULLING, f.Cancelled()],
    "abandoning": [*_OFFERED, f.Cancelled()],
    "finished": [*_PULLING, f.PullFinished()],
    "failed": [f.Begin(), f.Cancelled()],
}
FETCH_INPUTS: Sequence[object] = [
    f.Begin(),
    f.PathsReady(PathReason.OK),
    f.PathsReady(PathReason.PEER_WITHOUT),
    f.AcquireAnswered(RDMA),
    f.AcquireAnswered(READY),
    f.AcquireAnswered(INLINE),
    f.AcquireFailed(LOST),
    f.PullFinished(),
    f.PullFailed(PathReason.GET_FAILED, BROKEN),
    f.Cancelled(),
    f.DeadlinePassed(),
    f.PeerGone(LOST),
]


def source() -> g.GrantSource:
    return g.GrantSource()


def requester() -> g.GrantRequester:
    return g.GrantRequester(g.RoundPlanner(4, piece_bytes=1, inflight_bytes_max=2, send_slots=4))


def auto_fetch() -> f.Fetch:
    return f.Fetch(f.FetchPlan(Transport.AUTO, PathReason.OK), deadline=9.0, timeout_s=9.0)


MACHINES: Mapping[str, tuple[Build, Mapping[str, Sequence[object]], Sequence[object]]] = {
    "grant_source": (source, SOURCE_ROADS, SOURCE_INPUTS),
    "grant_requester": (requester, REQUESTER_ROADS, REQUESTER_INPUTS),
    "fetch": (auto_fetch, FETCH_ROADS, FETCH_INPUTS),
}


def reach(build: Build, road: Sequence[object]) -> TableMachine[Any, Any, Any]:
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
    if isinstance(thing, f.AcquireAnswered):
        kind = "rdma" if thing.reply.rdma else "ready"
        inline = thing.reply.ready is not None and thing.reply.ready.inline is not None
        return f"AcquireAnswered({'inline' if inline else kind})"
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
        DOCS / "fetch-diagram.md": (
            f"# The consumer's get\n\n{note}\n"
            f"```mermaid\n{mermaid(f.FETCH_TABLE, f.FetchState.IDLE)}```\n"
        ),
    }


def files() -> dict[Path, str]:
    texts = {HERE / "snapshots" / f"{name}.txt": snapshot(name) for name in MACHINES}
    return {**texts, **diagrams()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path)
