"""Fresh protection domains as window keys run out: what goes on meanwhile, what fails, and what is
left of the old ones.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import chain

import pytest

from orbit.errors import PathUnavailable
from orbit.model import Direction, PathReason
from orbit.testing.waiting import until
from orbit.transport.interface import RegisteredRange
from orbit.verbs import requester_arrays, rollover
from orbit.verbs.device import DeviceContext
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.registration import KeyHolder
from orbit.verbs.scripted_fabric import FOREVER
from orbit.verbs.settings import RdmaPathConfig
from orbit.verbs.windows import FreshWindow, KeyHistory, WindowPool
from tests.contract.rdma_pairs import QUICK, Get, Put, ScriptedPair, counts, rdma_pair

Scenario = Callable[[ScriptedPair], Awaitable[None]]
Keys = list[tuple[KeyHistory, int]]

KEYS = 4 * 255
# Nothing may fail here because a machine is slow.
FEW = replace(
    QUICK,
    window_key_indices_max=4,
    bind_timeout_s=10,
    receipt_timeout_s=10,
    drain_timeout_s=10,
    progress_timeout_s=10,
    pool=replace(QUICK.pool, initial_arena_bytes=1 << 20),
)
NARROW = replace(FEW, width=1)
PAUSE_S = 0.002  # of one who got no grant, before the next try


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollover, "_LOOK_S", 0.01)
    monkeypatch.setattr(rollover, "_RETRY_S", 0.01)
    monkeypatch.setattr(requester_arrays, "EVICT_AFTER_S", 0.02)


@pytest.fixture(autouse=True)
def handed_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    """Every key with the history of its domain. None may come twice."""
    keys: Keys = []
    take = WindowPool.take

    def noted(pool: WindowPool) -> FreshWindow:
        fresh = take(pool)
        keys.append((pool._history, fresh.key))
        return fresh

    monkeypatch.setattr(WindowPool, "take", noted)
    yield keys
    assert len(set(keys)) == len(keys)


def run(scenario: Scenario, config: RdmaPathConfig = FEW, *, rxe: bool = False) -> None:
    async def main() -> None:
        async with rdma_pair(rxe=rxe, config=config, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


def device_of(path: RdmaPath) -> DeviceContext:
    return path.devices[0]


def run_out(path: RdmaPath) -> None:
    """As if all of its keys were used."""
    device_of(path).domain.windows.history.run_out()


async def rolled(path: RdmaPath, count: int = 1) -> None:
    """So many fresh domains have been opened, and nothing of the old ones is left."""
    await until(lambda: counts(path)["key_rollovers"] == count)
    await until(lambda: len(device_of(path).domains) == 1)


async def register_in_time(path: RdmaPath) -> None:
    """Keys are used faster here than memory is registered: do not use the last of them before."""
    await asyncio.sleep(0)
    domain = device_of(path).domain
    if domain.windows.history.scarce and domain.windows.history._at_hand < 20:
        await until(lambda: domain.left)


async def get_by_any_way(pair: ScriptedPair, lease: int) -> PathReason:
    """As a caller who does not care: the reason of what is not RDMA is answered, and no error."""
    reason = await pair.consumer.prepare(pair.consumer_session)
    if reason is not PathReason.OK:
        return reason
    get = Get(pair, 64, lease)
    try:
        exposure = await get.expose()
    except PathUnavailable as error:
        pair.owner.memory.free(get.memory)
        return PathReason(error.reason)
    await get.pull(exposure)
    assert get.buffer == get.payload
    await get.retract()
    return PathReason.OK


@pytest.mark.parametrize(
    ("config", "rxe"), [(FEW, False), (NARROW, True)], ids=["two queue pairs", "one, rxe"]
)
def test_gets_one_after_the_other_hardly_notice(config: RdmaPathConfig, rxe: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        before = pair.owner.memory.budget.charged_bytes
        missed = 0
        for lease in range(1, 2001):
            reason = await get_by_any_way(pair, lease)
            assert reason in (PathReason.OK, PathReason.WINDOW_KEYS)
            if reason is PathReason.WINDOW_KEYS:
                missed += 1
                await asyncio.sleep(PAUSE_S)
            await register_in_time(pair.owner)
        await until(lambda: len(device_of(pair.owner).domains) == 1)
        found = pair.owner.statistics()
        assert found.counts["key_rollovers"] >= 2000 // KEYS
        # So few keys are spent in the time that it takes to connect.
        assert missed < 2000 // 4
        assert found.counts["key_rollovers_failed"] == 0
        assert found.window_keys_used == 2000 - missed + 1  # and one of the start probe
        assert 0 < found.window_keys_remaining <= KEYS
        assert pair.owner.memory.budget.charged_bytes == before
        assert counts(pair.consumer)["pulls_failed"] == 0

    run(scenario, config, rxe=rxe)


def test_gets_at_once_go_on_and_say_window_keys_at_worst() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        reasons: list[PathReason] = []

        async def caller(number: int) -> None:
            leases, served = itertools.count(1 + number * 1_000_000), 0
            while served < 250:
                reasons.append(await get_by_any_way(pair, next(leases)))
                served += reasons[-1] is PathReason.OK
                await asyncio.sleep(0 if reasons[-1] is PathReason.OK else PAUSE_S)

        await asyncio.gather(*(caller(number) for number in range(8)))
        assert set(reasons) <= {PathReason.OK, PathReason.WINDOW_KEYS}
        assert counts(pair.owner)["key_rollovers"] >= 2
        assert counts(pair.consumer)["pulls_failed"] == 0
        await until(lambda: len(device_of(pair.owner).domains) == 1)

    run(scenario)


def test_a_grant_that_is_out_is_not_disturbed() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        held = Get(pair, 5000, 1)
        exposure = await held.expose()
        old = device_of(pair.owner).domain
        run_out(pair.owner)
        await until(lambda: old.left)
        await asyncio.sleep(0.05)
        assert not old.closed
        await until(lambda: counts(pair.consumer)["connects"] == 3)  # the other queue pair
        await Get(pair, 5000, 2).run()
        await held.pull(exposure)
        assert held.buffer == held.payload
        await held.retract()
        await rolled(pair.owner)
        assert old.closed
        await Get(pair, 5000, 3).run()
        assert counts(pair.consumer)["pulls_failed"] == 0

    run(scenario)


def test_writes_are_not_disturbed() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        session = pair.consumer_session
        assert await pair.consumer.prepare(session, Direction.WRITE) is PathReason.OK
        held = Put(pair, 5000, 1)
        exposure = await held.expose()
        run_out(pair.owner)
        await until(lambda: device_of(pair.owner).old_domains)
        await held.push(exposure)
        await held.retract()
        assert held.landed == held.payload
        pair.owner.memory.free(held.memory)
        await rolled(pair.owner)
        assert await pair.consumer.prepare(session, Direction.WRITE) is PathReason.OK
        await Put(pair, 5000, 2).run()

    run(scenario)


# --- what a fresh domain needs --------------------------------------------------------------------


def keys_of(held: RegisteredRange, device: DeviceContext) -> list[int]:
    """The local keys of a range, in every open domain where it has some."""
    holder = held.parts[0].arena
    assert isinstance(holder, KeyHolder)
    regions = [holder.region(domain) for domain in device.domains]
    return [region.lkey for region in regions if region is not None]


def test_every_registration_moves_and_the_old_one_goes() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        device, memory = device_of(pair.owner), pair.owner.memory
        buffers = [bytearray(10_000) for _ in range(3)]
        views = [await memory.register(memoryview(buffers[0]), remote=side) for side in (0, 1)]
        going = await memory.register(memoryview(buffers[1]))
        charged, before = memory.budget.charged_bytes, [keys_of(held, device) for held in views]
        run_out(pair.owner)
        late = asyncio.ensure_future(memory.register(memoryview(buffers[2])))
        await asyncio.sleep(0)
        await memory.deregister(going)  # in the middle
        going_bytes = going.page_bytes
        del going
        views.append(await late)
        await rolled(pair.owner)
        after = [keys_of(held, device) for held in views]
        assert all(len(keys) == 1 for keys in after)
        assert not set(chain(*before)) & set(chain(*after))
        assert memory.budget.charged_bytes == charged + late.result().page_bytes - going_bytes
        buffers[1].append(0)
        for held in views:
            await memory.deregister(held)
        assert await get_by_any_way(pair, 1) is PathReason.OK

    run(scenario)


@pytest.mark.parametrize(
    ("verb", "skip"), [("alloc_pd", 0), ("reg_mr", 0), ("reg_mr", 1), ("reg_mr", 2)]
)
def test_a_device_without_room_says_window_keys_until_it_has_some(verb: str, skip: int) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        memory, device = pair.owner.memory, device_of(pair.owner)
        held = [await memory.register(memoryview(bytearray(5000))) for _ in range(2)]
        charged, live = memory.budget.charged_bytes, pair.a.counters().live_objects
        pair.a.fail_verb(verb, errno.ENOMEM, skip=skip, count=FOREVER)
        lease = 0
        while (reason := await get_by_any_way(pair, lease := lease + 1)) is PathReason.OK:
            assert lease < KEYS, "more keys than there are"
        await until(lambda: counts(pair.owner)["key_rollovers_failed"])
        assert reason is PathReason.WINDOW_KEYS
        failed = counts(pair.owner)["key_rollovers_failed"]
        assert failed >= 1
        pair.a.clear_rules()
        pair.a.fail_verb(verb, errno.ENOMEM, skip=skip, count=1)  # and once more
        await until(lambda: counts(pair.owner)["key_rollovers_failed"] > failed)
        await rolled(pair.owner)
        assert await get_by_any_way(pair, lease + 1) is PathReason.OK
        assert memory.budget.charged_bytes == charged
        assert pair.a.counters().live_objects <= live + 2  # no more than the new window
        assert len(device.domains) == 1
        for registered in held:
            await memory.deregister(registered)

    run(scenario, NARROW)


def test_a_budget_without_room_says_window_keys_until_somebody_gives_back() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        memory = pair.owner.memory
        big = await memory.register(memoryview(bytearray(memory.budget.free_bytes // 2)))
        charged, live = memory.budget.charged_bytes, pair.a.counters().live_objects
        run_out(pair.owner)
        await until(lambda: counts(pair.owner)["key_rollovers_failed"] > 0)
        assert memory.budget.charged_bytes == charged
        assert pair.a.counters().live_objects == live  # nothing was registered in vain
        await memory.deregister(big)
        await rolled(pair.owner)
        assert await get_by_any_way(pair, 1) is PathReason.OK

    pool = replace(QUICK.pool, registered_bytes_budget=QUICK.pool.initial_arena_bytes * 3)
    run(scenario, replace(FEW, pool=pool))


def test_what_a_device_does_not_let_go_of_is_listed_until_the_end() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        memory, device = pair.owner.memory, device_of(pair.owner)
        charged, old = memory.budget.charged_bytes, device.domain
        pair.a.fail_verb("dereg_mr", errno.EBUSY, skip=2)  # the receives of two queue pairs
        run_out(pair.owner)
        await until(lambda: pair.owner.statistics().retained)
        assert [item.what for item in pair.owner._context.retained.items()] == [str(old)]
        assert memory.budget.charged_bytes == 2 * charged
        assert device.old_domains == (old,)
        await get_by_any_way(pair, 1)
        await Get(pair, 5000, 2).run()

    async def main() -> None:
        async with rdma_pair(config=FEW, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await scenario(pair)
            await pair.consumer.close()
            await pair.owner.close()  # tries again
            assert not pair.owner.statistics().retained

    asyncio.run(main())


# --- the requester's queue pairs ------------------------------------------------------------------


def test_a_requester_leaves_when_nothing_is_on_its_way() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        old = device_of(pair.consumer).domain
        get = Get(pair, 5000)
        exposure = await get.expose()
        run_out(pair.consumer)
        await get.pull(exposure)
        await get.retract()
        await rolled(pair.consumer)
        assert old.closed
        assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
        await Get(pair, 5000, 2).run()
        assert counts(pair.consumer)["pulls_failed"] == 0

    run(scenario)


def test_a_requester_that_is_never_idle_says_window_keys_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.delay_payload()
        get = Get(pair, 5000)
        pulling = asyncio.ensure_future(get.pull(await get.expose()))
        run_out(pair.consumer)
        await until(lambda: device_of(pair.consumer).old_domains)
        assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
        monkeypatch.setattr(requester_arrays, "LEAVE_AFTER_S", 0.0)
        assert await pair.consumer.prepare(pair.consumer_session) is PathReason.WINDOW_KEYS
        pair.b.clear_rules()
        pair.b.release()
        await pulling
        await get.retract()
        await rolled(pair.consumer)
        assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
        await Get(pair, 5000, 2).run()

    run(scenario)


def test_a_route_has_a_new_array_at_once() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        consumer, session = pair.consumer, pair.consumer_session
        (route,) = consumer.routes(session)
        pair.b.delay_payload()
        get = Get(pair, 5000)
        pulling = asyncio.ensure_future(get.pull(await get.expose()))
        assert await consumer.connect_route(session, Direction.READ, route) == 0
        for count in (1, 2):
            run_out(consumer)
            await until(lambda count=count: counts(consumer)["key_rollovers"] == count)
            number = await consumer.connect_route(session, Direction.READ, route)
            assert number == 1 + count
        await asyncio.sleep(0.05)
        assert not pulling.done()
        pair.b.clear_rules()
        pair.b.release()
        await pulling
        await get.retract()
        await rolled(consumer, 2)
        assert consumer.statistics().queue_pairs == 2  # those of the newest one

    run(scenario)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_a_path_that_closes_in_the_middle_leaves_nothing(steps: int) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for _ in range(20):
            await pair.owner.memory.register(memoryview(bytearray(100)))
        run_out(pair.owner)
        run_out(pair.consumer)
        for _ in range(steps):
            await asyncio.sleep(0.001 * steps)
        await pair.consumer.close()
        await pair.owner.close()
        assert pair.owner.memory.budget.charged_bytes == 0
        assert not pair.owner.statistics().retained

    run(scenario)


def test_memory_that_is_released_while_the_path_lives_on() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        run_out(pair.owner)
        await pair.owner.end_transfers()
        await pair.owner.release_memory()
        assert pair.owner.memory.budget.charged_bytes == 0

    run(scenario)
