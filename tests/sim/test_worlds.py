"""Random worlds: several nodes, faults of every kind, and nothing left at the end.

One seed is one run. `--soak` (see tests/sim/conftest.py) or a longer range repeats it with more
seeds; a failing one names its seed.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from orbit.config import NodeConfig, RendezvousConfig, TimeoutConfig
from orbit.errors import InternalError, OrbitError
from orbit.model import Handle, Lease, PathReason
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.faults import LinkFaults
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

SEEDS = range(24)
SIZES = (0, 1, 4096, 65_535, 65_536, 65_537, 150_000, 400_000)
PULL_FAILURES = (PathReason.GET_FAILED, PathReason.DECODE_ERROR, PathReason.POOL_EXHAUSTED)
EXPOSE_FAILURES = (PathReason.WINDOW_KEYS, PathReason.WINDOWS_BUSY, PathReason.OK, PathReason.OK)
CONFIG = NodeConfig(
    rendezvous=RendezvousConfig(lease_timeout=0.5), timeouts=TimeoutConfig(call_s=3.0)
)


class Story:
    """What one world goes through. `payloads` says what each handle must answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random: random.Random = world.random
        self.payloads: dict[Handle, bytes] = {}
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
                options = RegisterOptions(retain=self.random.random() < 0.5)
                pinned = self.random.random() < 0.7
                api = node.rendezvous
                register = api.register_data_pinned if pinned else api.register_data
                self.payloads[await register(payload, options)] = payload

    async def consume(self, node: WorldNode) -> None:
        for _ in range(6):
            handle = self.random.choice(list(self.payloads))
            await asyncio.sleep(self.random.uniform(0, 0.3))
            try:
                await self._one_get(node, handle)
            except InternalError:
                raise
            except OrbitError:
                pass  # faults are about; what matters is what is left afterwards

    async def _one_get(self, node: WorldNode, handle: Handle) -> None:
        timeout = self.random.choice((None, None, 0.01, 0.5))
        work = asyncio.ensure_future(self._fetch(node, handle, timeout))
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.uniform(0, 0.5))
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)
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

    async def _fetch(self, node: WorldNode, handle: Handle, timeout: float | None) -> Lease:
        if self.random.random() < 0.5:
            data, lease = await node.rendezvous.consumer.get(
                handle, transport=None, timeout=timeout
            )
            assert data == self.payloads[handle], f"seed {self.world.network.seed}: wrong bytes"
            return lease
        dest = bytearray(max(SIZES) + 2)
        lease = await node.rendezvous.consumer.get_into(
            handle, memoryview(dest)[1:-1], transport=None, timeout=timeout, progress=None
        )
        expected = b"\0" + self.payloads[handle] + bytes(len(dest) - 1 - lease.nbytes)
        assert dest == expected, f"seed {self.world.network.seed}: wrong bytes or outside its range"
        return lease

    async def trouble(self) -> None:
        for _ in range(8):
            await asyncio.sleep(self.random.uniform(0, 0.4))
            node = self.random.choice(self.world.nodes)
            match self.random.randrange(6):
                case 0 | 1 if node.rdma is not None:
                    failure = (self.random.randrange(100_000), self.random.choice(PULL_FAILURES))
                    node.rdma.faults.failures.append(failure)
                case 2 if node.rdma is not None:
                    node.rdma.faults.expose = self.random.choice(EXPOSE_FAILURES)
                case 3 if self.world.network.links:
                    self.world.network.cut(self.random.choice(self.world.network.links))
                case 4:
                    mine = [h for h in self.payloads if h.worker_id == node.identity.worker_id]
                    try:
                        await node.rendezvous.owner.withdraw(self.random.choice(mine))
                    except InternalError:
                        raise
                    except OrbitError:
                        pass
                case 5 if self.random.random() < 0.3:
                    self.world.kill(node)


async def run_story(seed: int) -> int:
    faults = LinkFaults(delay_max_s=random.Random(seed).choice((0.0005, 0.02)))
    async with World(seed, faults) as world:
        story = Story(world)
        await story.populate()
        await asyncio.gather(
            *(story.consume(node) for node in world.nodes for _ in range(3)), story.trouble()
        )
        return story.completed


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    run_virtual(run_story(seed))


def test_the_stories_are_not_empty_and_replay() -> None:
    completed = [run_virtual(run_story(seed)) for seed in range(5)]
    assert sum(completed) > 50
    assert completed == [run_virtual(run_story(seed)) for seed in range(5)]
