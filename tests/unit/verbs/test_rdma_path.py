"""RdmaPath on the scripted device: what a grant allows, what it does not, and what breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from errno import ENOMEM

import pytest

from orbit.config import RdmaPoolConfig
from orbit.errors import PathFailed, PathUnavailable, PeerLost, Unquiesced
from orbit.model import LeaseId, PathReason
from orbit.protocol.binding import GrantRecord
from orbit.protocol.descriptor import decode_descriptor
from orbit.transport.interface import Exposure
from orbit.verbs import records
from orbit.verbs.scripted_fabric import ANY_OPCODE, FOREVER, RECEIVE
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import (
    QUICK,
    UNWRITTEN,
    Get,
    ScriptedPair,
    counts,
    forge,
    join,
    open_scripted,
    rdma_pair,
)

Scenario = Callable[[ScriptedPair], Awaitable[None]]
NARROW = replace(QUICK, width=1)


def run(scenario: Scenario, *, rxe: bool = False, config: RdmaPathConfig = QUICK) -> None:
    async def main() -> None:
        async with rdma_pair(rxe=rxe, config=config, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


# --- what a key allows ----------------------------------------------------------------------------


@pytest.mark.parametrize("rxe", [False, True])
def test_after_the_receipt_the_key_reads_nothing(rxe: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        get = Get(pair, 5000)
        exposure = await get.expose()
        await get.pull(exposure)
        await get.retract()
        again = Get(pair, 5000, 2)
        error = await again.fails(exposure, PathReason.GET_FAILED)
        assert again.buffer == UNWRITTEN * 5000
        assert "access" in str(error) or "retries" in str(error)
        pair.owner.memory.free(again.memory)

    run(scenario, rxe=rxe)


def test_a_range_beyond_the_window_is_refused_by_the_device() -> None:
    """orbit's own check is out of the way: the record itself claims more than the window opens."""

    async def scenario(pair: ScriptedPair) -> None:
        for lease, (shift, more) in enumerate([(0, 1), (-1, 0), (-4096, 0), (1, 0)], 1):
            get = Get(pair, 5000, lease, room=more)
            real = await get.expose()
            address = decode_descriptor(real.descriptor).address + shift
            lie = forge(real, address=address, length=5000 + more)
            await get.fails(lie, PathReason.GET_FAILED)
            assert get.buffer == UNWRITTEN * (5000 + more)
            await get.retract(transferred=False)
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
        await Get(pair, 5000, 9).run()

    run(scenario)


def test_a_range_beyond_the_window_is_refused_by_orbit() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        get = Get(pair, 5000)
        exposure = await get.expose()
        lie = forge(exposure, length=5001)
        mixed = Exposure(descriptor=lie.descriptor, grant=exposure.grant)
        await get.fails(mixed, PathReason.DECODE_ERROR)  # descriptor against record
        await get.fails(lie, PathReason.DECODE_ERROR)  # record against target
        await get.pull(exposure)  # nothing was spent
        await get.retract()
        assert counts(pair.consumer)["aborts"] == 0

    run(scenario)


@pytest.mark.parametrize(
    "field", ["array", "index", "source_qpn", "requester_qpn", "direction", "slice_count"]
)
def test_a_record_of_another_connection_is_a_decode_error(field: str) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        get = Get(pair, 5000)
        exposure = await get.expose()
        value = getattr(GrantRecord.decode(exposure.grant), field)
        other = {"index": 1 - value, "direction": 2}.get(field, value + 1)
        error = await get.fails(forge(exposure, **{field: other}), PathReason.DECODE_ERROR)
        assert field in str(error) or field == "index"
        await get.pull(exposure)
        await get.retract()

    run(scenario)


def test_garbage_is_a_decode_error() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        get = Get(pair, 5000)
        exposure = await get.expose()
        for bad in (
            Exposure(),
            Exposure(descriptor=exposure.descriptor[:-1], grant=exposure.grant),
            Exposure(descriptor=exposure.descriptor, grant=exposure.grant[:-1]),
            Exposure(descriptor=b"\x01" + exposure.descriptor[1:], grant=exposure.grant),
        ):
            await get.fails(bad, PathReason.DECODE_ERROR)
        await get.pull(exposure)
        await get.retract()

    run(scenario)


