"""WRITE on the scripted device: what a key for writing allows, what it proves, and what breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from orbit.errors import PathFailed, PathUnavailable, PeerLost
from orbit.model import Direction, LeaseId, PathReason
from orbit.protocol.binding import GrantRecord
from orbit.protocol.messages import ConnectBulkRequest, Message
from orbit.transport.interface import Exposure, Session, Span, Target
from orbit.verbs import records
from orbit.verbs.scripted_fabric import ANY_OPCODE, RECEIVE
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import (
    QUICK,
    Get,
    Put,
    ScriptedPair,
    array_of,
    counts,
    forge,
    rdma_pair,
)

Scenario = Callable[[ScriptedPair], Awaitable[None]]
NARROW = replace(QUICK, width=1)


def run(scenario: Scenario, *, rxe: bool = False, config: RdmaPathConfig = QUICK) -> None:
    async def main() -> None:
        async with rdma_pair(rxe=rxe, config=config, pinned_targets=False) as pair:
            for direction in Direction:
                prepared = await pair.consumer.prepare(pair.consumer_session, direction)
                assert prepared is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


@pytest.mark.parametrize("rxe", [False, True])
def test_bytes_are_in_place_when_the_retraction_returns(rxe: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for lease, nbytes in enumerate([1, 4096, 100_001, (3 << 20) + 7], 1):
            await Put(pair, nbytes, lease).run()
        assert counts(pair.consumer)["written_bytes"] == 1 + 4096 + 100_001 + (3 << 20) + 7
        assert counts(pair.consumer)["read_bytes"] == 0
        assert counts(pair.owner)["receipts"] == 4
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0

    run(scenario, rxe=rxe)


def test_the_retraction_waits_for_a_receipt_that_is_late() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.hold(RECEIVE)
        put = Put(pair, 5000)
        await put.push(await put.expose())
        retracting = asyncio.ensure_future(put.retract())
        await asyncio.sleep(0.02)
        assert not retracting.done()
        pair.a.release()
        await retracting
        assert put.landed == put.payload

    run(scenario)


def test_a_push_whose_receipt_never_comes_has_not_arrived() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.lose(RECEIVE)
        put = Put(pair, 5000)
        await put.push(await put.expose())
        with pytest.raises(PathFailed):
            await put.retract()
        await put.retract()  # the lease is unknown by now
        assert counts(pair.owner)["aborts"] == 1
        await Put(pair, 5000, 2).run()

    run(scenario)


# --- what a key allows ----------------------------------------------------------------------------


LIES: dict[str, Callable[[GrantRecord], dict[str, int]]] = {
    "next key": lambda r: {"key": r.key + 1},
    "past the end by one": lambda r: {"address": r.address + 1},
    "before the start by one": lambda r: {"address": r.address - 1},
    "a foreign key": lambda r: {"key": r.key ^ 0x100},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("direction", Direction)
def test_a_wrong_key_or_address_fails_one_transfer(lie: str, direction: Direction) -> None:
    """The device refuses; the error is typed, no byte changes, and everything goes on."""

    async def scenario(pair: ScriptedPair) -> None:
        move = Get(pair, 5000) if direction is Direction.READ else Put(pair, 5000)
        exposure = await move.expose()
        record = GrantRecord.decode(exposure.grant)
        other = Put(pair, 5000, 2) if direction is Direction.READ else Get(pair, 5000, 2)
        running = asyncio.ensure_future(other.run())
        await move.fails(forge(exposure, **LIES[lie](record)), PathReason.GET_FAILED)
        assert move.untouched
        await running
        await move.retract(transferred=False)
        assert await pair.consumer.prepare(pair.consumer_session, direction) is PathReason.OK
        for lease in (3, 4, 5):
            await Get(pair, 5000, lease).run()
            await Put(pair, 5000, 10 + lease).run()

    run(scenario)


@pytest.mark.parametrize("direction", Direction)
def test_a_length_beyond_the_grant_is_refused_twice(direction: Direction) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        if direction is Direction.READ:
            move: Get | Put = Get(pair, 5000, room=1)
        else:
            move = Put(pair, 5000, more=1)
        exposure = await move.expose()
        await move.fails(exposure, PathReason.DECODE_ERROR)  # by orbit: 5001 bytes, 5000 granted
        assert counts(pair.consumer)["aborts"] == 0
        await move.fails(forge(exposure, length=5001), PathReason.GET_FAILED)  # by the device
        assert move.untouched
        await move.retract(transferred=False)
        await Get(pair, 5000, 2).run()
        await Put(pair, 5000, 3).run()

    run(scenario)


@pytest.mark.parametrize("rxe", [False, True])
@pytest.mark.parametrize("direction", Direction)
def test_a_key_of_a_lease_that_ended_moves_nothing(direction: Direction, rxe: bool) -> None:
    """After the receipt, and after an expiry without one."""

    async def scenario(pair: ScriptedPair) -> None:
        kind = Get if direction is Direction.READ else Put
        done = kind(pair, 5000, 1)
        exposure = await done.expose()
        await (done.pull(exposure) if isinstance(done, Get) else done.push(exposure))
        await done.retract()
        again = kind(pair, 5000, 2)
        await again.fails(exposure, PathReason.GET_FAILED)
        assert again.untouched
        expired = kind(pair, 5000, 3)
        exposure = await expired.expose()
        await expired.retract(transferred=False)
        late = kind(pair, 5000, 4)
        await late.fails(exposure, PathReason.GET_FAILED)
        assert late.untouched
        for lease in (5, 6, 7):
            assert await pair.consumer.prepare(pair.consumer_session, direction) is PathReason.OK
            await kind(pair, 5000, lease).run()

    run(scenario, rxe=rxe)


@pytest.mark.parametrize("rxe", [False, True])
@pytest.mark.parametrize("granted", Direction)
def test_a_grant_of_one_direction_does_not_serve_the_other(granted: Direction, rxe: bool) -> None:
    """First orbit says no, by the record; then the device does, by the window and the queue pair,
    to a requester that lies to itself.
    """

    async def scenario(pair: ScriptedPair) -> None:
        read = granted is Direction.READ
        move: Get | Put = Get(pair, 5000) if read else Put(pair, 5000)
        exposure = await move.expose()
        crossed: Get | Put = Put(pair, 5000, 2) if read else Get(pair, 5000, 2)
        error = await crossed.fails(exposure, PathReason.DECODE_ERROR)
        assert "direction" in str(error)
        held = bytes(move.span.view)
        await misuse(pair, exposure, granted)
        assert bytes(move.span.view) == held
        await move.retract(transferred=False)
        assert await pair.consumer.prepare(pair.consumer_session, granted) is PathReason.OK
        await Get(pair, 5000, 5).run()
        await Put(pair, 5000, 6).run()

    run(scenario, rxe=rxe)


async def misuse(pair: ScriptedPair, exposure: Exposure, granted: Direction) -> None:
    """Use the grant's own queue pair and key in the other direction. It must fail."""
    consumer, session = pair.consumer, pair.consumer_session
    array = array_of(pair, granted)
    member = array.member(GrantRecord.decode(exposure.grant).index)
    assert member is not None
    other = Direction.WRITE if granted is Direction.READ else Direction.READ
    member.direction = other  # the requester deceives itself
    memory = bytearray(5000)
    target, source = Target(memoryview(memory)), Span(memoryview(b"x" * 5000))
    array.name = replace(array.name, direction=other)
    with pytest.raises(PathFailed) as caught:
        await (
            consumer.push(session, exposure, LeaseId(9), source)
            if other is Direction.WRITE
            else consumer.pull(session, exposure, LeaseId(9), target)
        )
    array.name = replace(array.name, direction=granted)
    assert caught.value.reason is PathReason.GET_FAILED
    assert memory == bytes(5000)


