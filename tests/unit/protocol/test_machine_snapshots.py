"""Every state x input of the table machines against the recorded ones, and the diagrams against
the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orbit.errors import InternalError
from orbit.protocol.connection import CONNECTION_TABLE, ConnectionInput
from orbit.protocol.fetch import FETCH_TABLE, FetchInput
from orbit.protocol.grants import REQUESTER_TABLE, SOURCE_TABLE, RequesterInput, SourceInput
from orbit.protocol.parent import PARENT_TABLE
from orbit.protocol.put import PUT_TABLE
from orbit.protocol.transfer import TransferInput
from tests.unit.protocol.machine_snapshots import (
    CONNECTION_ROADS,
    LIFE,
    LOST,
    MACHINES,
    NEXT_LIFE,
    PARENT_ROADS,
    PUT_READY,
    files,
    reach,
    yielding,
)

TABLES: dict[str, tuple[Any, Any]] = {
    "grant_source": (SOURCE_TABLE, SourceInput),
    "grant_requester": (REQUESTER_TABLE, RequesterInput),
    "fetch": (FETCH_TABLE, FetchInput),
    "put": (PUT_TABLE, TransferInput),
    "parent": (PARENT_TABLE, TransferInput),
    "connection": (CONNECTION_TABLE, ConnectionInput),
}


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_generated_file_is_current(path: Any) -> None:
    assert path.read_text() == files()[path], "run tests/unit/protocol/machine_snapshots.py"


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_and_every_input_is_covered(name: str) -> None:
    _, roads, inputs = MACHINES[name]
    table, union = TABLES[name]
    assert set(roads) == {str(state) for state in table}
    assert {type(event) for event in inputs} == set(union.__args__)
    listed = {kind for row in table.values() for kind in row}
    assert listed == set(union.__args__), "an input that no state takes"


@pytest.mark.parametrize("name", MACHINES)
def test_an_unlisted_input_changes_nothing(name: str) -> None:
    build, roads, inputs = MACHINES[name]
    table, _ = TABLES[name]
    for state, road in roads.items():
        machine = reach(build, road)
        before = dict(vars(machine))
        for event in inputs:
            if type(event) not in table[machine.state]:
                with pytest.raises(InternalError, match="not allowed"):
                    machine.step(event, 1.0)
                assert vars(machine) == before, f"{state} + {event}"


@pytest.mark.parametrize("name", MACHINES)
def test_every_listed_follower_is_reached_from_its_state(name: str) -> None:
    """The table lists nothing that cannot happen."""
    build, roads, inputs = MACHINES[name]
    table, _ = TABLES[name]
    seen: set[tuple[str, type, str]] = set()
    for state, road in (*roads.items(), *EXTRA_ROADS.get(name, ())):
        for event in (*inputs, *EXTRA_INPUTS.get(name, ())):
            machine = reach(EXTRA_BUILDS.get((name, state), build), road)
            before = str(machine.state)
            if type(event) in table[machine.state]:
                machine.step(event, 0.0)
                seen.add((before, type(event), str(machine.state)))
    listed = {
        (str(state), kind, str(follower))
        for state, row in table.items()
        for kind, followers in row.items()
        for follower in followers
    }
    assert listed == seen


def _extras() -> tuple[Any, Any, Any]:
    from orbit.model import Direction, PathReason, Transport
    from orbit.protocol import connection as c
    from orbit.protocol import fetch as f
    from orbit.protocol import grants as g
    from orbit.protocol import parent as e
    from orbit.protocol import put as p
    from orbit.protocol import transfer as t
    from orbit.protocol.messages import AcquireReply, GrantPiece, RdmaAnswer, ReadyAnswer

    piece = GrantPiece(b"d", b"g")

    def one_piece() -> g.GrantRequester:
        return g.GrantRequester(
            g.RoundPlanner(1, piece_bytes=1, inflight_bytes_max=1, send_slots=2)
        )

    def tcp() -> f.Fetch:
        return f.Fetch(f.FetchPlan(Transport.TCP, PathReason.OK))

    def demanded() -> f.Fetch:
        return f.Fetch(f.FetchPlan(Transport.RDMA, PathReason.NO_DEVICE))

    def demanded_later() -> f.Fetch:
        return f.Fetch(f.FetchPlan(Transport.RDMA, PathReason.OK))

    def put_by(transport: Transport, rdma: PathReason) -> Callable[[], p.PutMachine]:
        return lambda: p.PutMachine(p.PutPlan(transport, rdma, nbytes=100))

    def put_nothing() -> p.PutMachine:
        return p.PutMachine(p.PutPlan(Transport.TCP, PathReason.OK))

    def parent_by(transport: Transport, rdma: PathReason) -> Callable[[], e.ParentMachine]:
        return lambda: e.ParentMachine(e.ParentPlan(transport, rdma, nbytes=2))

    write = int(Direction.WRITE)
    whole = AcquireReply(ready=ReadyAnswer(8, 0, 2, "asked", b"ab"))
    nothing = AcquireReply(ready=ReadyAnswer(8, 0, 0, direction=write))
    many = AcquireReply(rdma=RdmaAnswer(7, b"d", b"g", 0, 100, (piece,) * 64, write))
    empty = AcquireReply(rdma=RdmaAnswer(7, b"d", b"g", 0, total_len=0))
    short = AcquireReply(ready=ReadyAnswer(8, 0, 3, "below_min", b"ab"))
    tcp_pull = AcquireReply(ready=ReadyAnswer(8, 1, 3, "below_min"))
    waits = [c.Wanted(b"d1"), c.Proven(c.Offer(b"q1", NEXT_LIFE, 1))]
    roads = {
        "connection": [
            ("backs off", [c.Wanted(b"d1"), c.DialFailed(LOST, b"d2")]),
            ("lost a session", [c.Proven(c.Offer(b"p1", LIFE, 1)), c.SessionLost()]),
            ("yields", [yielding, c.Wanted(b"d1")]),
            ("lost what crossed", [*CONNECTION_ROADS["crossed"], c.SessionLost()]),
            ("a new life waits", waits),
        ],
        "grant_requester": [("one piece", [])],
        "fetch": [
            ("tcp", []),
            ("demanded", []),
            ("demanded later", [t.Begin()]),
            ("pulls by tcp", [t.Begin(), t.AcquireAnswered(tcp_pull)]),
        ],
        "put": [
            ("tcp", []),
            ("demanded", []),
            ("demanded later", [t.Begin()]),
            ("offers", [t.Begin(), t.PathsReady(PathReason.OK)]),
            ("nothing", [t.Begin()]),
            ("pushes by tcp", [t.Begin(), t.AcquireAnswered(PUT_READY)]),
        ],
        "parent": [
            ("tcp", []),
            ("demanded", []),
            ("reads by tcp", [t.Begin()]),
            ("lost its peer", [*PARENT_ROADS["moving"], t.PeerGone(LOST)]),
            ("is asked again", [*PARENT_ROADS["preparing"], t.PathsReady(PathReason.OK)]),
        ],
    }
    builds = {
        ("grant_requester", "one piece"): one_piece,
        ("fetch", "tcp"): tcp,
        ("fetch", "demanded"): demanded,
        ("fetch", "demanded later"): demanded_later,
        ("fetch", "pulls by tcp"): tcp,
        ("put", "tcp"): put_by(Transport.TCP, PathReason.OK),
        ("put", "demanded"): put_by(Transport.RDMA, PathReason.NO_DEVICE),
        ("put", "demanded later"): put_by(Transport.RDMA, PathReason.OK),
        ("put", "nothing"): put_nothing,
        ("put", "pushes by tcp"): put_by(Transport.TCP, PathReason.OK),
        ("parent", "tcp"): parent_by(Transport.TCP, PathReason.OK),
        ("parent", "demanded"): parent_by(Transport.RDMA, PathReason.NO_DEVICE),
        ("parent", "reads by tcp"): parent_by(Transport.TCP, PathReason.OK),
    }
    inputs = {
        "fetch": [t.AcquireAnswered(empty), t.AcquireAnswered(short)],
        "put": [t.AcquireAnswered(nothing), t.AcquireAnswered(many)],
        "parent": [t.AcquireAnswered(whole), t.AcquireAnswered(many)],
    }
    return roads, builds, inputs


EXTRA_ROADS, EXTRA_BUILDS, EXTRA_INPUTS = _extras()
