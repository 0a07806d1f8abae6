"""Transfers that start together on one queue pair leave in one post, and fail together with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from orbit.errors import PathFailed
from orbit.model import Direction
from orbit.testing.path_rail_cases import RunTransfer, connect_all
from orbit.testing.waiting import until
from orbit.verbs import records
from orbit.verbs.turn import PostResult
from tests.contract.rdma_pairs import Get, ScriptedPair, counts, rdma_pair

MIB = 1 << 20
Scenario = Callable[[ScriptedPair], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False, rails=2) as pair:
            await scenario(pair)

    asyncio.run(main())


def watch(pair: ScriptedPair) -> list[int]:
    """Work requests of each post of the requester from now on."""
    posts: list[int] = []
    turn = pair.consumer.devices[0].turn
    post_send = turn.post_send

    def watching(qp: int, requests: Sequence[bytes]) -> PostResult:
        posts.append(len(requests))
        return post_send(qp, requests)

    turn.post_send = watching  # type: ignore[method-assign]
    return posts


@pytest.mark.parametrize("direction", Direction)
def test_all_that_a_queue_pair_has_room_for_is_one_post(direction: Direction) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        arrays = await connect_all(pair, direction)
        transfer = RunTransfer(
            pair, [(a, 1000) for a in arrays for _ in range(8)], direction=direction
        )
        exposure = await transfer.expose()
        posts = watch(pair)
        await transfer.move(exposure)
        assert posts == [8, 8, 8, 8]  # on each of four queue pairs 4 pieces and 4 receipts
        await transfer.finish()
        assert counts(pair.owner)["receipts"] == 16
        transfer.free()

    run(scenario)


def test_what_has_no_room_waits_for_a_later_post() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        (first, _) = await connect_all(pair, Direction.READ)
        transfer = RunTransfer(pair, [(first, 3 * MIB)] * 4)  # 4 MiB may be in flight
        exposure = await transfer.expose()
        posts = watch(pair)
        await transfer.move(exposure)
        assert len(posts) > 2
        await transfer.finish()
        transfer.free()

    run(scenario)


@pytest.mark.parametrize("direction", Direction)
def test_what_completions_of_one_batch_cause_is_one_post(direction: Direction) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        (first, _) = await connect_all(pair, direction)
        opcode = records.READ if direction is Direction.READ else records.WRITE
        transfer = RunTransfer(pair, [(first, 6 * MIB)], direction=direction)
        exposure = await transfer.expose()
        posts = watch(pair)
        pair.b.hold(opcode, count=3)  # that many pieces are in flight
        moving = asyncio.ensure_future(transfer.move(exposure))
        await until(lambda: len(posts) == 1)
        pair.b.release()
        await moving
        assert posts == [3, 4]  # the last round has the receipt
        await transfer.finish()
        transfer.free()

    run(scenario)


def test_a_progress_that_raises_costs_the_transfer_nothing() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        await pair.consumer.prepare(pair.consumer_session, Direction.READ)

        def progress(nbytes: int) -> None:
            raise RuntimeError("a bug of the caller")

        get = Get(pair, 6 * MIB)
        exposure = await get.expose()
        session = pair.consumer_session
        await pair.consumer.pull(session, exposure, get.lease, get.target, progress)
        assert get.buffer == get.payload
        await get.retract()
        members = [m for a in pair.consumer._requests.arrays for m in a._members.values()]
        await until(lambda: not any(member.load for member in members))
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0

    run(scenario)


@pytest.mark.parametrize("known", [True, False])
def test_a_post_that_is_refused_in_the_middle_fails_all_and_leaves_nothing(known: bool) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        (first, _) = await connect_all(pair, Direction.READ)
        transfer = RunTransfer(pair, [(first, 1000)] * 8)
        exposure = await transfer.expose()
        pair.b.refuse_post(records.READ, 12, known=known, skip=2)
        with pytest.raises(PathFailed):
            await transfer.move(exposure)
        pair.b.clear_rules()
        await transfer.retract(transferred=False)
        await until(lambda: not pair.owner.statistics().grants_active)
        for path in (pair.owner, pair.consumer):
            assert not path.statistics().retained
        transfer.free()

    run(scenario)