# --- the requester's troubles ---------------------------------------------------------------------


def test_a_cancelled_push_hands_its_grant_back_and_spares_the_queue_pair() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(records.WRITE)
        put = Put(pair, 8 << 20)
        pushing = asyncio.ensure_future(put.push(await put.expose()))
        for _ in range(5000):
            await asyncio.sleep(0.001)
            if counts(pair.consumer)["writes"]:
                break
        pushing.cancel()
        await asyncio.sleep(0.01)
        assert not pushing.done()  # WRITEs are in flight: the source is not the caller's yet
        pair.b.clear_rules()
        pair.b.release()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        await put.retract(transferred=False)
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        await Put(pair, 5000, 2).run()

    run(scenario)


def test_a_write_without_an_end_is_killed_at_its_deadline_and_never_repeated() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.delay_payload(records.WRITE)
        put = Put(pair, 5000)
        await put.fails(await put.expose(), PathReason.GET_FAILED)
        pair.b.clear_rules()
        pair.b.release()  # the payload must not land any more
        assert put.untouched
        assert counts(pair.consumer)["writes"] == 1
        await put.retract(transferred=False)
        await Put(pair, 5000, 2).run()

    run(scenario, config=replace(QUICK, progress_timeout_s=0.05))


def test_the_end_of_the_epoch_is_peer_lost() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(ANY_OPCODE)
        put = Put(pair, 5000)
        pushing = asyncio.ensure_future(put.push(await put.expose()))
        await asyncio.sleep(0.02)
        pair.consumer_session.close()
        pair.b.clear_rules()
        pair.b.release()
        await pair.consumer.close_session(pair.consumer_session)
        with pytest.raises(PeerLost):
            await pushing
        await pair.owner.close_session(pair.owner_session)
        assert pair.owner.statistics().grants_active == 0
        assert pair.owner.statistics().queue_pairs == pair.consumer.statistics().queue_pairs == 0

    run(scenario)


