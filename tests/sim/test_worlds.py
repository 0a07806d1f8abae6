"""Random worlds: several nodes, faults of every kind, and nothing left at the end.

Several nodes serve payloads from everywhere they may lie (plain memory, pinned copies, regions, in
place, lists of these), with and without a time to live, offer destinations of puts, and fetch into
everything there is, while links are cut, transfers fail, nodes die, registered memory is given back
early and regions are taken away. Memory that is its owner's again is overwritten at once, so a read
that goes on after its end shows as wrong bytes.

One seed is one run; a failing one is named. ORBIT_SOAK (`make soak`) makes it 10,000 seeds.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field

import pytest

from orbit.config import NodeConfig, RendezvousConfig, TimeoutConfig
from orbit.errors import InternalError, OrbitError
from orbit.model import Deregistered, Handle, Lease, PathReason
from orbit.runtime.options import Put, RegisterOptions
from orbit.runtime.region_guards import RegionGuard
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

SEEDS = range(10_000 if os.environ.get("ORBIT_SOAK") == "1" else 100)
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


@dataclass(eq=False)
class Area:
    """A region of one node, and the memory under it."""

    node: WorldNode
    memory: bytearray
    guard: RegionGuard


class Story:
    """What one world goes through. `payloads` says what each handle must answer, `sources` from
    which memory it is served without a copy.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.random: random.Random = world.random
        self.payloads: dict[Handle, bytes] = {}
        self.sources: dict[Handle, bytearray] = {}
        self.areas: list[Area] = []
        self.destinations: dict[Handle, Destination] = {}
        self.background: list[asyncio.Task[None]] = []  # ends with the nodes
        self.completed = 0

    async def populate(self) -> None:
        for _ in range(3):
            node = self.world.add_node(
                CONFIG,
                rdma=self.random.random() < 0.8,
                arena_bytes=self.random.choice((1, 4)) << 20,
                rails=self.random.choice((0, 1, 2)),
            )
            for path in (node.tcp, node.rdma):
                if path is not None:
                    path.faults.bytes_per_s = self.random.choice((1e5, 1e6, 1e8))
        self.world.introduce()
        for node in self.world.nodes:
            for _ in range(4):
                payload = pattern(self.random.choice(SIZES), self.random.randrange(1000))
                pinned = self.random.random() < 0.7
                await (self._serve_copy if pinned else self._serve_held)(node, payload)
            for _ in range(2):
                await self._serve_region(node)
            if node.rdma is not None:
                await self._serve_in_place(node)
            await self._offer(node)

    async def _serve_copy(self, node: WorldNode, payload: bytes) -> None:
        api = node.rendezvous.owner
        self.payloads[await api.register_data_pinned(payload, self._options())] = payload

    async def _serve_held(self, node: WorldNode, payload: bytes) -> None:
        source = bytearray(payload)
        handle = await node.rendezvous.owner.register_data(source, self._options())
        self.payloads[handle], self.sources[handle] = payload, source

    async def _serve_in_place(self, node: WorldNode) -> None:
        payload = pattern(150_000, self.random.randrange(1000))
        source = bytearray(payload)
        handle = await node.rendezvous.owner.register_data_in_place(source, self._options())
        self.payloads[handle], self.sources[handle] = payload, source

    async def _serve_region(self, node: WorldNode) -> None:
        content = pattern(300_000, self.random.randrange(1000))
        memory = bytearray(content)
        guard = await node.rendezvous.regions.register_owned(memory)
        area = Area(node, memory, guard)
        self.areas.append(area)
        self.background.append(asyncio.ensure_future(_overwritten_at_its_end(area)))
        api = node.rendezvous.owner
        start = self.random.randrange(len(content))
        stop = self.random.randrange(start, len(content) + 1)
        handle = await api.register_data_in_region(guard, range(start, stop), self._options())
        self.payloads[handle] = content[start:stop]
        parts = [guard.slice(0, 70_000), content[:100], guard.slice(start, stop - start)]
        handle = await api.register_data(parts, self._options())
        self.payloads[handle] = content[:70_000] + content[:100] + content[start:stop]

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

        self.background.append(asyncio.ensure_future(listen()))

    async def consume(self, node: WorldNode) -> None:
        for _ in range(6):
            await asyncio.sleep(self.random.uniform(0, 0.3))
            try:
                chosen = self.random.random()
                if chosen < 0.25:
                    await self._one_put(node, self.random.choice(list(self.destinations)))
                elif chosen < 0.35:
                    await self._get_many(node)
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

    async def _get_many(self, node: WorldNode) -> None:
        handles = [self.random.choice(list(self.payloads)) for _ in range(3)]
        api = node.rendezvous.consumer
        found = await api.get_many(handles, concurrency=2, transport=None, timeout=None, into=None)
        for handle, (data, lease) in zip(handles, found, strict=True):
            assert data == self.payloads[handle], self._named("wrong bytes of many")
            await api.detach(handle, lease)
        self.completed += 1

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
        if self.random.random() < 0.3:
            return await self._fetch_into_region(node, handle, timeout)
        dest = bytearray(max(SIZES) + 2)
        lease = await node.rendezvous.consumer.get_into(
            handle, memoryview(dest)[1:-1], transport=None, timeout=timeout, progress=None
        )
        expected = b"\0" + self.payloads[handle] + bytes(len(dest) - 1 - lease.nbytes)
        assert dest == expected, self._named("wrong bytes or outside its range")
        return lease

    async def _fetch_into_region(
        self, node: WorldNode, handle: Handle, timeout: float | None
    ) -> Lease:
        memory = bytearray(b"\xee" * (max(SIZES) + 100))
        async with await node.rendezvous.regions.register_owned(memory) as guard:
            parts = [guard.slice(50, 30_000), guard.slice(30_050, max(SIZES) - 30_000)]
            lease = await node.rendezvous.consumer.get_into(
                handle, parts, transport=None, timeout=timeout, progress=None
            )
        expected = b"\xee" * 50 + self.payloads[handle]
        expected += b"\xee" * (len(memory) - len(expected))
        assert memory == expected, self._named("wrong bytes in a region, or outside the range")
        return lease

    async def trouble(self) -> None:
        for _ in range(8):
            await asyncio.sleep(self.random.uniform(0, 0.4))
            node = self.random.choice(self.world.nodes)
            match self.random.randrange(9):
                case 0 | 1 if node.rdma is not None:
                    failure = (self.random.randrange(100_000), self.random.choice(PULL_FAILURES))
                    node.rdma.faults.failures.append(failure)
                case 2 if node.rdma is not None:
                    node.rdma.faults.expose = self.random.choice(EXPOSE_FAILURES)
                case 3 if self.world.network.links:
                    self.world.network.cut(self.random.choice(self.world.network.links))
                case 4:
                    await self._withdraw_one(node)
                case 5 if self.random.random() < 0.3:
                    self.world.kill(node)
                case 6:
                    await node.rendezvous._owner.demote_all()
                case 7 | 8:
                    mine = [area for area in self.areas if area.node is node]
                    timeout = self.random.choice((None, 0, 0.05, 0.5))
                    self.random.choice(mine).guard.unregister(timeout)

    async def _withdraw_one(self, node: WorldNode) -> None:
        handles = [*self.payloads, *self.destinations]
        handle = self.random.choice([h for h in handles if h.worker_id == node.identity.worker_id])
        try:
            await node.rendezvous.owner.withdraw(handle)
        except InternalError:
            raise
        except OrbitError:
            return
        source = self.sources.get(handle)
        if source is not None:
            source[:] = bytes(len(source))
            source.append(0)  # nobody holds its export

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


async def _overwritten_at_its_end(area: Area) -> None:
    assert await area.guard.deregistered() in Deregistered
    area.memory[:] = bytes(len(area.memory))
    area.memory.append(0)  # nobody holds its export


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
        await asyncio.gather(*story.background)
        return story.completed


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    run_virtual(run_story(seed))


def test_the_stories_are_not_empty_and_replay() -> None:
    completed = [run_virtual(run_story(seed)) for seed in range(5)]
    assert sum(completed) > 50
    assert completed == [run_virtual(run_story(seed)) for seed in range(5)]
