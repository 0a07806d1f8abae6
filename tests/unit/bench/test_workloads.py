"""What is counted of operations: paths, errors, time, usage; and how a server checks messages."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from orbit.bench.endings import ERRORS_IN_A_ROW_MAX, Clock, Moved, Tally
from orbit.bench.offers import Sinks
from orbit.bench.pattern import Pattern
from orbit.bench.plan import Plan, Verb
from orbit.bench.usage import Samples, Usage, Work
from orbit.errors import (
    OrbitError,
    PathUnavailable,
    PeerLost,
    PeerProtocolError,
    RequestFailed,
    Unquiesced,
)
from orbit.model import PathName, PathReason, Transport

TCP, RDMA = PathName.TCP, PathName.RDMA


def text(path: PathName, rails: Iterable[str]) -> str:
    return f"{path}/{'+'.join(sorted(rails))}" if path is RDMA else path.value


def test_paths_are_counted_by_operation() -> None:
    tally = Tally(text)
    tally.succeeded(0.1, [Moved(RDMA, ("b",)), Moved(RDMA, ("a",), phases={"read": 0.5})])
    tally.succeeded(0.1, [Moved(RDMA, ("a",)), Moved(TCP, (), PathReason.BUDGET)])
    tally.succeeded(0.1, [Moved(RDMA, ("a", "b"), phases={"read": 1.5})])
    assert tally.paths == {"rdma/a+b": 2, "tcp and rdma/a": 1}
    assert (tally.path, tally.reason, tally.phases()) == ("rdma/a+b", "budget", {"read": 1.0})


def test_time_is_when_something_was_under_way() -> None:
    clock = Clock()
    for begin, at in ((1, 1.0), (1, 2.0), (0, 3.0), (0, 5.0), (1, 8.0)):
        (clock.begin if begin else clock.end)(at)
    assert clock.seconds(9.0) == 5.0


@pytest.mark.parametrize("error", [PeerLost("it", "gone"), PathUnavailable("rdma", "no_device")])
def test_what_every_operation_would_meet_is_raised(error: OrbitError) -> None:
    tally = Tally(text)
    with pytest.raises(type(error)):
        tally.failed(error)
    assert tally.errors == 0


def test_errors_of_single_operations_are_counted_with_the_first_reason() -> None:
    tally = Tally(text)
    tally.failed(RequestFailed("failed", "first"))
    tally.failed(RequestFailed("failed", "second"))
    assert (tally.errors, tally.problem) == (2, "")
    assert "first" in tally.reason
    for _ in range(ERRORS_IN_A_ROW_MAX):
        tally.failed(RequestFailed("failed"))
    assert "in a row" in tally.problem


def test_memory_whose_end_is_not_proven_ends_the_run() -> None:
    tally = Tally(text)
    tally.failed(Unquiesced("memory", 4096, "lost"))
    assert tally.problem.startswith("unquiesced: ")


def test_samples_stay_bounded_and_keep_the_largest() -> None:
    samples = Samples(limit=10)
    for number in (1000, *range(500)):
        samples.add(float(number))
    kept = list(samples)
    assert (len(kept), samples.count, max(kept)) == (11, 501, 1000.0)


def test_copies_are_told_where_they_are_known() -> None:
    spent = Usage(0.5, 7, targets_copied=3, fetched_rdma=0, fetched_tcp=0)
    size = 1 << 20

    def copied(verb: Verb, path: PathName | None, *, staged: bool = False) -> int | None:
        return Work(verb, size, 10, path).copied(spent, staged=staged)

    assert copied(Verb.GET_INTO, RDMA) == 3 * size
    assert copied(Verb.READ, RDMA) == 3 * size
    assert copied(Verb.READ, RDMA, staged=True) == 10 * size
    assert copied(Verb.PUT, TCP) == 0
    assert copied(Verb.GET, None) is None
    assert copied(Verb.MSG, RDMA) is None
    assert Work(Verb.GET, 64, 10, TCP).copied(spent, staged=False) is None


def test_usage_travels_and_is_checked() -> None:
    usage = Usage(0.5, None, 1, 2, 3)
    assert Usage.from_wire(usage.to_wire()) == usage
    assert usage.since(Usage(0.25, 5, 1, 0, 0)) == Usage(0.25, None, 0, 2, 3)
    with pytest.raises(PeerProtocolError):
        Usage.from_wire({"cpu_s": "much"})


def test_a_server_finds_messages_in_any_order_and_wrong_ones() -> None:
    plan = Plan(
        verb=Verb.MSG, sizes=(300,), transport=Transport.TCP, batch=3, inflight=2, iterations=1
    )
    end: Any = SimpleNamespace(node=None)
    sinks = Sinks(plan, 300, end)
    payloads = [memoryview(bytearray(300)) for _ in range(3)]
    for item, payload in enumerate(payloads):
        Pattern(plan.seed).fill(payload, (4 * 2 + 1) * 3 + item)  # turn 4 of worker 1
    assert sinks.differs(1, 4) == [0, 0]  # none has come
    sinks._last[1].extend([payloads[2], payloads[0], payloads[1]])
    assert sinks.differs(1, 4) is None
    assert sinks.differs(1, 5) is not None
    payloads[2][17] ^= 1
    assert sinks.differs(1, 4) == [2, 17]
