"""How requests end when something goes wrong: each failure is told by its cause, and everything is
given back when nothing reaches memory any more, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from orbit.config import EngineConfig
from orbit.errors import (
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
    Unquiesced,
)
from orbit.model import PathReason
from orbit.runtime.engine.batch import Batch
from orbit.runtime.engine.parent_job import ParentJob
from orbit.runtime.engine.requests import TransferResult, TransferState
from orbit.runtime.retained import Retained, retained
from orbit.testing.clock import run_virtual
from orbit.testing.sim_arrays import SimArray
from orbit.transport.interface import Exposure
from tests.unit.runtime.engine.pair import SIZE, Pair, engine_pair

OPS = ["read", "write"]
STAGED = EngineConfig(host_memory="staged")
QUICK = EngineConfig(teardown_timeout=2.0)


async def only(batch: Batch) -> TransferResult:
    await batch.wait()
    (result,) = batch.results()
    assert batch.nbytes == result.nbytes
    return result


def in_use(pair: Pair) -> dict[str, int]:
    """Of the requester, without what regions cost."""
    budgets = pair.requester.engine.statistics().budgets
    names = ("max_grants", "max_direct_bytes", "max_staging_bytes")
    return {name: budgets[name][0] for name in names if budgets[name][0]}


async def works_again(pair: Pair) -> None:
    assert in_use(pair) == {}
    (result,) = await pair.submit(pair.request(timeout=30.0))
    assert result.nbytes == SIZE
    assert pair.requester.memory == pair.source.memory


@contextlib.contextmanager
def newly_retained() -> Iterator[list[Retained]]:
    """What is retained after the block and was not before it."""
    before = set(retained())
    found: list[Retained] = []
    yield found
    found += [entry for entry in retained() if entry not in before]


def slow(pair: Pair, chunk_s: float) -> None:
    """Each chunk of a move takes its time, on every path; 0: as good as none."""
    for path in (pair.requester.path, pair.requester.node.tcp):
        faults = path.faults
        faults.bytes_per_s = faults.chunk_bytes / chunk_s if chunk_s else 1e9


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_a_deadline_ends_a_move_and_the_drain_is_waited_for(op: str, transport: str) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            slow(pair, 1.0)
            result = await only(pair.submit(pair.request(op, transport=transport, timeout=2.5)))
            assert isinstance(result.error, DeadlineExceeded)
            assert (result.state, result.nbytes) == (TransferState.FAILED, 0)
            assert result.locally_drained
            slow(pair, 0.0)
            if op == "read":
                await works_again(pair)

    run_virtual(main())


@pytest.mark.parametrize("op", OPS)
def test_cancelled_in_the_middle(op: str) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            slow(pair, 1.0)
            batch = pair.submit(pair.request(op))
            assert not await batch.wait(3.5)
            batch.cancel()
            batch.cancel()
            result = await only(batch)
            assert (result.state, result.nbytes) == (TransferState.CANCELLED, 0)
            assert result.locally_drained
            with pytest.raises(ClosedError):
                await batch
            slow(pair, 0.0)
            await works_again(pair)

    run_virtual(main())


def test_cancelled_while_it_waits_for_a_budget() -> None:
    async def main() -> None:
        async with engine_pair(EngineConfig(max_direct_bytes=SIZE)) as pair:
            slow(pair, 0.1)
            half = SIZE // 2
            first = pair.submit(
                pair.request(local=pair.requester.region[:half], remote=pair.source.remote[:half])
            )
            second = pair.submit(
                pair.request(local=pair.requester.region[half:], remote=pair.source.remote[half:]),
            )
            third = pair.submit(
                pair.request(local=pair.requester.region[:1], remote=pair.source.remote[:1])
            )
            await asyncio.sleep(0.05)
            assert pair.requester.use("max_direct_bytes") == SIZE
            third.cancel()
            assert (await only(third)).state in (TransferState.CANCELLED, TransferState.FAILED)
            assert (await only(first)).nbytes == half
            assert (await only(second)).nbytes == half

    run_virtual(main())


def test_a_waiter_has_its_own_deadline() -> None:
    async def main() -> None:
        async with engine_pair(EngineConfig(max_grants=1)) as pair:
            slow(pair, 1.0)
            half = SIZE // 2
            here, there = pair.requester.region, pair.source.remote
            first = pair.submit(pair.request(local=here[:half], remote=there[:half]))
            await asyncio.sleep(0.5)
            late = pair.request(local=here[half:], remote=there[half:], timeout=1.0)
            result = await only(pair.submit(late))
            assert isinstance(result.error, DeadlineExceeded)
            assert "waiting for max_grants" in str(result.error)
            assert (await only(first)).nbytes == half

    run_virtual(main())


@pytest.mark.parametrize("op", OPS)
def test_a_rail_that_dies_fails_the_parent_with_its_reason(op: str) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            slow(pair, 1.0)
            batch = pair.submit(pair.request(op))
            await asyncio.sleep(2.5)
            pair.requester.path.rail_down(1, "the cable was pulled")
            result = await only(batch)
            assert isinstance(result.error, PathFailed)
            assert "the cable was pulled" in str(result.error)
            assert (result.state, result.nbytes) == (TransferState.FAILED, 0)
            assert result.locally_drained
            slow(pair, 0.0)
            (again,) = await pair.submit(pair.request(timeout=30.0))
            assert again.rails == ("sim_0",)
            pair.requester.path.rail_up(1)
            (both,) = await pair.submit(pair.request(timeout=30.0))
            assert both.rails == ("sim_0", "sim_1")

    run_virtual(main())


def test_a_source_without_the_array_is_asked_once_more() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            await works_again(pair)
            # The notice goes the same road as the refusal, before it.
            pair.source.path.rail_faults.notice_s = 0.0
            pair.source.path.lose_arrays("evicted")
            batch = pair.submit(pair.request())
            result = await only(batch)
            assert result.nbytes == SIZE

    run_virtual(main())


def test_the_second_try_has_private_arrays_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first would be in its way: there is no room for more."""

    async def main() -> None:
        async with engine_pair(STAGED) as pair:
            source, requester = pair.source.path, pair.requester.path
            source.rail_faults.notice_s = None  # the requester learns of it by the refusal
            requester.arrays.endpoints.limit = 4
            expose, tries = source.expose_runs, 0

            async def expose_runs(*args: Any) -> Exposure:
                nonlocal tries
                tries += 1
                if tries == 1:
                    source.lose_arrays("evicted")
                return await expose(*args)

            monkeypatch.setattr(source, "expose_runs", expose_runs)
            result = await only(pair.submit(pair.request(timeout=30.0)))
            assert (result.nbytes, tries) == (SIZE, 2)
            assert len(result.rails) == 2
            assert requester.arrays.private == 0

    run_virtual(main())