@pytest.mark.parametrize("rxe", [False, True])
def test_six_hundred_grants_never_use_a_key_twice(rxe: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        keys = []
        for lease in range(1, 601):
            get = Get(pair, 64, lease)
            exposure = await get.expose()
            keys.append(decode_descriptor(exposure.descriptor).key)
            await get.pull(exposure)
            await get.retract()
        assert len(set(keys)) == 600
        statistics = pair.owner.statistics()
        assert statistics.window_keys_used == 600 + 1  # and one of the start probe
        ((left, total),) = statistics.device_window_keys.values()
        assert (left, total - left) == (statistics.window_keys_remaining, 600 + 1)
        assert counts(pair.owner)["receipts"] == 600
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        assert not pair.a.panicked
        assert (statistics.grants_active, statistics.grant_age_s) == (0, 0.0)
        late = Get(pair, 64, 601)
        exposure = await late.expose()
        statistics = pair.owner.statistics()
        assert statistics.grants_active == 1
        assert statistics.grant_age_s > 0
        await late.pull(exposure)
        await late.retract()

    run(scenario, rxe=rxe)


def test_keys_that_run_out_are_window_keys() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.fail_verb("alloc_pd", ENOMEM, count=FOREVER)  # no fresh domain
        for lease in range(1, 2 * 255):  # one key of two indexes went to the start probe
            await Get(pair, 64, lease).run()
        assert pair.owner.statistics().window_keys_remaining == 0
        with pytest.raises(PathUnavailable) as caught:
            await Get(pair, 64, 9999).expose()
        assert caught.value.reason == PathReason.WINDOW_KEYS
        assert pair.owner.statistics().grants_active == 0

    run(scenario, config=replace(NARROW, window_key_indices_max=2))


# --- receipts, and their absence ------------------------------------------------------------------


def test_retract_waits_for_a_receipt_that_is_late() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.hold(RECEIVE)
        get = Get(pair, 5000)
        await get.pull(await get.expose())
        retracting = asyncio.ensure_future(get.retract())
        await asyncio.sleep(0.02)
        assert not retracting.done()
        pair.a.release()
        await retracting
        assert counts(pair.owner)["aborts"] == 0

    run(scenario)


def test_receipts_are_timed_and_not_waited_for() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(records.SEND_WITH_INV)
        get = Get(pair, 5000)
        await get.pull(await get.expose())
        assert pair.consumer.statistics().receipt_s == 0
        await asyncio.sleep(0.02)
        pair.b.release()
        await get.retract()
        await asyncio.sleep(0.02)
        assert 0 < pair.consumer.statistics().receipt_s < 5

    run(scenario)


def test_a_receipt_that_never_comes_ends_the_queue_pair_and_the_memory_is_free() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.lose(RECEIVE)
        get = Get(pair, 5000)
        await get.pull(await get.expose())
        await get.retract()
        assert counts(pair.owner)["aborts"] == 1
        for _ in range(100):  # the requester was told, and replaces the member
            await asyncio.sleep(0.002)
            if counts(pair.consumer)["connects"] == 3:
                break
        await Get(pair, 5000, 2).run()
        await Get(pair, 5000, 3).run()

    run(scenario)


def test_a_receipt_with_a_foreign_binding_ends_the_queue_pair() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        get = Get(pair, 5000)
        exposure = await get.expose()
        # The consumer signs another generation: key and length are right, the 141 bytes are not.
        await get.pull(forge(exposure, generation=77))
        await get.retract()
        assert counts(pair.owner)["aborts"] == 1
        assert counts(pair.owner)["receipts"] == 0

    run(scenario)


def test_doubled_completions_change_nothing() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        for device in (pair.a, pair.b):
            for opcode in (records.READ, records.SEND_WITH_INV, records.BIND_WINDOW, RECEIVE):
                device.duplicate(opcode, count=50)
        for lease in range(1, 21):
            await Get(pair, 5000, lease).run()
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        assert pair.consumer.statistics().unknown_completions > 0

    run(scenario)


# --- the requester's troubles ---------------------------------------------------------------------


def test_a_read_without_an_end_is_killed_at_its_deadline() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.delay_payload(records.READ)
        get = Get(pair, 5000)
        error = await get.fails(await get.expose(), PathReason.GET_FAILED)
        assert "progress" in str(error)
        pair.b.clear_rules()
        pair.b.release()  # the payload must not land any more
        assert get.buffer == UNWRITTEN * 5000
        await get.retract(transferred=False)
        await Get(pair, 5000, 2).run()

    run(scenario, config=replace(QUICK, progress_timeout_s=0.05))


def test_a_target_that_cannot_be_proven_free_is_retained() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(ANY_OPCODE)
        get = Get(pair, 5000)
        with pytest.raises(Unquiesced):
            await get.pull(await get.expose())
        statistics = pair.consumer.statistics()
        assert statistics.retained_bytes == 5000
        assert len(statistics.retained) == 2  # the target and the queue pair
        await get.retract(transferred=False)
        with pytest.raises(Unquiesced):
            await pair.consumer.close()
        assert pair.consumer.statistics().retained_bytes == 5000

    async def main() -> None:
        config = replace(QUICK, progress_timeout_s=0.05)
        async with rdma_pair(config=config, pinned_targets=False) as pair:
            await pair.consumer.prepare(pair.consumer_session)
            await scenario(pair)

    asyncio.run(main())  # the proof has come when the path is closed once more


def test_a_partly_posted_round_fails_the_get_and_not_its_peer() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.refuse_post(records.SEND_WITH_INV, 12)
        get = Get(pair, 5000)
        await get.fails(await get.expose(), PathReason.GET_FAILED)
        await get.retract(transferred=False)
        await Get(pair, 5000, 2).run()

    run(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_a_refused_bind_offers_no_rdma(known: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.refuse_post(records.BIND_WINDOW, 12, known=known)
        get = Get(pair, 5000)
        with pytest.raises(PathUnavailable):
            await get.expose()
        await get.expose()  # the other member
        await get.retract(transferred=False)

    run(scenario)


@pytest.mark.parametrize("trouble", ["fails", "never completes"])
def test_a_bind_that_does_not_succeed_offers_no_rdma(trouble: str) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        if trouble == "fails":
            pair.a.fail_bind()
        else:
            pair.a.lose(records.BIND_WINDOW)
        get = Get(pair, 5000)
        with pytest.raises(PathUnavailable) as caught:
            await get.expose()
        assert caught.value.reason == PathReason.DEVICE_FAILED
        pair.owner.memory.free(get.memory)
        await Get(pair, 5000, 2).run()

    run(scenario, config=replace(QUICK, bind_timeout_s=0.05))


def test_siblings_fail_with_the_queue_pair_and_other_members_go_on() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        gets = [Get(pair, 5000, lease) for lease in range(1, 5)]
        exposures = [await get.expose() for get in gets]
        members = [GrantRecord.decode(exposure.grant).index for exposure in exposures]
        assert sorted(members) == [0, 0, 1, 1]
        victim = members.index(0)
        sibling = members.index(0, victim + 1)
        others = [i for i in range(4) if members[i] == 1]
        await gets[victim].retract(transferred=False)
        with pytest.raises(PathFailed):  # the member is gone, or is another one already
            await gets[sibling].pull(exposures[sibling])
        assert gets[sibling].untouched
        await gets[sibling].retract(transferred=False)
        for i in others:
            await gets[i].pull(exposures[i])
            assert gets[i].buffer == gets[i].payload
            await gets[i].retract()
        assert counts(pair.owner)["aborts"] == 1

    run(scenario)


def test_a_cancelled_get_hands_its_grant_back_and_spares_the_queue_pair() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(records.READ)
        get = Get(pair, 8 << 20)
        pulling = asyncio.ensure_future(get.pull(await get.expose()))
        await asyncio.sleep(0.02)
        pulling.cancel()
        await asyncio.sleep(0.01)
        assert not pulling.done()  # READs are in flight: the target is not free yet
        pair.b.clear_rules()
        pair.b.release()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await get.retract(transferred=False)
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        await Get(pair, 5000, 2).run()

    run(scenario)


def test_the_end_of_the_epoch_is_peer_lost() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(records.READ)
        get = Get(pair, 5000)
        pulling = asyncio.ensure_future(get.pull(await get.expose()))
        await asyncio.sleep(0.02)
        pair.consumer_session.close()
        pair.b.clear_rules()
        pair.b.release()
        await pair.consumer.close_session(pair.consumer_session)
        with pytest.raises(PeerLost):
            await pulling
        await pair.owner.close_session(pair.owner_session)
        assert pair.owner.statistics().grants_active == 0
        pair.owner.memory.free(get.memory)
        # Queue pairs and windows of that epoch are gone.
        assert pair.owner.statistics().queue_pairs == pair.consumer.statistics().queue_pairs == 0

    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            await pair.consumer.prepare(pair.consumer_session)
            pulling_first = Get(pair, 5000, 9)
            await pulling_first.run()
            try:
                await scenario(pair)
            finally:
                pair.b.clear_rules()

    asyncio.run(main())


def test_other_peers_go_on_when_one_epoch_ends() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        third = await open_scripted(pair.a.fabric, "fake_c")
        ours, theirs = join(pair.owner, third, 2)
        assert await third.prepare(theirs) is PathReason.OK
        doomed = Get(pair, 5000, 1)
        await doomed.expose()
        other = Get(pair, 5000, 1)
        exposure = await pair.owner.expose(ours, other.span, LeaseId(1))
        await pair.owner.close_session(pair.owner_session)
        await third.pull(theirs, exposure, LeaseId(1), other.target)
        assert other.buffer == other.payload
        await pair.owner.retract(ours, LeaseId(1), transferred=True)
        await third.close()

    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            pair.a.fabric.add_device("fake_c")
            await pair.consumer.prepare(pair.consumer_session)
            await scenario(pair)

    asyncio.run(main())


def test_a_key_of_another_queue_pair_is_refused_by_the_device() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        first, second = Get(pair, 5000, 1), Get(pair, 5000, 2)
        exposures = [await first.expose(), await second.expose()]
        by_index = {
            GrantRecord.decode(e.grant).index: GrantRecord.decode(e.grant) for e in exposures
        }
        # The record of member 1 with the key and range of member 0's window.
        lie = forge(
            Exposure(grant=by_index[1].encode()), key=by_index[0].key, address=by_index[0].address
        )
        await second.fails(lie, PathReason.GET_FAILED)
        assert second.buffer == UNWRITTEN * 5000
        await second.retract(transferred=False)
        await first.retract(transferred=False)

    run(scenario)


# --- limits ---------------------------------------------------------------------------------------


def test_grants_are_bounded_by_the_receives_of_the_members() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        gets = [Get(pair, 100, lease) for lease in range(1, 9)]
        exposures = [await get.expose() for get in gets]
        with pytest.raises(PathUnavailable) as caught:
            await Get(pair, 100, 99).expose()
        assert caught.value.reason == PathReason.WINDOWS_BUSY
        await asyncio.gather(*(g.pull(e) for g, e in zip(gets, exposures, strict=True)))
        for get in gets:
            assert get.buffer == get.payload
            await get.retract()
        await Get(pair, 100, 100).run()

    run(scenario, config=replace(QUICK, recv_depth=4))


def test_many_gets_at_once_share_a_short_send_queue() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        sizes = [100, 70_000, 3 << 20, 1 << 20, 5000, (2 << 20) + 1] * 2
        gets = [Get(pair, nbytes, lease) for lease, nbytes in enumerate(sizes, 1)]
        await asyncio.gather(*(get.run() for get in gets))
        assert counts(pair.consumer)["aborts"] == 0

    small = replace(
        QUICK,
        send_depth=6,
        piece_bytes=256 << 10,
        inflight_bytes=512 << 10,
        pool=RdmaPoolConfig(initial_arena_bytes=32 << 20),
    )
    run(scenario, config=small)


def test_a_target_goes_the_cheaper_way_and_the_other_where_that_is_closed() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        await Get(pair, 10_000, 1).run()
        await Get(pair, 2 << 20, 2).run()
        assert counts(pair.consumer)["targets_copied"] == 1
        assert counts(pair.consumer)["targets_registered"] == 1
        pair.b.fail_verb("reg_mr", 12)
        await Get(pair, 2 << 20, 3).run()  # locked memory is spent: through the pool
        assert counts(pair.consumer)["targets_copied"] == 2
        rest = pair.consumer.memory.allocate_nowait(20 << 20)
        pair.b.fail_verb("reg_mr", 12, count=2)
        get = Get(pair, 5 << 20, 4)  # neither way: the pool has no room for it, and gets none
        await get.fails(await get.expose(), PathReason.POOL_EXHAUSTED)
        pair.consumer.memory.free(rest)
        await get.retract(transferred=False)
        assert counts(pair.owner)["aborts"] == 0  # the unused grant was handed back

    run(scenario)


def test_an_arena_that_cannot_be_had_is_a_reason() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.fail_verb("reg_mr", 12)
        small = replace(QUICK, pool=RdmaPoolConfig(registered_bytes_budget=4096))
        poor = await open_scripted(pair.a.fabric, "fake_c", config=small)
        assert await poor.memory.ensure() is PathReason.BUDGET
        assert "budget" in poor.memory.failure or "registered" in poor.memory.failure
        pair.a.fabric.devices["fake_c"].fail_verb("reg_mr", 12)
        await poor.close()
        assert await poor.memory.ensure() is PathReason.DRAINING
        fresh = await open_scripted(pair.a.fabric, "fake_d")
        pair.a.fabric.devices["fake_d"].fail_verb("reg_mr", 12)
        assert await fresh.memory.ensure() is PathReason.POOL_EXHAUSTED
        assert await fresh.memory.ensure() is PathReason.OK
        await fresh.close()
        pair.a.clear_rules()

    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            for name in ("fake_c", "fake_d"):
                pair.a.fabric.add_device(name)
            await scenario(pair)

    asyncio.run(main())
