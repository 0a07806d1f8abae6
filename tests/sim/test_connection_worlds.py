"""Nodes that dial each other at once, lose their connections and restart, in simulated time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.config import NodeConfig, TimeoutConfig
from orbit.errors import InternalError, OrbitError, PeerError, PeerRestarted, UnknownHandle
from orbit.model import Handle, Incarnation, PeerIdentity
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

PAYLOAD = pattern(4096)
RETAIN = RegisterOptions(retain=True)  # a consumer that is cut off takes no reference with it


async def fetch(node: WorldNode, handle: Handle) -> None:
    data, lease = await node.rendezvous.consumer.get(handle, transport=None, timeout=None)
    assert data == PAYLOAD
    await node.rendezvous.consumer.detach(handle, lease)


def sessions(node: WorldNode) -> int:
    return node.rendezvous.statistics().sessions


async def two_nodes(world: World, config: NodeConfig | None = None) -> list[Handle]:
    for _ in range(2):
        world.add_node(config)
    world.introduce()
    return [await node.rendezvous.owner.register_data(PAYLOAD, RETAIN) for node in world.nodes]


async def both_ways(world: World, handles: list[Handle], users: int = 8) -> list[object]:
    a, b = world.nodes
    gets = [fetch(a, handles[1]) for _ in range(users)] + [
        fetch(b, handles[0]) for _ in range(users)
    ]
    return await asyncio.gather(*gets, return_exceptions=True)


@pytest.mark.parametrize("seed", range(16))
def test_simultaneous_dials_end_in_one_session_and_nobody_fails(seed: int) -> None:
    async def main() -> None:
        async with World(seed, LinkFaults(delay_max_s=0.3)) as world:
            handles = await two_nodes(world)
            for rounds in range(1, 6):
                assert await both_ways(world, handles) == [None] * 16
                await asyncio.sleep(1.0)  # the refused one has heard of it
                assert [sessions(node) for node in world.nodes] == [1, 1]
                opened = [node.count("orbit_sessions_opened_total") for node in world.nodes]
                assert opened == [rounds, rounds]
                world.network.cut_all()
                await asyncio.sleep(1.0)
                assert [sessions(node) for node in world.nodes] == [0, 0]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(16))
def test_delays_around_the_timeout_end_in_one_session_or_an_error(seed: int) -> None:
    async def main() -> None:
        timeouts = TimeoutConfig(handshake_s=0.4)  # a parked attempt waits 133 ms
        async with World(seed, LinkFaults(delay_max_s=0.3)) as world:
            handles = await two_nodes(world, NodeConfig(timeouts=timeouts))
            for _ in range(5):
                outcomes = await both_ways(world, handles)
                assert all(o is None or isinstance(o, PeerError) for o in outcomes), outcomes
                await asyncio.sleep(2.0)
                assert sessions(world.nodes[0]) == sessions(world.nodes[1]) <= 1
                world.network.cut_all()
                await asyncio.sleep(2.0)
            world.network.faults.delay_max_s = 0.01
            assert await both_ways(world, handles) == [None] * 16

    run_virtual(main())


def test_a_peer_that_only_dialed_us_is_fetched_from() -> None:
    async def main() -> None:
        async with World(1) as world:
            a, b = world.add_node(), world.add_node()
            a.rendezvous.add_peer(b.address)  # b never hears of a
            handles = [
                await node.rendezvous.owner.register_data_pinned(pattern(200_000))
                for node in (a, b)
            ]
            for node, handle in ((a, handles[1]), (b, handles[0])) * 3:
                data, lease = await node.rendezvous.consumer.get(
                    handle, transport="rdma", timeout=None
                )
                assert data == pattern(200_000)
                await node.rendezvous.consumer.detach(handle, lease)
            assert (sessions(a), sessions(b)) == (1, 1)
            world.network.cut_all()
            await asyncio.sleep(1.0)
            data, lease = await b.rendezvous.consumer.get(handles[0], transport=None, timeout=None)
            await b.rendezvous.consumer.detach(handles[0], lease)
            assert b.count("orbit_sessions_opened_total", direction="out") == 1

    run_virtual(main())


@pytest.mark.parametrize("secret", [None, "shared"])
def test_a_restarted_peer_is_served_at_the_first_try(secret: str | None) -> None:
    async def main() -> None:
        async with World(2) as world:
            config = NodeConfig(secret=secret)
            a, b = world.add_node(config), world.add_node(config)
            world.introduce()
            handles = [
                await node.rendezvous.owner.register_data(PAYLOAD, RETAIN) for node in (a, b)
            ]
            await fetch(a, handles[1])
            world.kill(b)
            identity = PeerIdentity(b.identity.worker_id, Incarnation(99))
            again = world.add_node(config, identity=identity)
            again.address = replace(b.address, incarnation=identity.incarnation)
            await asyncio.sleep(1.0)
            with pytest.raises(PeerRestarted):  # a knows the old life only
                await fetch(a, handles[1])
            again.rendezvous.add_peer(a.address)
            await fetch(again, handles[0])  # the new life dials, and is served
            with pytest.raises(
                UnknownHandle
            ):  # over that session: handles of the old life are gone
                await fetch(a, handles[1])
            handle = await again.rendezvous.owner.register_data(PAYLOAD)
            await fetch(a, handle)
            assert sessions(a) == sessions(again) == 1
            world.network.cut_all()
            await asyncio.sleep(1.0)
            await fetch(a, handle)  # and dials it, though nobody gave it the new address

    run_virtual(main())


def test_a_half_dead_connection_is_replaced_when_the_peer_comes_again() -> None:
    """One end has given it up, and the other never hears of that."""

    async def main() -> None:
        async with World(3) as world:
            a, b = world.add_node(), world.add_node()
            world.introduce()
            handles = [
                await node.rendezvous.owner.register_data(PAYLOAD, RETAIN) for node in (a, b)
            ]
            await fetch(a, handles[1])
            link = a.links[0]
            link._faults = LinkFaults(stalled=True)
            world.network.cut(link)
            await asyncio.sleep(1.0)
            assert (sessions(a), sessions(b)) == (0, 1)
            await fetch(a, handles[1])
            await asyncio.sleep(1.0)
            assert (sessions(a), sessions(b)) == (1, 1)
            await fetch(b, handles[0])

    run_virtual(main())


@pytest.mark.parametrize("seed", range(6))
def test_random_cuts_and_dials_leave_one_session_or_none(seed: int) -> None:
    async def main() -> None:
        async with World(seed, LinkFaults(delay_max_s=0.05)) as world:
            for _ in range(3):
                world.add_node()
            world.introduce()
            handles = [await n.rendezvous.owner.register_data(PAYLOAD, RETAIN) for n in world.nodes]
            random = world.random

            async def use(number: int) -> None:
                for _ in range(12):
                    await asyncio.sleep(random.uniform(0, 0.2))
                    other = random.choice([n for n in range(3) if n != number])
                    try:
                        await fetch(world.nodes[number], handles[other])
                    except InternalError:
                        raise
                    except OrbitError:
                        pass

            async def cut() -> None:
                for _ in range(12):
                    await asyncio.sleep(random.uniform(0, 0.2))
                    if world.network.links:
                        world.network.cut(random.choice(world.network.links))

            await asyncio.gather(*(use(n) for n in (0, 1, 2) for _ in range(2)), cut())
            await asyncio.sleep(5.0)
            for number, node in enumerate(world.nodes):
                for other, handle in enumerate(handles):
                    if other != number:
                        await fetch(node, handle)
            await asyncio.sleep(5.0)
            assert [sessions(node) for node in world.nodes] == [2, 2, 2]

    run_virtual(main())