def test_without_room_for_private_arrays_a_second_try_fails_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with engine_pair(STAGED) as pair:
            monkeypatch.setattr(ParentJob, "_close_private", _no_array_closes)
            requester = pair.requester.path
            pair.source.path.rail_faults.notice_s = None
            requester.arrays.endpoints.limit = 4
            connected = requester.arrays.connect

            async def connect(array: SimArray, deadline: float | None) -> SimArray:
                made = await connected(array, deadline)
                pair.source.path.lose_arrays("evicted")
                return made

            monkeypatch.setattr(requester.arrays, "connect", connect)
            result = await only(pair.submit(pair.request()))
            assert isinstance(result.error, DeadlineExceeded)
            assert (result.state, result.nbytes) == (TransferState.FAILED, 0)
            await requester.arrays.close()

    run_virtual(main())


async def _no_array_closes(job: ParentJob) -> None:
    """As if each end were late."""


def test_a_write_whose_receipt_is_lost_is_not_a_success() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            pair.requester.path.rail_faults.receipts_lost = 1
            result = await only(pair.submit(pair.request("write")))
            assert isinstance(result.error, PathFailed)
            assert (result.state, result.nbytes) == (TransferState.FAILED, 0)
            await works_again(pair)

    run_virtual(main())


def test_a_read_whose_receipt_is_lost_is_not_a_success() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            pair.requester.path.rail_faults.receipts_lost = 1
            result = await only(pair.submit(pair.request("read")))
            assert isinstance(result.error, PathFailed)
            assert result.nbytes == 0
            await works_again(pair)

    run_virtual(main())


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_proven_stays_held_and_listed(op: str) -> None:
    async def main() -> None:
        with newly_retained() as kept:
            async with engine_pair(QUICK, locks_left=1, kept=True) as pair:
                pair.requester.path.rail_faults.withheld = [70_000]
                result = await only(pair.submit(pair.request(op)))
                assert result.state is TransferState.UNQUIESCED
                assert isinstance(result.error, Unquiesced)
                assert not result.locally_drained
                assert result.nbytes == 0
                assert pair.requester.use("max_direct_bytes") == SIZE
                assert pair.requester.use("max_grants") > 0
                with pytest.raises(OrbitError):  # the range is still locked
                    await pair.submit(pair.request())
                with pytest.raises(Unquiesced):
                    await pair.requester.engine.close_requester(5.0)
                with pytest.raises(Unquiesced):
                    await pair.requester.engine.close(5.0)
        assert SIZE in {entry.nbytes for entry in kept}

    run_virtual(main())


