"""Arrays over two rails: shared and private ones, who waits for endpoints, and what a rail that
fails takes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    PathFailed,
    PathUnavailable,
    Unquiesced,
)
from orbit.model import Direction, PathReason
from orbit.protocol.binding import GrantRecord
from orbit.protocol.messages import CloseBulkRequest
from orbit.testing.path_rail_cases import RunTransfer, connect_all
from orbit.testing.waiting import until
from orbit.verbs import records, requester_arrays
from orbit.verbs.turn import Posted
from tests.contract.rdma_pairs import QUICK, Get, Put, ScriptedPair, array_of, counts, rdma_pair

MIB = 1 << 20
Scenario = Callable[[ScriptedPair], Awaitable[None]]


def run(scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False, **{"rails": 2, **options}) as pair:
            await scenario(pair)

    asyncio.run(main())


def endpoints(pair: ScriptedPair) -> tuple[int, int]:
    """Of the owner and of the consumer."""
    return tuple(path.rail_statistics().endpoints for path in (pair.owner, pair.consumer))  # type: ignore[return-value]


async def private(pair: ScriptedPair, place: int = 0, deadline_s: float | None = None) -> int:
    """A private array for READs over the route of that place."""
    path, session = pair.consumer, pair.consumer_session
    deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
    route = path.routes(session)[place]
    return await path.connect_route(session, Direction.READ, route, deadline=deadline, private=True)


# --- which array is which -------------------------------------------------------------------------


def test_the_nearest_route_is_the_array_of_those_who_do_not_choose() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for direction in Direction:
            assert await pair.consumer.prepare(pair.consumer_session, direction) is PathReason.OK
        assert endpoints(pair) == (4, 4)
        assert (await connect_all(pair, Direction.READ))[0] == 0
        assert (await connect_all(pair, Direction.WRITE))[0] == 1
        assert endpoints(pair) == (8, 8)
        await Get(pair, 5000).run()
        await Put(pair, 5000, 2).run()
        assert counts(pair.owner)["connects"] == 8

    run(scenario)


@pytest.mark.parametrize(("announced", "width"), [(0, 4), (3, 3), (16, 4)])
def test_an_array_is_as_wide_as_both_sides_can(announced: int, width: int) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        session = pair.consumer_session
        limits = replace(session.peer_hello.limits, bulk_width=announced)
        session.peer_hello = replace(session.peer_hello, limits=limits)
        assert await pair.consumer.prepare(session) is PathReason.OK
        assert endpoints(pair) == (width, width)

    run(scenario, config=replace(QUICK, width=4))


def test_grants_on_arrays_that_are_not_ours_are_a_decode_error() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        arrays = await connect_all(pair, Direction.READ)
        write = await connect_all(pair, Direction.WRITE)
        transfer = RunTransfer(pair, [(array, 5000) for array in arrays])
        exposure = await transfer.expose()
        for number in (99, write[1], arrays[0]):
            record = replace(GrantRecord.decode(exposure.rest[0][1]), array=number)
            rest = ((exposure.rest[0][0], record.encode()),)
            with pytest.raises(PathFailed) as caught:
                await transfer.move(replace(exposure, rest=rest))
            assert caught.value.reason is PathReason.DECODE_ERROR
        await transfer.move(exposure)  # nothing was spent
        await transfer.finish()
        transfer.free()

    run(scenario)


# --- endpoints ------------------------------------------------------------------------------------


def test_more_than_all_endpoints_is_refused_at_once() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for _ in range(2):
            with pytest.raises(BudgetExceeded):
                await private(pair)
        assert await pair.consumer.prepare(pair.consumer_session) is PathReason.CONNECT_FAILED
        assert endpoints(pair) == (0, 0)

    run(scenario, consumer_config=replace(QUICK, endpoints_max=1))


def test_who_waits_for_an_endpoint_gets_it_or_its_deadline() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        path, session = pair.consumer, pair.consumer_session
        held = await private(pair)
        route = path.routes(session)[1]
        soon = asyncio.get_running_loop().time() + 0.02
        impatient, patient, other = (
            asyncio.ensure_future(path.connect_route(session, direction, route, deadline=when))
            for direction, when in (
                (Direction.READ, soon),
                (Direction.READ, None),
                (Direction.WRITE, None),
            )
        )
        with pytest.raises(DeadlineExceeded):
            await impatient
        assert not patient.done()  # they share a dial, which goes on
        await path.close_array(session, Direction.READ, held)
        number = await patient
        assert not other.done()
        assert endpoints(pair) == (2, 2)
        other.cancel()
        await asyncio.wait([other])
        await until(lambda: path._context.endpoints.waiting == 0)
        transfer = RunTransfer(pair, [(number, 5000)])
        await transfer.run()
        transfer.free()

    run(scenario, consumer_config=replace(QUICK, endpoints_max=2))


def test_an_idle_array_of_the_requester_goes_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requester_arrays, "EVICT_AFTER_S", 0.0)

    async def scenario(pair: ScriptedPair) -> None:
        path, session = pair.consumer, pair.consumer_session
        assert await path.prepare(session) is PathReason.OK
        busy = Get(pair, 5000)
        pair.b.hold(records.READ)
        pulling = asyncio.ensure_future(busy.pull(await busy.expose()))
        await until(lambda: counts(path)["reads"])
        waiting = asyncio.ensure_future(private(pair, 1))
        await asyncio.sleep(0.05)
        assert not waiting.done()  # it is in use
        pair.b.clear_rules()
        pair.b.release()
        await pulling
        held = await waiting
        await busy.retract()
        await until(lambda: endpoints(pair) == (2, 2))
        await path.close_array(session, Direction.READ, held)
        assert await path.prepare(session) is PathReason.OK
        await Get(pair, 5000, 2).run()

    run(scenario, consumer_config=replace(QUICK, endpoints_max=2))


def test_a_source_that_is_full_is_a_refusal_and_no_wait() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        first = await private(pair)
        transfer = RunTransfer(pair, [(first, 5000)])
        exposure = await transfer.expose()
        with pytest.raises(PathUnavailable) as caught:
            await private(pair, 1)
        assert caught.value.reason is PathReason.CONNECT_FAILED
        assert "busy" in str(caught.value)
        await transfer.move(exposure)
        await transfer.finish()
        transfer.free()
        await until(lambda: endpoints(pair) == (2, 2))

    run(scenario, config=replace(QUICK, endpoints_max=2), consumer_config=QUICK)


def test_a_private_array_that_nobody_waits_for_any_more_ends() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for device in (pair.b, pair.more[1]):
            device.set_rtr_delay(0.1)
        with pytest.raises(DeadlineExceeded):
            await private(pair, deadline_s=0.02)
        cancelled = asyncio.ensure_future(private(pair, 1))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(lambda: endpoints(pair) == (0, 0))
        await until(lambda: not list(pair.consumer._requests.arrays))

    run(scenario)


# --- ends -----------------------------------------------------------------------------------------


def test_an_array_whose_end_the_source_does_not_confirm_is_unquiesced() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        path, session = pair.consumer, pair.consumer_session
        handlers = pair.owner_session.handlers
        number = await private(pair)
        without = {name: h for name, h in handlers.items() if name != CloseBulkRequest.METHOD}
        pair.owner_session.handlers = without
        for _ in range(2):
            with pytest.raises(Unquiesced):
                await path.close_array(session, Direction.READ, number)
        assert endpoints(pair) == (2, 0)
        pair.owner_session.handlers = handlers
        await path.close_array(session, Direction.READ, number)
        assert endpoints(pair) == (0, 0)

    run(scenario)


def test_a_queue_pair_that_is_not_proven_to_end_stays_counted() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        path, session = pair.consumer, pair.consumer_session
        number = await private(pair)
        member = path._requests.arrays.find(session, number).member(0)  # type: ignore[union-attr]
        assert member is not None
        pair.b.hold()
        transfer = RunTransfer(pair, [(number, 5000)])
        with pytest.raises(Unquiesced):
            await transfer.move(await transfer.expose())
        for _ in range(2):
            with pytest.raises(Unquiesced):
                await path.close_array(session, Direction.READ, number)
        assert endpoints(pair)[1] == 1
        await transfer.retract(transferred=False)
        with pytest.raises(Unquiesced):
            await path.close()

    # The proof has come when the path is closed once more.
    run(scenario, config=replace(QUICK, progress_timeout_s=0.05))


def test_one_rail_that_fails_gives_up_the_rest_and_nothing_is_written_any_more() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        _, far = pair.more
        arrays = await connect_all(pair, Direction.READ)
        transfer = RunTransfer(pair, [(arrays[0], 8 * MIB), (arrays[1], 8 * MIB)])
        exposure = await transfer.expose()
        pair.b.hold(records.READ)  # the healthy one is still on its way
        far.fail(records.READ, 12, skip=1)
        moving = asyncio.ensure_future(transfer.move(exposure))
        await until(lambda: counts(pair.consumer)["aborts"])
        assert not moving.done()
        pair.b.clear_rules()
        pair.b.release()
        with pytest.raises(PathFailed) as caught:
            await moving
        assert caught.value.reason is PathReason.GET_FAILED
        await transfer.check_untouched()
        await transfer.retract(transferred=False)
        transfer.free()
        for array in arrays:
            await until(lambda array=array: connected(pair, array))  # type: ignore[misc]
        again = RunTransfer(pair, [(array, 5000) for array in arrays], 2)
        await again.run()
        again.free()

    run(scenario)


def connected(pair: ScriptedPair, number: int) -> bool:
    """Both sides have both members."""
    here = pair.consumer._requests.arrays.find(pair.consumer_session, number)
    there = pair.owner._sources._arrays[pair.owner_session.attempt, number]
    ready = [member for member in there.members.values() if member.ready]
    return here is not None and here.endpoints == len(ready) == 2


def test_what_is_not_proven_on_one_rail_outweighs_failures_on_the_other() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        _, far = pair.more
        arrays = await connect_all(pair, Direction.READ)
        transfer = RunTransfer(pair, [(arrays[0], 5000), (arrays[1], 6000)])
        exposure = await transfer.expose()
        pair.b.fail(records.READ, 12)  # first, and provably over
        far.hold()
        with pytest.raises(Unquiesced):
            await transfer.move(exposure)
        assert pair.consumer.statistics().retained_bytes == 6000
        await transfer.retract(transferred=False)
        with pytest.raises(Unquiesced):
            await pair.consumer.close()

    run(scenario, config=replace(QUICK, progress_timeout_s=0.05))


def test_a_rail_that_is_paused_has_no_route_and_the_default_takes_another() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        path, session = pair.consumer, pair.consumer_session
        first, second = path.routes(session)
        assert await path.prepare(session) is PathReason.OK
        await connect_all(pair, Direction.READ)
        pair.b.set_port(active=False)
        await until(lambda: path.routes(session) == (second,))
        assert [rail.active for rail in path.rails()] == [False, True]
        assert path.rails()[0].detail
        with pytest.raises(PathUnavailable) as caught:
            await path.connect_route(session, Direction.READ, first)
        assert caught.value.reason is PathReason.PORT_DOWN
        await until(lambda: endpoints(pair)[1] == 2)
        assert await path.prepare(session) is PathReason.OK
        assert array_of(pair, Direction.READ).pair.device.nic == second.rail.nic
        await Get(pair, 5000).run()
        pair.b.set_port(active=True)
        await until(lambda: path.routes(session) == (first, second))
        arrays = await connect_all(pair, Direction.READ)
        transfer = RunTransfer(pair, [(array, 5000) for array in arrays], 2)
        await transfer.run()
        transfer.free()
        assert path.rail_statistics().route_recoveries == 1

    run(scenario, config=replace(QUICK, monitor_interval_s=0.01, connect_backoff_s=0.0))


def test_a_rail_that_the_source_has_paused_is_left_for_another() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        path, session = pair.consumer, pair.consumer_session
        assert await path.prepare(session) is PathReason.OK
        pair.a.set_port(active=False)  # the peers' hello still names it
        await until(lambda: endpoints(pair) == (0, 0))
        await prepared(pair)
        assert array_of(pair, Direction.READ).pair.device.nic == 1
        await Get(pair, 5000).run()
        pair.more[0].set_port(active=False)
        pair.a.set_port(active=True)
        await until(lambda: [rail.active for rail in pair.owner.rails()] == [True, False])
        await prepared(pair)
        assert array_of(pair, Direction.READ).pair.device.nic == 0
        await Get(pair, 5000, 2).run()

    run(scenario, config=replace(QUICK, monitor_interval_s=0.01, connect_backoff_s=0.001))


async def prepared(pair: ScriptedPair) -> None:
    """Not at once: what failed is not tried again for a moment, and then elsewhere."""
    async with asyncio.timeout(10):
        while await pair.consumer.prepare(pair.consumer_session) is not PathReason.OK:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


# --- work -----------------------------------------------------------------------------------------


def test_all_binds_of_a_queue_pair_are_one_post() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        arrays = await connect_all(pair, Direction.READ)
        posts: list[tuple[int, int]] = []
        turn = pair.owner.devices[0].turn
        post = turn.post

        def watching(qp: int, receives: Sequence[bytes], sends: Sequence[bytes], *o: int) -> Posted:
            posts.append((len(receives), len(sends)))
            return post(qp, receives, sends, *o)

        turn.post = watching  # type: ignore[method-assign, assignment]
        runs = [(array, 1000) for array in arrays for _ in range(8)]
        transfer = RunTransfer(pair, runs)
        exposure = await transfer.expose()
        del turn.post
        assert posts == [(4, 4)] * 4  # two queue pairs on each rail
        await transfer.move(exposure)
        await transfer.finish()
        assert counts(pair.owner)["receipts"] == 16
        transfer.free()

    run(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_a_chain_of_binds_that_is_refused_opens_nothing(known: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        first, second = await connect_all(pair, Direction.READ)
        pair.a.refuse_post(records.BIND_WINDOW, 12, known=known, skip=2)
        transfer = RunTransfer(pair, [(first, 1000)] * 8 + [(second, 1000)] * 2)
        with pytest.raises(PathUnavailable):
            await transfer.expose()
        assert pair.owner.statistics().grants_active == 0
        assert not pair.owner.statistics().retained
        transfer.free()
        await until(lambda: endpoints(pair) == (0, 0))  # a bound window goes with its queue pair
        arrays = await connect_all(pair, Direction.READ)
        again = RunTransfer(pair, [(array, 1000) for array in arrays], 2)
        await again.run()
        again.free()

    run(scenario)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("nbytes", [10_000, 3 * MIB])
def test_local_memory_is_reached_from_every_device(nbytes: int, pinned: bool) -> None:
    """As it is, through one copy, or registered on both."""

    async def scenario(pair: ScriptedPair) -> None:
        assert await pair.consumer.memory.ensure() is PathReason.OK
        pair.pinned_targets = pinned
        before = pair.consumer.statistics().registered_bytes
        for lease, direction in enumerate(Direction, 1):
            arrays = await connect_all(pair, direction)
            transfer = RunTransfer(
                pair, [(array, nbytes // 2) for array in arrays], lease, direction
            )
            await transfer.run()
            transfer.free()
        found = counts(pair.consumer)
        kind = "direct" if pinned else "copied" if nbytes < MIB else "registered"
        assert found[f"targets_{kind}"] == 2
        assert pair.consumer.statistics().registered_bytes == before

    run(scenario)


def test_memory_that_one_device_cannot_register_is_copied() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        assert await pair.consumer.memory.ensure() is PathReason.OK
        arrays = await connect_all(pair, Direction.READ)
        pair.more[1].fail_verb("reg_mr", 12)
        before = pair.consumer.statistics().registered_bytes
        transfer = RunTransfer(pair, [(array, 2 * MIB) for array in arrays])
        await transfer.run()
        assert counts(pair.consumer)["targets_copied"] == 1
        assert pair.consumer.statistics().registered_bytes == before
        transfer.free()

    run(scenario)
