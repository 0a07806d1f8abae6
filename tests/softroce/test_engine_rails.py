"""Rails of a transfer engine that go away and come back in the lab: ports, addresses, and engines
that open while nothing is up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

import orbit
from orbit.testing import waiting
from orbit.verbs.discovery import discover
from tests.scenarios.engine_rig import HANG_S, MIB, Devices, EngineRig, in_use
from tests.softroce import links
from tests.softroce.engine_pairs import (
    PATIENT,
    SharedPair,
    both_rails_carry,
    contexts,
    engines,
    monitor_ticks,
    rail_facts,
    recoveries,
    regions,
    shared_pair,
    statistics,
    transfer,
    until_active,
)

ONE_SLICE = 4 * MIB  # such a request has one slice, so one rail
FAILING = 1  # the rail that the trouble is on


@pytest.fixture(scope="module")
def pair() -> Iterator[SharedPair]:
    yield from shared_pair(block_bytes=ONE_SLICE)


# --- a pin: first of all, since queue pairs of other engines would keep the row -------------------


def test_a_pinned_index_is_strict() -> None:
    """Another address of the port is not taken; its own row is waited for."""
    one = Devices(("rxa1",), ("rxb1",))

    async def main() -> None:
        rdma = orbit.RdmaConfig(device_timeout_s=PATIENT.device_timeout_s, gid_index=1)
        async with engines(devices=one, rdma=rdma) as rig:
            assert rail_facts(rig.requester, "rxb1").gid == links.gid("B", 1)
            links.add_address("B", 1, shift=20)
            with contextlib.ExitStack() as undo:
                undo.callback(links.remove_address, "B", 1, shift=20)
                links.remove_address("B", 1)
                undo.callback(links.add_address, "B", 1)
                await waiting.until(lambda: not rail_facts(rig.requester, "rxb1").active, HANG_S)
                ticks = monitor_ticks(rig.requester)
                await waiting.until(lambda: monitor_ticks(rig.requester) > ticks + 2, HANG_S)
                assert not rail_facts(rig.requester, "rxb1").active
                async with regions(rig, MIB) as memory:
                    with pytest.raises(orbit.PathUnavailable):
                        await rig.requester.submit(
                            [rig.request("read", memory.local, memory.remote, timeout=20.0)]
                        )
            await waiting.until(lambda: rail_facts(rig.requester, "rxb1").active, HANG_S)
            await transfer(rig, "read")

    asyncio.run(main())


# --- ports ----------------------------------------------------------------------------------------


async def one_slice_on_each_rail(rig: EngineRig, op: str) -> None:
    """Two requests at once, each on a rail of its own. One port goes: that request fails with the
    reason of its rail, the other one has its bytes, and what comes next goes over the rail that is
    left.
    """
    async with regions(rig, 2 * ONE_SLICE, 1) as memory:
        halves = [(0, ONE_SLICE), (ONE_SLICE, 2 * ONE_SLICE)]
        requests = [
            rig.request(op, memory.local[low:high], memory.remote[low:high]) for low, high in halves
        ]
        returned = [recoveries(engine) for engine in both(rig)]
        if op == "write":
            memory.into[:] = memory.data[::-1]
        sender = "a" if op == "read" else "b"
        with (
            links.shaped(f"{sender}1", shape=links.SLOWER),
            links.shaped(f"{sender}2"),
        ):
            counted = links.sent_pkts(1, 2)
            batch = rig.requester.submit(requests)
            await waiting.until(lambda: moved(counted, 20), HANG_S)
            with links.down(FAILING):
                assert await batch.wait(HANG_S)
                await until_active(rig, FAILING, active=False)
                ends = {result.rails: result for result in batch.results()}
                failed, good = ends[("rxb1",)], ends[("rxb2",)]
                assert (failed.state, failed.nbytes, failed.locally_drained) == ("failed", 0, True)
                assert "rxb1" in str(failed.error), failed.error
                assert (good.state, good.nbytes) == ("succeeded", ONE_SLICE)
                assert batch.nbytes == ONE_SLICE
                await rig.idle()
                assert rig.requester.retained() == rig.source.retained() == ()
                again = rig.request(op, memory.local[:MIB], memory.remote[:MIB])
                (result,) = await rig.requester.submit([again])
                assert result.rails == ("rxb2",)
                assert memory.into[:MIB] == memory.data[:MIB]
        await until_active(rig, 1, 2)
        assert [recoveries(e) for e in both(rig)] == [count + 1 for count in returned]
        assert memory.outlived()
        (result,) = await rig.requester.submit([rig.request(op, memory.local, memory.remote)])
        assert set(result.rails) == {"rxb1", "rxb2"}
        assert memory.into == memory.data


def both(rig: EngineRig) -> tuple[orbit.TransferEngine, orbit.TransferEngine]:
    return rig.source, rig.requester


def moved(before: dict[int, int], packets: int) -> bool:
    now = links.sent_pkts(*before)
    return all(now[rail] - before[rail] >= packets for rail in before)


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_port_goes_down_in_the_middle_and_comes_back(pair: SharedPair, op: str) -> None:
    pair.run(lambda rig: one_slice_on_each_rail(rig, op))


def test_without_any_port_a_request_is_refused_and_tcp_goes_on(pair: SharedPair) -> None:
    async def main(rig: EngineRig) -> None:
        async with regions(rig, MIB, 2) as memory:
            with links.down(1, 2):
                await until_active(rig, 1, 2, active=False)
                with pytest.raises(orbit.PathUnavailable) as caught:
                    await rig.requester.submit(
                        [rig.request("read", memory.local, memory.remote, timeout=20.0)]
                    )
                assert caught.value.reason == "port_down"
                assert in_use(rig.requester) == {}
                by_tcp = orbit.TransferRequest("read", memory.local, memory.remote, "tcp")
                (result,) = await rig.requester.submit([by_tcp])
                assert (result.path, memory.into == memory.data) == ("tcp", True)
            await until_active(rig, 1, 2)
        await both_rails_carry(rig, 2 * ONE_SLICE)

    pair.run(main)


def test_an_engine_opens_and_registers_with_every_port_down() -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            with links.down(1, 2):
                rig = await stack.enter_async_context(engines(find=discover))
                memory = await stack.enter_async_context(regions(rig, MIB, 3))
                request = rig.request("read", memory.local, memory.remote, timeout=20.0)
                with pytest.raises(orbit.PathUnavailable):
                    await rig.requester.submit([request])
            await until_active(rig, 1, 2)
            assert [recoveries(engine) for engine in both(rig)] == [2, 2]
            assert memory.outlived()
            await rig.requester.submit([rig.request("read", memory.local, memory.remote)])
            assert memory.into == memory.data
            await both_rails_carry(rig, 2 * ONE_SLICE)

    asyncio.run(main())


# --- addresses ------------------------------------------------------------------------------------


def test_another_address_is_taken_when_the_first_one_goes(pair: SharedPair) -> None:
    """Added: nothing happens. The old one removed: the other one is ranked, and both sides find
    each other under it. Added again, it changes nothing.
    """

    async def main(rig: EngineRig) -> None:
        old, new = links.gid("B", 1), links.gid("B", 1, shift=20)
        assert rail_facts(rig.requester, "rxb1").gid == old
        count = recoveries(rig.requester)
        with contextlib.ExitStack() as undo:
            links.add_address("B", 1, shift=20)
            undo.callback(links.remove_address, "B", 1, shift=20)
            await both_rails_carry(rig, 2 * ONE_SLICE)
            assert (rail_facts(rig.requester, "rxb1").gid, recoveries(rig.requester)) == (
                old,
                count,
            )
            links.remove_address("B", 1)
            undo.callback(links.add_address, "B", 1)
            await waiting.until(lambda: rail_facts(rig.requester, "rxb1").gid == new, HANG_S)
            await until_active(rig, 1, 2)
            assert recoveries(rig.requester) == count + 1
            await both_rails_carry(rig, 2 * ONE_SLICE)
        # What was put back last is not the current address, whose end comes now.
        await waiting.until(lambda: rail_facts(rig.requester, "rxb1").gid == old, HANG_S)
        await until_active(rig, 1, 2)
        await both_rails_carry(rig, 2 * ONE_SLICE)

    pair.run(main)


def test_an_address_that_moves_to_another_row_ends_what_used_it(pair: SharedPair) -> None:
    """Removed and added between two looks: queue pairs of the old row are dead, although the port
    has the same address as before.
    """

    async def main(rig: EngineRig) -> None:
        def address() -> tuple[str, int]:
            (rail,) = (d.rail for d in contexts(rig.requester) if d.name == "rxb1")
            return rail.gid, rail.gid_index

        before = address()
        links.remove_address("B", 1)
        links.add_address("B", 1, shift=20)  # it takes the free row
        links.add_address("B", 1)
        try:
            await waiting.until(lambda: address() != before, HANG_S)
            await until_active(rig, 1, 2)
            await both_rails_carry(rig, 2 * ONE_SLICE)
        finally:
            links.remove_address("B", 1, shift=20)
        await waiting.until(lambda: address()[0] == before[0], HANG_S)
        await until_active(rig, 1, 2)
        await both_rails_carry(rig, 2 * ONE_SLICE)

    pair.run(main)


# --- progress -------------------------------------------------------------------------------------


def test_a_broken_completion_queue_is_replaced_on_the_same_registrations(pair: SharedPair) -> None:
    async def main(rig: EngineRig) -> None:
        device = contexts(rig.requester)[0]
        replaced = statistics(rig.requester).progress_recoveries
        async with regions(rig, 2 * ONE_SLICE, 3) as memory:
            with links.shaped("a1", "a2"):
                counted = links.sent_pkts(1, 2)
                batch = rig.requester.submit([rig.request("read", memory.local, memory.remote)])
                await waiting.until(lambda: moved(counted, 20), HANG_S)
                for lane in device.lanes.lanes:
                    broken = orbit.DeviceError(device.name, "poll_cq", 0, "broken on purpose")
                    assert device.lanes.fail_queue(lane.cq.native, broken)
                assert await batch.wait(HANG_S)
            (result,) = batch.results()
            assert (result.state, result.nbytes, result.locally_drained) == ("failed", 0, True)
            assert "broken on purpose" in str(result.error)
            await rig.idle()
            await waiting.until(
                lambda: statistics(rig.requester).progress_recoveries > replaced, HANG_S
            )
            assert memory.outlived()
            await rig.requester.submit([rig.request("read", memory.local, memory.remote)])
            assert memory.into == memory.data
        await both_rails_carry(rig, 2 * ONE_SLICE)

    pair.run(main)