def test_an_end_that_comes_late_gives_everything_back_then() -> None:
    async def main() -> None:
        async with engine_pair(QUICK) as pair:
            # The bytes have arrived; the source waits for a receipt, longer than anybody else does.
            pair.requester.path.rail_faults.receipts_lost = 1
            pair.source.path.rail_faults.receipt_timeout_s = 20.0
            with newly_retained() as kept:
                result = await only(pair.submit(pair.request("write", timeout=1.0)))
            assert result.state is TransferState.UNQUIESCED
            assert isinstance(result.error, Unquiesced)
            assert isinstance(result.error.__cause__, DeadlineExceeded)
            assert not result.locally_drained
            assert [entry.nbytes for entry in kept] == [SIZE]
            assert pair.requester.use("max_direct_bytes") == SIZE
            with pytest.raises(DeadlineExceeded):
                await pair.requester.engine.close_requester(1.0)
            await pair.requester.engine.close_requester(60.0)  # goes on waiting
            assert in_use(pair) == {}
            assert kept[0] not in retained()

    run_virtual(main())


def test_the_peer_dies_in_the_middle() -> None:
    async def main() -> None:
        async with engine_pair(close=False) as pair:
            slow(pair, 0.1)
            batch = pair.submit(pair.request())
            await asyncio.sleep(0.35)
            pair.world.kill(pair.source.node)
            result = await only(batch)
            assert isinstance(result.error, PeerLost | PathFailed)
            assert (result.nbytes, result.locally_drained) == (0, True)
            await pair.requester.engine.close(None)
            await pair.source.engine.close(None)

    run_virtual(main())


def test_a_region_that_is_unregistered_by_force_ends_what_uses_it() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            slow(pair, 1.0)
            batch = pair.submit(pair.request())
            await asyncio.sleep(2.5)
            await pair.requester.region.unregister(0.5)
            result = await only(batch)
            assert isinstance(result.error, ClosedError)
            assert result.locally_drained

    run_virtual(main())


def test_a_sources_region_by_force() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            slow(pair, 1.0)
            batch = pair.submit(pair.request())
            await asyncio.sleep(2.5)
            await pair.source.region.unregister(0.5)
            result = await only(batch)
            assert result.error is not None
            assert (result.nbytes, result.locally_drained) == (0, True)

    run_virtual(main())


def test_closing_waits_and_leaving_gives_up() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            slow(pair, 1.0)
            batch = pair.submit(pair.request())
            with pytest.raises(DeadlineExceeded):
                await pair.requester.engine.close(2.5)
            with pytest.raises(ClosedError):
                pair.submit(pair.request())
            pair.requester.engine.cancel_all()
            assert (await only(batch)).state is TransferState.CANCELLED

    run_virtual(main())


def test_the_first_failure_of_a_batch_is_raised_when_all_are_over() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            half = SIZE // 2
            here, there = pair.requester.region, pair.source.remote
            good = pair.request(local=here[:half], remote=there[:half])
            bad = pair.request(local=here[:half], remote=there[half:])  # overlaps
            batch = pair.submit(good, bad)
            with pytest.raises(OrbitError):
                await batch
            assert batch.done
            states = [result.state for result in batch.results()]
            assert states == [TransferState.SUCCEEDED, TransferState.FAILED]
            assert batch.nbytes == half

    run_virtual(main())


@pytest.mark.parametrize("reason", [PathReason.WINDOWS_BUSY, PathReason.WINDOW_KEYS])
def test_a_source_that_cannot_grant_says_why(reason: PathReason) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            pair.source.path.faults.expose = reason
            result = await only(pair.submit(pair.request()))
            assert isinstance(result.error, PathUnavailable)
            assert result.error.reason == reason
            pair.source.path.faults.expose = PathReason.OK
            await works_again(pair)

    run_virtual(main())


@pytest.mark.parametrize("source_staged", [False, True])
@pytest.mark.parametrize("requester_staged", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_staged_on_each_side(op: str, requester_staged: bool, source_staged: bool) -> None:
    async def main() -> None:
        config = STAGED if requester_staged else EngineConfig()
        source = STAGED if source_staged else EngineConfig()
        async with engine_pair(config, source=source) as pair:
            for nbytes in (1, 65_536, SIZE):
                request = pair.request(
                    op,
                    local=pair.requester.region[SIZE - nbytes :],
                    remote=pair.source.remote[SIZE - nbytes :],
                )
                batch = pair.submit(request)
                (result,) = await batch
                assert result.nbytes == nbytes
                assert ("close arrays" in result.phases) == (requester_staged or source_staged)
            assert pair.requester.memory == pair.source.memory
            assert not any(a.private for a in pair.requester.path.arrays.requested.values())

    run_virtual(main())


def test_a_private_array_whose_end_is_not_proven_keeps_the_staging() -> None:
    async def main() -> None:
        with newly_retained() as kept:
            async with engine_pair(STAGED, kept=True, locks_left=1) as pair:
                pair.requester.path.rail_faults.closes_unproven = 1
                result = await only(pair.submit(pair.request()))
                assert result.state is TransferState.UNQUIESCED
                assert pair.requester.use("max_staging_bytes") == SIZE
        assert kept

    run_virtual(main())