# --- where the source's bytes lie -----------------------------------------------------------------


def test_a_source_goes_the_cheaper_way_and_read_only_memory_is_copied() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        small = Put(pair, 10_000, 1)
        await small.run()
        large = Put(pair, 2 << 20, 2)
        large.source = Span(memoryview(bytearray(large.payload)))
        await large.run()
        constant = Put(pair, 2 << 20, 3)
        assert constant.source.view.readonly
        await constant.run()
        pinned = Put(pair, 3 << 20, 4)
        memory = await pair.consumer.memory.allocate(3 << 20)
        memory.view[:] = pinned.payload
        pinned.source = Span(memory.view, memory)
        await pinned.run()
        pair.consumer.memory.free(memory)
        found = counts(pair.consumer)
        assert found["targets_copied"] == 2
        assert found["targets_registered"] == 1
        assert found["targets_direct"] == 1

    run(scenario)


# --- arrays ---------------------------------------------------------------------------------------


def test_each_direction_has_queue_pairs_of_its_own() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        assert pair.owner.statistics().queue_pairs == 4
        put, get = Put(pair, 5000, 1), Get(pair, 5000, 2)
        exposures = [await put.expose(), await get.expose()]
        written, read = (GrantRecord.decode(exposure.grant) for exposure in exposures)
        assert (written.array, written.direction) == (1, Direction.WRITE)
        assert (read.array, read.direction) == (0, Direction.READ)
        await put.push(exposures[0])
        await get.pull(exposures[1])
        await put.retract()
        await get.retract()

    run(scenario)


def test_a_source_that_knows_read_only_is_asked_once() -> None:
    """What it answers does not repeat the direction: it has built an array for READs."""

    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            answer = pair.owner_session.handlers[ConnectBulkRequest.METHOD]
            asked = 0

            async def older(session: Session, body: object) -> Message | None:
                nonlocal asked
                asked += 1
                assert isinstance(body, dict)
                known = {name: value for name, value in body.items() if name != "direction"}
                return await answer(session, known)

            older_handlers = {ConnectBulkRequest.METHOD: older}
            pair.owner_session.handlers = {**pair.owner_session.handlers, **older_handlers}
            session = pair.consumer_session
            results = [await pair.consumer.prepare(session, Direction.WRITE) for _ in range(20)]
            assert set(results) == {PathReason.PEER_WITHOUT}
            assert pair.consumer.availability(session, Direction.WRITE) is PathReason.PEER_WITHOUT
            assert asked == 1
            await asyncio.sleep(QUICK.connect_backoff_s + 0.01)
            assert await pair.consumer.prepare(session, Direction.WRITE) is PathReason.PEER_WITHOUT
            assert asked == 1
            assert await pair.consumer.prepare(session) is PathReason.OK
            await Get(pair, 5000).run()
            with pytest.raises(PathUnavailable):  # its array is one for READs
                await Put(pair, 5000, 2).expose()

    asyncio.run(main())


def test_an_unprepared_direction_offers_nothing() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            with pytest.raises(PathUnavailable) as caught:
                await Put(pair, 100).expose()
            assert caught.value.reason == PathReason.CONNECT_FAILED

    asyncio.run(main())


def test_a_lost_member_for_writes_is_replaced() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        put = Put(pair, 5000)
        await put.expose()
        await put.retract(transferred=False)  # ends the queue pair
        for _ in range(500):
            await asyncio.sleep(0.002)
            if counts(pair.consumer)["connects"] == 5:
                break
        assert counts(pair.consumer)["connects"] == 5
        assert pair.owner.statistics().queue_pairs == 4
        await Put(pair, 5000, 2).run()
        await Put(pair, 5000, 3).run()

    run(scenario)


def test_an_owner_whose_queue_pair_died_unnoticed_takes_another() -> None:
    """A requester's error kills both ends, and nothing tells the owner before its next bind."""

    async def scenario(pair: ScriptedPair) -> None:
        put = Put(pair, 5000)
        exposure = await put.expose()
        await put.push(exposure)
        await put.fails(exposure, PathReason.GET_FAILED)  # the key is spent
        await put.retract()
        assert counts(pair.owner)["aborts"] == 0
        for lease in (2, 3):
            await Put(pair, 5000, lease).run()
        assert counts(pair.owner)["aborts"] == 1

    run(scenario)


def test_binds_are_timed() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for lease in range(1, 6):
            await Put(pair, 100, lease).run()
        statistics = pair.owner.statistics()
        assert statistics.counts["binds_completed"] == 5
        assert 0 < statistics.bind_s < 5

    run(scenario)
