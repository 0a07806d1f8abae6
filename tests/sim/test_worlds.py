"""Random worlds: several nodes, faults of every kind, and nothing left at the end.

One seed is one run. A longer range repeats it with more seeds; a failing one names its seed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from orbit.config import NodeConfig, RendezvousConfig, TimeoutConfig
from orbit.errors import InternalError, OrbitError
from orbit.model import Handle, Lease, PathReason
from orbit.runtime.options import Put, RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

SEEDS = range(24)
SIZES = (0, 1, 4096, 65_535, 65_536, 65_537, 150_000, 400_000)
PULL_FAILURES = (PathReason.GET_FAILED, PathReason.DECODE_ERROR, PathReason.POOL_EXHAUSTED)
EXPOSE_FAILURES = (PathReason.WINDOW_KEYS, PathReason.WINDOWS_BUSY, PathReason.OK, PathReason.OK)
LEASE_S = 0.5
CONFIG = NodeConfig(
    rendezvous=RendezvousConfig(lease_timeout=LEASE_S), timeouts=TimeoutConfig(call_s=3.0)
)


@dataclass
class Destination:
    """A buffer that one node offers, the puts that its writers and its owner know of, and the lock
    that keeps a writer out while another one looks.
    """

    memory: bytearray
    written: list[tuple[int, int]] = field(default_factory=list)
    reported: list[Put] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Story:
    """What one world goes through. `payloads` says what each handle must answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random: random.Random = world.random
        self.payloads: dict[Handle, bytes] = {}
        self.destinations: dict[Handle, Destination] = {}
        self.listening: list[asyncio.Task[None]] = []
        self.completed = 0

    async def populate(self) -> None:
        for _ in range(3):
            node = self.world.add_node(
                CONFIG,
                rdma=self.random.random() < 0.8,
                arena_bytes=self.random.choice((1, 4)) << 20,
            )
            for path in (node.tcp, node.rdma):
                if path is not None:
                    path.faults.bytes_per_s = self.random.choice((1e5, 1e6, 1e8))
        self.world.introduce()
        for node in self.world.nodes:
            for _ in range(4):
                payload = pattern(self.random.choice(SIZES), self.random.randrange(1000))
                pinned = self.random.random() < 0.7
                api = node.rendezvous.owner
                register = api.register_data_pinned if pinned else api.register_data
                self.payloads[await register(payload, self._options())] = payload
            await self._offer(node)

    def _options(self) -> RegisterOptions:
        ttl = self.random.uniform(0.1, 3.0) if self.random.random() < 0.2 else None
        return RegisterOptions(retain=self.random.random() < 0.5, ttl=ttl)

    async def _offer(self, node: WorldNode) -> None:
        memory = bytearray(200_000)
        handle = await node.rendezvous.owner.register_destination(memory, self._options())
        destination = self.destinations[handle] = Destination(memory)

        async def listen() -> None:
            try:
                while True:
                    put = await node.rendezvous.owner.wait_put(handle, None)
                    destination.reported.append(put)
            except InternalError:
                raise
            except OrbitError:
                pass  # the slot or the node is gone

        self.listening.append(asyncio.ensure_future(listen()))

    async def consume(self, node: WorldNode) -> None:
        for _ in range(6):
            await asyncio.sleep(self.random.uniform(0, 0.3))
            try:
                if self.random.random() < 0.25:
                    await self._one_put(node, self.random.choice(list(self.destinations)))
                else:
                    await self._one_get(node, self.random.choice(list(self.payloads)))
            except InternalError:
                raise
            except OrbitError:
                pass  # faults are about; what matters is what is left afterwards

    async def _one_get(self, node: WorldNode, handle: Handle) -> None:
        timeout = self.random.choice((None, None, 0.01, 0.5))
        work = asyncio.ensure_future(self._fetch(node, handle, timeout))
        await self._perhaps_cancel(work)
        if work.cancelled():
            return
        lease = work.result()
        self.completed += 1
        if self.random.random() < 0.3:
            await asyncio.sleep(self.random.uniform(0, 1.0))  # past the lease's deadline, perhaps
        if self.random.random() < 0.5:
            await node.rendezvous.consumer.release(handle, lease)
        elif self.random.random() < 0.8:
            await node.rendezvous.consumer.detach(handle, lease)

    async def _one_put(self, node: WorldNode, handle: Handle) -> None:
        destination = self.destinations[handle]
        offset = self.random.randrange(len(destination.memory))
        nbytes = self.random.randrange(len(destination.memory) - offset + 1)
        source = pattern(nbytes, self.random.randrange(1000))
        timeout = self.random.choice((None, None, 0.01, 0.5))
        async with destination.turn:
            work = asyncio.ensure_future(
                node.rendezvous.consumer.put(
                    handle, source, offset=offset, transport=None, timeout=timeout, progress=None
                )
            )
            await self._perhaps_cancel(work)
            if work.cancelled():
                return
            put = work.result()
            assert (put.offset, put.nbytes) == (offset, nbytes)
            assert destination.memory[offset : offset + nbytes] == source, self._named(
                "wrong bytes"
            )
            destination.written.append((offset, nbytes))
            self.completed += 1

    async def _perhaps_cancel(self, work: asyncio.Future[object]) -> None:
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.uniform(0, 0.5))
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _fetch(self, node: WorldNode, handle: Handle, timeout: float | None) -> Lease:
        if self.random.random() < 0.5:
            data, lease = await node.rendezvous.consumer.get(
                handle, transport=None, timeout=timeout
            )
            assert data == self.payloads[handle], self._named("wrong bytes")
            return lease
        dest = bytearray(max(SIZES) + 2)
        lease = await node.rendezvous.consumer.get_into(
            handle, memoryview(dest)[1:-1], transport=None, timeout=timeout, progress=None
        )
        expected = b"\0" + self.payloads[handle] + bytes(len(dest) - 1 - lease.nbytes)
        assert dest == expected, self._named("wrong bytes or outside its range")
        return lease

    async def trouble(self) -> None:
        for _ in range(8):
            await asyncio.sleep(self.random.uniform(0, 0.4))
            node = self.random.choice(self.world.nodes)
            match self.random.randrange(7):
                case 0 | 1 if node.rdma is not None:
                    failure = (self.random.randrange(100_000), self.random.choice(PULL_FAILURES))
                    node.rdma.faults.failures.append(failure)
                case 2 if node.rdma is not None:
                    node.rdma.faults.expose = self.random.choice(EXPOSE_FAILURES)
                case 3 if self.world.network.links:
                    self.world.network.cut(self.random.choice(self.world.network.links))
                case 4:
                    handles = [*self.payloads, *self.destinations]
                    mine = [h for h in handles if h.worker_id == node.identity.worker_id]
                    try:
                        await node.rendezvous.owner.withdraw(self.random.choice(mine))
                    except InternalError:
                        raise
                    except OrbitError:
                        pass
                case 5 if self.random.random() < 0.3:
                    self.world.kill(node)
                case 6:
                    await node.rendezvous._owner.demote_all()

    async def settle(self) -> None:
        """Everybody falls silent: what consumers never gave back ends by its deadline."""
        await asyncio.sleep(3 * LEASE_S)
        for node in self.world.nodes:
            found = node.rendezvous.statistics().slots
            assert found.leases_armed == 0, self._named(f"leases outlive their deadline: {found}")
            assert found.ttl_armed == 0 or found.slots, self._named(f"an idle timer: {found}")
        for destination in self.destinations.values():
            seen = [(put.offset, put.nbytes) for put in destination.reported]
            for written in destination.written:
                assert written in seen, self._named(f"a put was not reported: {written}")
                seen.remove(written)

    def _named(self, text: str) -> str:
        return f"seed {self.world.network.seed}: {text}"


async def run_story(seed: int) -> int:
    faults = LinkFaults(delay_max_s=random.Random(seed).choice((0.0005, 0.02)))
    async with World(seed, faults) as world:
        story = Story(world)
        await story.populate()
        await asyncio.gather(
            *(story.consume(node) for node in world.nodes for _ in range(3)), story.trouble()
        )
        await story.settle()
        await world.close()
        await asyncio.gather(*story.listening)
        return story.completed


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    run_virtual(run_story(seed))


def test_the_stories_are_not_empty_and_replay() -> None:
    completed = [run_virtual(run_story(seed)) for seed in range(5)]
    assert sum(completed) > 50
    assert completed == [run_virtual(run_story(seed)) for seed in range(5)]
