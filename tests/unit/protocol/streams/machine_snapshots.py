"""Every state x input of the stream machines, as text, and their diagrams.

Run as a program it rewrites the snapshots and the diagrams; the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit.errors import InternalError
from orbit.protocol.streams import receiver as r
from orbit.protocol.streams import sender as s
from orbit.protocol.streams.ends import StreamWindow
from orbit.protocol.streams.frames import NoteKind
from orbit.protocol.transitions import TableMachine, mermaid

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[3] / "docs" / "design"
WINDOW = StreamWindow(2, 100)

Build = Callable[[], TableMachine[Any, Any, Any]]

_FULL = [s.Submit(1, 10), s.Submit(2, 10), s.Submit(3, 10)]
SENDER_ROADS: Mapping[str, Sequence[object]] = {
    "attached": _FULL,
    "finishing": [*_FULL, s.Finalize()],
    "closing": [s.Submit(1, 10), s.Finalize()],
    "ended": [s.Cancelled()],
}
SENDER_INPUTS: Sequence[object] = [
    s.Submit(9, 60),
    s.Withdraw(3),
    s.Credited(4, 120),
    s.Credited(99, 100),
    s.Finalize(),
    s.Abandon(NoteKind.FAILED, "why"),
    s.Abandon(NoteKind.FAILED, "not staged", 0),
    s.Cancelled("enough"),
    s.Finished(),
    s.LinkLost("reset"),
    s.TimedOut(),
]

_ATTACHED = [r.Attach(WINDOW), r.ItemArrived(0, 10), r.ItemArrived(1, 90, staged=True)]
RECEIVER_ROADS: Mapping[str, Sequence[object]] = {
    "open": [],
    "attached": _ATTACHED,
    "draining": [*_ATTACHED, r.TerminalArrived(NoteKind.FINALIZED, 2)],
    "ended": [r.Cancel()],
}
RECEIVER_INPUTS: Sequence[object] = [
    r.Attach(WINDOW),
    r.ItemArrived(2, 10),
    r.ItemArrived(1, 10),
    r.Fetched(1),
    r.ItemBroken(0, "no value"),
    r.ItemBroken(1, "not fetched"),
    r.Taken(),
    r.TerminalArrived(NoteKind.FINALIZED, 2),
    r.TerminalArrived(NoteKind.FAILED, 3, "why"),
    r.Heartbeat(),
    r.Cancel(),
    r.LinkLost("reset"),
    r.TimedOut(),
]


def sender() -> s.StreamSender:
    return s.StreamSender(WINDOW, 1.0, -1.0)


def receiver() -> r.StreamReceiver:
    return r.StreamReceiver(1.0)


MACHINES: Mapping[str, tuple[Build, Mapping[str, Sequence[object]], Sequence[object]]] = {
    "stream_sender": (sender, SENDER_ROADS, SENDER_INPUTS),
    "stream_receiver": (receiver, RECEIVER_ROADS, RECEIVER_INPUTS),
}


def reach(build: Build, road: Sequence[object]) -> TableMachine[Any, Any, Any]:
    machine = build()
    for event in road:
        machine.step(event, 0.0)
    return machine


def snapshot(name: str) -> str:
    """One line for each state and input: what follows, the end that is known, the effects."""
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
            end = getattr(machine, "end", None)
            known = "" if end is None else f" [{end.kind}]"
            done = "".join(f"\n    {_text(effect)}" for effect in effects)
            lines.append(f"{state} + {_text(event)}: {machine.state}{known}{done}")
    return "\n".join(lines) + "\n"


def _text(thing: object) -> str:
    fields = getattr(thing, "__dataclass_fields__", {})
    values = ", ".join(_value(getattr(thing, name)) for name in fields)
    return f"{type(thing).__name__}({values})"


def _value(value: object) -> str:
    return value.name if isinstance(value, NoteKind) else str(value)


def diagram() -> str:
    return (
        "# Stream machines\n\n"
        "<!-- Drawn from the tables by tests/unit/protocol/streams/machine_snapshots.py. -->\n\n"
        "Inputs that leave a state as it is are left out; see [streams](streams.md).\n\n"
        f"## Sender\n\n```mermaid\n{mermaid(s.SENDER_TABLE, s.SenderState.ATTACHED)}```\n\n"
        f"## Receiver\n\n```mermaid\n{mermaid(r.RECEIVER_TABLE, r.ReceiverState.OPEN)}```\n"
    )


def files() -> dict[Path, str]:
    texts = {HERE / "snapshots" / f"{name}.txt": snapshot(name) for name in MACHINES}
    return {**texts, DOCS / "streams-diagram.md": diagram()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path)
