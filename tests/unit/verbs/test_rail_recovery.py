"""Rails of a whole path that go away and come back: what fails, what goes on, and what a peer that
knows an old address can still do.
"""

from __future__ import annotations

import asyncio

import pytest

from orbit.errors import PathFailed, PathUnavailable
from orbit.model import Direction, PathReason
from orbit.protocol.messages import SliceRun
from orbit.testing.waiting import until
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.records import READ
from tests.contract.rdma_pairs import Get, ScriptedPair, rdma_pair

ELSEWHERE = "::ffff:198.18.1.77"


async def gone(path: RdmaPath) -> None:
    """No queue pair of its first rail is left."""
    await until(lambda: not path.devices[0].queue_pairs)


@pytest.mark.parametrize("rxe", [False, True])
@pytest.mark.parametrize("side", ["owner", "consumer"])
def test_a_port_that_goes_down_in_the_middle_fails_the_get_and_comes_back(
    side: str, rxe: bool
) -> None:
    async def main() -> None:
        async with rdma_pair(rails=2, rxe=rxe, pinned_targets=False) as pair:
            fake, path = (pair.a, pair.owner) if side == "owner" else (pair.b, pair.consumer)
            await pair.consumer.prepare(pair.consumer_session)
            pair.b.delay_payload(READ)
            get = Get(pair, 300_000)
            pulling = asyncio.create_task(get.pull(await get.expose()))
            await asyncio.sleep(0)
            domains = [device.domain.native.native for device in path.devices]
            keys = path.devices[0].domain.windows.history.keys_used
            fake.set_port(active=False)
            with pytest.raises(PathFailed):
                await pulling
            await get.retract(transferred=False)
            pair.b.clear_rules()
            await gone(path)
            assert [facts.active for facts in path.rails()] == [False, True]
            assert "PORT_ERR" in path.rails()[0].detail
            fake.set_port(active=True)
            await until(lambda: path.rails()[0].active)
            assert path.rail_statistics().route_recoveries == 1
            assert [device.domain.native.native for device in path.devices] == domains
            assert path.devices[0].domain.windows.history.keys_used >= keys
            await pair.consumer.prepare(pair.consumer_session)
            await Get(pair, 300_000, 2).run()

    asyncio.run(main())


def test_the_other_rail_goes_on() -> None:
    async def main() -> None:
        async with rdma_pair(rails=2, pinned_targets=False) as pair:
            consumer, session = pair.consumer, pair.consumer_session
            first, second = consumer.routes(session)
            numbers = [
                await consumer.connect_route(session, Direction.READ, route)
                for route in (first, second)
            ]
            other = consumer.devices[1]
            before = other.queue_pairs
            assert before
            pair.b.set_port(active=False)
            await gone(consumer)
            assert other.queue_pairs == before
            assert consumer.routes(session) == (second,)
            with pytest.raises(PathUnavailable) as caught:
                await consumer.connect_route(session, Direction.READ, first)
            assert caught.value.reason == PathReason.PORT_DOWN
            get = Get(pair, 100_000)
            runs = [SliceRun(numbers[1], 100_000)]
            exposure = await pair.owner.expose_runs(
                pair.owner_session, get.span, get.lease, runs, Direction.READ
            )
            await get.pull(exposure)
            assert get.buffer == get.payload
            await get.retract()

    asyncio.run(main())


async def ready(pair: ScriptedPair) -> bool:
    return await pair.consumer.prepare(pair.consumer_session) is PathReason.OK


@pytest.mark.parametrize("side", ["owner", "consumer"])
def test_a_new_address_is_used_within_the_same_epoch(side: str) -> None:
    """Both announce what they had at the start; who dials says what it has now, and the other side
    knows what it was called before.
    """

    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            fake, path = (pair.a, pair.owner) if side == "owner" else (pair.b, pair.consumer)
            await ready(pair)
            await Get(pair, 5000).run()
            announced = path.hints[0].gid
            fake.set_gid(4, ELSEWHERE)
            fake.set_gid(1, "::")
            await gone(path)
            await until(lambda: path.rails()[0].active)
            assert path.hints[0].gid == ELSEWHERE != announced
            await asyncio.sleep(pair.consumer._config.connect_backoff_s)
            assert await ready(pair)
            await Get(pair, 5000, 2).run()

    asyncio.run(main())


def test_nobody_dials_a_rail_that_is_down() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            session = pair.consumer_session
            pair.b.set_port(active=False)
            await until(lambda: not pair.consumer.rails()[0].active)
            assert pair.consumer.availability(session) is PathReason.PORT_DOWN
            assert await pair.consumer.prepare(session) is PathReason.PORT_DOWN
            assert pair.consumer.routes(session) == ()
            pair.b.set_port(active=True)
            await until(lambda: pair.consumer.rails()[0].active)
            assert await ready(pair)
            pair.a.set_port(active=False)
            await gone(pair.owner)
            assert await pair.consumer.prepare(session) is PathReason.CONNECT_FAILED
            assert pair.owner.statistics().queue_pairs == 0

    asyncio.run(main())


def test_a_rail_may_come_and_go_many_times() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            for lease in range(1, 6):
                assert await ready(pair)
                await Get(pair, 5000, lease).run()
                pair.a.set_port(active=False)
                await gone(pair.owner)
                pair.a.set_port(active=True)
                await until(lambda: pair.owner.rails()[0].active)
                await asyncio.sleep(pair.consumer._config.connect_backoff_s)
            assert pair.owner.rail_statistics().route_recoveries == 5
            assert pair.owner.statistics().retained == ()

    asyncio.run(main())
