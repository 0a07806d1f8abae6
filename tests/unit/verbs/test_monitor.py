"""The monitor: what fences a rail, what brings it back, what survives, and what it asks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import Unquiesced
from orbit.model import PathReason
from orbit.testing.clock import run_virtual
from orbit.verbs.async_events import AsyncEventKind
from orbit.verbs.monitor import MonitorStatistics
from orbit.verbs.queue_pair import QueuePairState
from orbit.verbs.scripted_fabric import ScriptedDevice
from tests.unit.verbs.watched_rails import CONFIG, WatchedRail, watched

OTHER, THIRD = "::ffff:198.18.7.1", "::ffff:198.18.7.2"
NOW = 0.01  # s, for events: less than the interval


def down(fake: ScriptedDevice) -> None:
    fake.set_port(active=False)


def test_every_rail_is_asked_by_the_clock_also_when_idle() -> None:
    async def scenario() -> None:
        async with watched("a", "b") as watch:
            await watch.seconds(10.5)
            assert watch.monitor.statistics() == MonitorStatistics(10, 20, 0)
            assert all(rail.device.active for rail in watch.rails)

    run_virtual(scenario())


@pytest.mark.parametrize("rxe", [False, True])
def test_a_port_that_goes_down_ends_its_queue_pairs_and_no_others(rxe: bool) -> None:
    async def scenario() -> None:
        async with watched("a", "b", rxe=rxe) as watch:
            a, b = watch.rails
            mine, other = a.create(), b.create()
            a.fake.set_port(active=False)
            await watch.seconds(NOW)
            assert not a.device.active
            assert "PORT_ERR" in a.device.paused
            assert mine.state is QueuePairState.CLOSED
            assert "PORT_ERR" in str(a.causes[0])
            assert a.refused() == PathReason.PORT_DOWN
            assert b.device.active
            assert other.state is QueuePairState.IDLE
            assert a.device.queue_pairs == 0
            await watch.seconds(5)
            assert not a.device.active  # the clock alone brings nothing back
            a.fake.set_port(active=True)
            await watch.seconds(NOW)
            assert a.device.active
            assert a.device.paused == ""
            assert watch.recoveries == 1
            a.create()

    run_virtual(scenario())


def test_events_that_were_missed_are_found_by_the_clock() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            rail.create()
            rail.fake.set_quiet(quiet=True)
            rail.fake.set_port(active=False)
            await watch.seconds(NOW)
            assert rail.device.active
            await watch.seconds(1)
            assert rail.device.paused == "port 1 is DOWN"
            rail.fake.set_port(active=True)
            await watch.seconds(1)
            assert rail.device.active
            assert watch.recoveries == 1

    run_virtual(scenario())


def test_registrations_and_keys_outlive_a_fence() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            device = rail.device
            region = await rail.register()
            keys = region.lkey, region.native
            kept = device.domain, device.domain.windows, device.domain.regions
            domain = device.domain.native.native
            rail.fake.set_port(active=False)
            await watch.seconds(NOW)
            await rail.register()  # on a paused rail, too
            rail.fake.set_port(active=True)
            await watch.seconds(NOW)
            assert device.active
            assert (region.lkey, region.native) == keys
            assert device.domain.native.native == domain
            now = device.domain, device.domain.windows, device.domain.regions
            assert all(a is b for a, b in zip(kept, now, strict=True))

    run_virtual(scenario())


def test_a_busy_owner_defers_the_return_to_a_later_tick() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            rail.create()
            rail.hold_end.clear()
            rail.fake.set_port(active=False)
            await watch.seconds(NOW)
            rail.fake.set_port(active=True)
            await watch.seconds(3)
            assert not rail.device.active
            assert rail.device.queue_pairs == 1
            rail.hold_end.set()
            await watch.seconds(1)
            assert rail.device.active
            assert watch.recoveries == 1

    run_virtual(scenario())


def test_a_rail_that_starts_paused_is_proven_when_it_comes_up() -> None:
    async def scenario() -> None:
        async with watched("a", prepare=down) as watch:
            (rail,) = watch.rails
            region = await rail.register()
            await watch.seconds(3)
            assert rail.device.paused == "port 1 is DOWN"
            assert rail.refused() == PathReason.PORT_DOWN
            assert not rail.device.state.proven
            rail.fake.set_port(active=True)
            await watch.seconds(NOW)
            assert rail.device.active
            assert rail.device.state.proven
            assert rail.device.rail.range_enforced
            assert watch.recoveries == 1
            assert region.native
            assert rail.fake.counters().binds == 1
            rail.create()
            rail.fake.set_port(active=False)
            await watch.seconds(NOW)
            rail.fake.set_port(active=True)
            await watch.seconds(1)
            assert rail.fake.counters().binds == 1  # once in its life

    run_virtual(scenario())


def test_a_trial_without_windows_is_the_end() -> None:
    def prepare(fake: ScriptedDevice) -> None:
        down(fake)
        fake.set_windows(supported=False, capability=True)

    async def scenario() -> None:
        async with watched("a", prepare=prepare) as watch:
            (rail,) = watch.rails
            rail.fake.set_port(active=True)
            await watch.seconds(NOW)
            assert rail.refused() == PathReason.DEVICE_FAILED
            assert "no type-2B window" in rail.device.paused
            queries = watch.monitor.statistics().queries
            await watch.seconds(5)
            assert watch.monitor.statistics().queries == queries

    run_virtual(scenario())


def test_a_trial_that_fails_is_made_again() -> None:
    async def scenario() -> None:
        async with watched("a", prepare=down) as watch:
            (rail,) = watch.rails
            rail.fake.fail_verb("create_qp", 12)
            rail.fake.set_port(active=True)
            await watch.seconds(NOW)
            assert not rail.device.active
            assert "create_qp" in rail.device.paused
            await watch.seconds(1)
            assert rail.device.active
            assert watch.recoveries == 1

    run_virtual(scenario())


def test_a_port_that_goes_down_during_its_trial_stays_paused() -> None:
    async def scenario() -> None:
        async with watched("a", prepare=down) as watch:
            (rail,) = watch.rails
            rail.fake.hold()  # the trial waits for its bind
            rail.fake.set_port(active=True)
            await watch.seconds(NOW)
            assert rail.device.queue_pairs == 2
            rail.fake.set_port(active=False)
            await watch.seconds(NOW)
            rail.fake.clear_rules()
            rail.fake.release()
            await watch.seconds(CONFIG.bind_timeout_s + 2)
            assert not rail.device.active
            assert rail.device.queue_pairs == 0
            assert watch.recoveries == 0
            rail.fake.set_port(active=True)
            await watch.seconds(1.5)
            assert rail.device.active

    run_virtual(scenario())


# --- addresses ------------------------------------------------------------------------------------


async def lose_gid(rail: WatchedRail, *, to: dict[int, str]) -> None:
    """The address at index 1 goes, and others come."""
    rail.fake.set_gid(1, "::")
    for index, gid in to.items():
        rail.fake.set_gid(index, gid)
    await asyncio.sleep(NOW)


def test_without_a_pin_another_address_of_the_port_is_taken() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            old = rail.device.rail.gid
            queue_pair = rail.create()
            rail.fake.set_gid(4, OTHER)
            await watch.seconds(NOW)
            assert rail.causes == []  # a new address disturbs nobody
            await lose_gid(rail, to={})
            assert queue_pair.state is QueuePairState.CLOSED
            await watch.seconds(1)
            assert rail.device.active
            assert (rail.device.rail.gid, rail.device.rail.gid_index) == (OTHER, 4)
            assert watch.recoveries == 1
            assert rail.device.state.answers_to(old)
            assert rail.device.state.answers_to(OTHER)
            assert not rail.device.state.answers_to(THIRD)
            assert rail.device.local_end(1, remote_read=True).gid_index == 4

    run_virtual(scenario())


def test_a_port_that_lost_all_its_addresses_waits_for_one() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            rail.fake.set_gid(0, "::")
            await lose_gid(rail, to={})
            await watch.seconds(3)
            assert rail.device.paused == "the port has no GID that can be used"
            rail.fake.set_gid(2, OTHER)
            await watch.seconds(NOW)
            assert rail.device.active
            assert rail.device.rail.gid == OTHER

    run_virtual(scenario())


def test_a_pinned_index_waits_for_its_own_address() -> None:
    async def scenario() -> None:
        async with watched("a", config=replace(CONFIG, gid_index=1)) as watch:
            (rail,) = watch.rails
            gid = rail.device.rail.gid
            await lose_gid(rail, to={4: OTHER, 5: gid})  # the same address elsewhere is another row
            await watch.seconds(3)
            assert not rail.device.active
            rail.fake.set_gid(1, THIRD)
            await watch.seconds(NOW)
            assert rail.device.active
            assert (rail.device.rail.gid, rail.device.rail.gid_index) == (THIRD, 1)

    run_virtual(scenario())


def test_a_pinned_gid_waits_for_itself_at_any_index() -> None:
    gid = "::ffff:198.18.0.1"

    async def scenario() -> None:
        async with watched("a", config=replace(CONFIG, gid=gid)) as watch:
            (rail,) = watch.rails
            await lose_gid(rail, to={4: OTHER})
            await watch.seconds(3)
            assert not rail.device.active
            rail.fake.set_gid(6, gid)
            await watch.seconds(NOW)
            assert rail.device.active
            assert (rail.device.rail.gid, rail.device.rail.gid_index) == (gid, 6)

    run_virtual(scenario())


def test_an_address_that_moved_to_another_row_is_a_recovery() -> None:
    """It was removed and added between two looks: what was connected under the old row is dead."""

    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            gid = rail.device.rail.gid
            queue_pair = rail.create()
            rail.fake.set_gid(7, gid)
            await lose_gid(rail, to={1: OTHER})
            assert "has moved from index 1 to 7" in str(rail.causes[0])
            assert queue_pair.state is QueuePairState.CLOSED
            await watch.seconds(1)
            assert rail.device.active
            assert (rail.device.rail.gid, rail.device.rail.gid_index) == (OTHER, 1)
            assert watch.recoveries == 1

    run_virtual(scenario())


def test_an_address_that_is_removed_and_added_again_is_a_recovery() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            gid = rail.device.rail.gid
            rail.create()
            rail.fake.set_gid(0, "::")
            await lose_gid(rail, to={})
            assert not rail.device.active
            rail.fake.set_gid(1, gid)
            await watch.seconds(NOW)
            assert rail.device.active
            assert (rail.device.rail.gid, rail.device.rail.gid_index) == (gid, 1)
            assert watch.recoveries == 1

    run_virtual(scenario())


def test_another_lid_is_another_address() -> None:
    async def scenario() -> None:
        async with watched("a", prepare=lambda fake: fake.set_lid(5)) as watch:
            (rail,) = watch.rails
            queue_pair = rail.create()
            rail.fake.set_lid(9)
            await watch.seconds(NOW)
            assert queue_pair.state is QueuePairState.CLOSED
            assert "the LID was 5 and is 9" in str(rail.causes[0])
            await watch.seconds(1)
            assert rail.device.active
            assert rail.device.rail.lid == 9

    run_virtual(scenario())


def test_another_path_mtu_is_used_by_new_connections() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            rail.fake.facts.mtu = 1024  # no event tells
            await watch.seconds(1.5)
            assert rail.device.active
            assert rail.device.rail.mtu == 1024

    run_virtual(scenario())


# --- faults ---------------------------------------------------------------------------------------


def test_a_fatal_event_is_the_end() -> None:
    async def scenario() -> None:
        async with watched("a", "b") as watch:
            a, b = watch.rails
            queue_pair = a.create()
            a.fake.raise_event(AsyncEventKind.DEVICE_FATAL)
            await watch.seconds(3)
            assert queue_pair.state is QueuePairState.CLOSED
            assert a.refused() == PathReason.DEVICE_FAILED
            assert watch.recoveries == 0
            assert b.device.active

    run_virtual(scenario())


def test_a_device_whose_events_are_lost_is_fenced_for_good() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            rail.create()
            rail.fake.fail_verb("get_async_event", 5)
            rail.fake.raise_event(AsyncEventKind.SM_CHANGE)
            await watch.seconds(2)
            assert "events cannot be read" in rail.device.paused
            assert rail.refused() == PathReason.DEVICE_FAILED
            assert rail.device.queue_pairs == 0

    run_virtual(scenario())


def test_a_port_that_cannot_be_asked_is_fenced_until_it_can() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            rail.create()
            rail.fake.fail_verb("query_port", 19, count=2)
            await watch.seconds(2.5)
            assert "query_port" in rail.device.paused
            assert rail.device.queue_pairs == 0
            await watch.seconds(1)
            assert rail.device.active
            assert watch.recoveries == 1

    run_virtual(scenario())


def test_a_driver_that_does_not_answer_says_nothing_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        async with watched("a", "b") as watch:
            a, b = watch.rails
            a.offload.stuck = True
            b.fake.set_quiet(quiet=True)
            b.fake.set_port(active=False)
            await watch.seconds(20)
            assert a.device.active
            assert not b.device.active
            with pytest.raises(Unquiesced, match="does not answer"):
                await watch.monitor.close()
            a.offload.stuck = False
            asking = watch.monitor._rails[0]._asking
            assert asking is not None
            asking.set_result(a.device.state.look())
            await watch.monitor.close()

    run_virtual(scenario())


def test_an_answer_that_takes_long_counts_all_the_same() -> None:
    """A slow driver must not keep a rail paused for ever."""

    async def scenario() -> None:
        async with watched("a", prepare=down) as watch:
            (rail,) = watch.rails
            rail.fake.set_quiet(quiet=True)
            rail.fake.set_port(active=True)
            rail.offload.stuck = True
            await watch.seconds(2 * CONFIG.drain_timeout_s)
            asking = watch.monitor._rails[0]._asking
            assert asking is not None
            rail.offload.stuck = False
            queries = watch.monitor.statistics().queries
            asking.set_result(rail.device.state.look())
            await watch.seconds(NOW)
            assert rail.device.active
            assert watch.recoveries == 1
            assert watch.monitor.statistics().queries == queries  # it was not asked again

    run_virtual(scenario())


def test_an_event_voids_what_was_read_before_it() -> None:
    async def scenario() -> None:
        async with watched("a", prepare=down) as watch:
            (rail,) = watch.rails
            rail.device.state.proven = True
            rail.offload.stuck = True
            rail.fake.set_port(active=True)
            await watch.seconds(NOW)
            asking = watch.monitor._rails[0]._asking
            assert asking is not None
            answer = rail.device.state.look()
            assert answer.port.active
            rail.fake.set_port(active=False)
            await watch.seconds(NOW)
            rail.offload.stuck = False
            asking.set_result(answer)
            await watch.seconds(NOW)
            assert not rail.device.active
            assert watch.recoveries == 0

    run_virtual(scenario())


def test_a_completion_queue_that_the_device_calls_broken_is_replaced() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            (rail,) = watch.rails
            queue_pair = rail.create()
            rail.fake.raise_event(AsyncEventKind.CQ_ERR, queue_pair.lane.cq)
            await watch.seconds(NOW)
            assert queue_pair.lane.failed is not None
            queue_pair.fail(queue_pair.lane.failed)
            await watch.seconds(2)
            assert rail.device.lanes.failed is None
            assert rail.device.lanes.statistics().recoveries == 1
            assert rail.device.active

    run_virtual(scenario())


def test_nothing_is_asked_after_the_end() -> None:
    async def scenario() -> None:
        async with watched("a") as watch:
            await watch.seconds(1.5)
            await watch.monitor.close()
            await watch.monitor.close()
            before = watch.monitor.statistics()
            watch.rails[0].fake.set_port(active=False)
            await watch.seconds(5)
            assert watch.monitor.statistics() == before
            assert watch.rails[0].device.active

    run_virtual(scenario())
