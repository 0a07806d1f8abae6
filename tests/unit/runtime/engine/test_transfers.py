"""Requests from end to end: bytes, rails, ranges, rights, and what is refused before it begins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orbit.config import EngineConfig
from orbit.errors import (
    BudgetExceeded,
    ClosedError,
    OutOfRange,
    PathUnavailable,
    PeerRefused,
    RangeBusy,
    UnknownHandle,
    UsageError,
    WrongDirection,
)
from orbit.model import RegionAccess
from orbit.protocol.remote_region import RemoteRegion
from orbit.runtime.engine.requests import RangeRequest, TransferRequest, TransferState
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.unit.runtime.engine.pair import KIB, MIB, SIZE, End, Pair, engine_pair

TRANSPORTS = ["rdma", "tcp"]


def guarded(before: bytes, start: int, part: bytes) -> bytes:
    return before[:start] + part + before[start + len(part) :]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("nbytes", [1, 65_535, 65_536, 200_000, SIZE - 64])
@pytest.mark.parametrize("op", ["read", "write"])
def test_the_bytes_and_no_others(transport: str, nbytes: int, op: str) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            here, there = pair.requester, pair.source
            old, new = bytes(here.memory), bytes(there.memory)
            request = pair.request(
                op,
                local=here.region[7 : 7 + nbytes],
                remote=there.remote[31 : 31 + nbytes],
                transport=transport,
            )
            (result,) = await pair.submit(request)
            assert result.state is TransferState.SUCCEEDED
            assert (result.nbytes, result.path.value, result.locally_drained) == (
                nbytes,
                transport,
                True,
            )
            if op == "read":
                assert here.memory == guarded(old, 7, new[31 : 31 + nbytes])
                assert there.memory == new
            else:
                assert there.memory == guarded(new, 31, old[7 : 7 + nbytes])
                assert here.memory == old

    run_virtual(main())


def test_slices_go_over_both_rails_and_say_why() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            batch = pair.submit(pair.request())
            (result,) = await batch
            assert result.rails == ("sim_0", "sim_1")
            (story,) = batch.explanation()
            assert len(story.reasons) == 2
            assert all("chosen for 8 slices" in reason for reason in story.reasons)
            text = batch.explain()
            assert "succeeded" in text
            for phase in ("reach", "wait for grants", "wait for bytes", "connect", "acquire"):
                assert phase in text
            assert {"move", "finish", "total"} <= set(result.phases)

    run_virtual(main())


def test_a_mask_leaves_one_rail() -> None:
    async def main() -> None:
        async with engine_pair(EngineConfig(device_mask=2)) as pair:
            batch = pair.submit(pair.request())
            (result,) = await batch
            assert result.rails == ("sim_1",)
            assert "not in the device mask" in batch.explain()

    run_virtual(main())


def test_a_paused_rail_is_not_used_and_without_any_nothing_begins() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            pair.requester.path.rail_down(0)
            (result,) = await pair.submit(pair.request())
            assert result.rails == ("sim_1",)
            pair.requester.path.rail_down(1)
            batch = pair.submit(pair.request())
            with pytest.raises(PathUnavailable) as caught:
                await batch
            assert caught.value.reason == "port_down"
            (result,) = batch.results()
            assert (result.state, result.nbytes) == (TransferState.FAILED, 0)

    run_virtual(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("op", ["read", "write"])
def test_many_ranges_as_arrays(transport: str, op: str) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            count, size = 300, 3_000
            local = np.arange(count) * 3_333
            remote = local[::-1].copy()
            request = RangeRequest(
                op,
                pair.requester.region,
                pair.source.remote,
                local,
                remote,
                np.full(count, size),
                transport=transport,
            )
            here, there = pair.requester.memory, pair.source.memory
            old, new = bytearray(here), bytearray(there)
            batch = pair.submit(request)
            (result,) = await batch
            assert result.nbytes == count * size
            assert batch.nbytes == count * size
            for mine, other in zip(local.tolist(), remote.tolist(), strict=True):
                if op == "read":
                    old[mine : mine + size] = new[other : other + size]
                else:
                    new[other : other + size] = old[mine : mine + size]
            assert (here, there) == (old, new)

    run_virtual(main())


def test_three_and_three_at_once_in_both_directions() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            step = SIZE // 8
            here, there = pair.requester, pair.source
            wanted = [bytes(here.memory), bytes(there.memory)]
            requests = []
            for number in range(6):
                low, high = number * step, number * step + step - 100
                op = "read" if number % 2 else "write"
                requests.append(
                    pair.request(op, local=here.region[low:high], remote=there.remote[low:high])
                )
                source = wanted[1] if op == "read" else wanted[0]
                target = 0 if op == "read" else 1
                wanted[target] = guarded(wanted[target], low, source[low:high])
            results = await pair.submit(*requests)
            assert [result.state for result in results] == [TransferState.SUCCEEDED] * 6
            assert [bytes(here.memory), bytes(there.memory)] == wanted

    run_virtual(main())


def test_no_bytes_need_no_grant_but_a_region() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            batch = pair.submit(
                pair.request(local=pair.requester.region[5:5], remote=pair.source.remote[9:9])
            )
            (result,) = await batch
            assert (result.state, result.nbytes) == (TransferState.SUCCEEDED, 0)
            assert batch.explanation()[0].grants == 0
            gone = pair.source.remote
            await pair.source.region.unregister()
            with pytest.raises(UnknownHandle):
                await pair.submit(pair.request(local=pair.requester.region[5:5], remote=gone[9:9]))

    run_virtual(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_region_does_not_allow(transport: str) -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            memory = bytearray(100)
            (readable,) = await pair.source.engine.register([memory], "read")
            local = pair.requester.region[:100]
            request = pair.request(
                "write", local=local, remote=readable.remote(), transport=transport
            )
            with pytest.raises(WrongDirection):
                await pair.submit(request)
            # A requester that claims more than the region allows is refused by its owner.
            forged = RemoteRegion(readable.remote().handle, 100, RegionAccess.READ_WRITE)
            with pytest.raises(WrongDirection):
                await pair.submit(
                    pair.request("write", local=local, remote=forged, transport=transport)
                )
            larger = RemoteRegion(readable.remote().handle, 200, RegionAccess.READ)
            with pytest.raises(OutOfRange):
                await pair.submit(
                    pair.request(local=local, remote=larger[50:150], transport=transport)
                )
            assert memory == bytes(100)

    run_virtual(main())


def test_overlaps_are_refused_and_disjoint_ranges_proceed() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            here, there = pair.requester.region, pair.source.remote
            batch = pair.submit(
                pair.request(local=here[: 64 * KIB], remote=there[: 64 * KIB]),
                pair.request(local=here[32 * KIB : 96 * KIB], remote=there[64 * KIB : 128 * KIB]),
                pair.request(local=here[96 * KIB : 97 * KIB], remote=there[:KIB]),
            )
            await batch.wait()
            first, second, third = batch.results()
            assert isinstance(second.error, RangeBusy)
            assert first.error is None
            assert third.error is None
            # An alias of the same memory is the same memory.
            (alias,) = await pair.requester.engine.register(
                [memoryview(pair.requester.memory)[:KIB]], "local"
            )
            with here.cpu(0, 10), alias.cpu(0, 10), pytest.raises(RangeBusy):
                await pair.submit(pair.request(local=alias[5:20], remote=there[:15]))
            # What a peer reads may be read by others, and not written.
            with pair.source.region.cpu(0, 10):
                await pair.submit(pair.request(local=here[:10], remote=there[:10]))
                with pytest.raises(RangeBusy):
                    await pair.submit(pair.request("write", local=here[:10], remote=there[:10]))

    run_virtual(main())


def test_more_than_a_budget_holds_is_refused_at_once() -> None:
    async def main() -> None:
        async with engine_pair(EngineConfig(max_direct_bytes=100 * KIB)) as pair:
            with pytest.raises(BudgetExceeded) as caught:
                await pair.submit(pair.request())
            assert caught.value.knob == "engine.max_direct_bytes"

    run_virtual(main())


def test_requests_wait_for_their_turn() -> None:
    async def main() -> None:
        config = EngineConfig(max_direct_bytes=128 * KIB, max_grants=4)
        async with engine_pair(config) as pair:
            step = 100 * KIB
            requests = [
                pair.request(
                    local=pair.requester.region[n * step : (n + 1) * step],
                    remote=pair.source.remote[n * step : (n + 1) * step],
                )
                for n in range(10)
            ]
            results = await pair.submit(*requests, timeout=60.0)
            assert sum(result.nbytes for result in results) == 10 * step
            assert pair.requester.memory[: 10 * step] == pair.source.memory[: 10 * step]

    run_virtual(main())


def test_two_engines_that_read_from_each_other_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        half = SIZE // 2
        async with engine_pair(EngineConfig(max_direct_bytes=half)) as pair:
            here, there = pair.requester, pair.source
            mine = pair.request(local=here.region[:half], remote=there.remote[:half])
            theirs = TransferRequest("read", there.region[half:], here.remote[half:], "rdma")
            batches = [pair.submit(mine, timeout=5.0), there.engine.submit([theirs], 5.0)]
            for batch in batches:
                (result,) = await batch
                assert result.nbytes == half

    run_virtual(main())


def test_a_source_grants_no_more_at_once_than_its_engine_may() -> None:
    async def main() -> None:
        async with engine_pair(source=EngineConfig(max_grants=4)) as pair:
            step = 128 * KIB  # two slices
            requests = [
                pair.request(
                    op,
                    local=pair.requester.region[low : low + step],
                    remote=pair.source.remote[low : low + step],
                )
                for low, op in zip(range(0, SIZE, step), ["read", "write"] * 4, strict=True)
            ]
            batch = pair.submit(*requests, timeout=60.0)
            seen = set()
            while not batch.done:
                seen.add(pair.source.use("max_grants (source)"))
                await asyncio.sleep(0.000_05)
            assert batch.nbytes == SIZE
            assert max(seen) == 4
            assert pair.requester.use("max_grants (source)") == 0

    run_virtual(main())


def test_more_grants_than_a_source_has_are_refused_at_once() -> None:
    async def main() -> None:
        async with engine_pair(source=EngineConfig(max_grants=2)) as pair:
            await pair.submit(pair.request())
            facts = pair.requester.engine._peers._known
            for session, said in facts.items():  # as an older engine, which does not say
                facts[session] = replace(said, grants_max=0, slices_max=0)
            began = asyncio.get_running_loop().time()
            with pytest.raises(PeerRefused, match="max_grants"):
                await pair.submit(pair.request(), timeout=60.0)
            assert asyncio.get_running_loop().time() - began < 1.0
            by_tcp = pair.request(transport="tcp")  # which takes none
            assert (await pair.submit(by_tcp))[0].nbytes == SIZE

    run_virtual(main())


def test_registrations_have_a_budget_that_says_what_helps() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            engine = pair.requester.engine
            before = engine.statistics().budgets
            big = bytearray(16 * MIB)
            with pytest.raises(BudgetExceeded) as caught:
                await engine.register([bytearray(KIB), big], "read")
            assert "EngineConfig.for_bytes" in caught.value.hint
            assert engine.statistics().budgets == before
            (small,) = await engine.register([bytearray(KIB)], "local")
            assert pair.requester.use("max_cached_mrs") == before["max_cached_mrs"][0] + 2
            await small.unregister()
            assert engine.statistics().budgets == before

    run_virtual(main())


def test_a_batch_is_registered_as_a_whole_or_not_at_all() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            engine = pair.requester.engine
            before = engine.statistics()
            good = bytearray(100)
            with pytest.raises(UsageError):
                await engine.register([good, b"read-only"], "read")
            assert engine.statistics() == before
            good.append(1)  # nobody holds it

    run_virtual(main())


def test_requests_that_can_never_work() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            here, there = pair.requester.region, pair.source.remote
            bad: list[dict[str, Any]] = [
                {"local": here[:5], "remote": there[:6]},
                {"local": pair.requester.memory},
                {"remote": here},
                {"transport": "auto"},
                {"timeout": -1.0},
            ]
            for changes in bad:
                with pytest.raises(UsageError):
                    pair.request(**changes)
            with pytest.raises(UsageError):
                pair.request("copy")
            for slot in (slice(0, 9, 2), 5):
                with pytest.raises(UsageError):
                    here[slot]  # type: ignore[index]
            for low, high in ((0, SIZE + 1), (SIZE, SIZE + 1), (5, 4)):
                with pytest.raises(OutOfRange):
                    there[low:high]
            foreign = TransferRequest("read", pair.source.region, there, "rdma")
            with pytest.raises(UsageError, match="another engine"):
                await pair.submit(foreign)
            with pytest.raises(UsageError):
                pair.submit("read")

    run_virtual(main())


async def close_and_try(pair: Pair, end: End) -> None:
    await end.engine.close(None)
    with pytest.raises(ClosedError):
        end.engine.submit([], None)


def test_one_direction_closes_and_the_other_goes_on() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            gone = pair.source.remote
            await pair.source.engine.close_source(None)
            with pytest.raises(UnknownHandle):
                await pair.submit(pair.request(remote=gone))
            back = TransferRequest("write", pair.source.region, pair.requester.remote, "rdma")
            await pair.source.engine.submit([back], None)
            assert pair.requester.memory == pair.source.memory
            await pair.source.engine.close_requester(None)
            with pytest.raises(ClosedError):
                pair.source.engine.submit([back], None)

    run_virtual(main())


def test_an_engine_that_is_not_there() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            remote = pair.source.remote
            await close_and_try(pair, pair.source)
            with pytest.raises(PeerRefused, match="no_engine"):
                await pair.submit(pair.request(remote=remote, transport="tcp"))

    run_virtual(main())


def test_a_region_is_hidden_first_and_drained_then() -> None:
    async def main() -> None:
        async with engine_pair() as pair:
            remote = pair.source.remote
            batch = pair.submit(pair.request())
            await until(lambda: pair.world.fabric.exposed_count > 0)
            unregistering = asyncio.ensure_future(pair.source.region.unregister())
            await asyncio.sleep(0)
            with pytest.raises((UnknownHandle, RangeBusy)):
                await pair.submit(pair.request(local=pair.requester.region, remote=remote))
            (result,) = await batch
            assert result.nbytes == SIZE
            await unregistering
            assert pair.requester.memory == pattern(SIZE, 0)

    run_virtual(main())
