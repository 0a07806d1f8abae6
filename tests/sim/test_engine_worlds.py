"""Random worlds of transfer engines: transfers of random geometry against a model, faults of every
kind, and nothing left at the end.

Two or three nodes, regions of all kinds of access, direct and staged, READs and WRITEs by RDMA and
TCP, single ranges and many, with timeouts and cancellations, while rails go down and come back,
arrays and receipts are lost, links are cut, nodes die, budgets are short, regions are taken away
and engines close. Some worlds withhold proofs: what they leave in use must stay out of reach.

One seed is one run; a failing one is named. ORBIT_SOAK (`make soak`) makes it 25 times as many.
"""

from __future__ import annotations

import asyncio
import os
import random
from itertools import pairwise

import pytest

from orbit.config import EngineConfig, NodeConfig, RendezvousConfig, TimeoutConfig
from orbit.errors import ClosedError, DeadlineExceeded, InternalError, OrbitError, Unquiesced
from orbit.model import Handle, PathReason, RegionAccess
from orbit.runtime.options import RegisterOptions
from orbit.testing.clock import run_virtual
from orbit.testing.engine_model import Part
from orbit.testing.engine_world import Area, Ask, EngineNode, EngineWorld
from orbit.testing.faults import LinkFaults
from orbit.testing.pattern import pattern
from orbit.testing.sim_memory import Refusals
from orbit.testing.sim_railed_path import SimRailedPath

SEEDS = range(5000 if os.environ.get("ORBIT_SOAK") == "1" else 200)
SIZES = (1, 17, 4097, 65_535, 65_536, 150_000, 400_000)
ACCESSES = (RegionAccess.READ, RegionAccess.WRITE, RegionAccess.READ_WRITE)
FAILURES = (PathReason.GET_FAILED, PathReason.DECODE_ERROR)
NODE = NodeConfig(
    rendezvous=RendezvousConfig(lease_timeout=2.0), timeouts=TimeoutConfig(call_s=3.0)
)


class Story:
    """What one world goes through."""

    def __init__(self, world: EngineWorld, withholds: bool | None) -> None:
        self.world = world
        self.random: random.Random = world.random
        self.asked = 0
        self.payloads: dict[Handle, bytes] = {}
        self.closed: list[EngineNode] = []
        drawn = self.random.random() < 0.25
        self.withholds = drawn if withholds is None else withholds

    async def populate(self) -> None:
        draw = self.random
        for _ in range(draw.choice((2, 2, 3))):
            config = EngineConfig(
                node=NODE,
                host_memory=draw.choice(("direct", "direct", "staged")),
                block_bytes=draw.choice((1024, 4096, 65_536)),
                max_endpoints=draw.choice((4, 12, 64, 64)),
                max_grants=draw.choice((4, 16, 64)),
                max_direct_bytes=draw.choice((200_000, 64 << 20)),
                max_staging_bytes=draw.choice((200_000, 64 << 20)),
                max_cached_mr_bytes=64 << 20,
            )
            made = self.world.add_engine(config, rails=draw.choice((0, 1) + (2,) * 8))
            for path in (made.node.tcp, made.node.rdma):
                if path is not None:
                    path.faults.bytes_per_s = draw.choice((1e6, 1e7, 1e8))
                    path.faults.chunk_bytes = draw.choice((4096, 65_536))
        self.world.introduce()
        for made in self.world.engines:
            for access in (draw.choice(ACCESSES), RegionAccess.READ_WRITE, RegionAccess.LOCAL):
                sizes = [draw.choice(SIZES) for _ in range(draw.choice((1, 1, 2)))]
                contents = [pattern(size, draw.randrange(1000)) for size in sizes]
                await self.world.place(made, contents, access)
            if made.node.rdma is not None:
                payload = pattern(150_000, draw.randrange(1000))
                options = RegisterOptions(retain=True)
                owner = made.node.rendezvous.owner
                self.payloads[await owner.register_data_pinned(payload, options)] = payload

    async def ask(self, made: EngineNode, rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(self.random.uniform(0, 0.1))
            asks = [self._one(made) for _ in range(self.random.choice((1, 1, 1, 3)))]
            self.asked += len(asks)
            try:
                await self.world.transfer(
                    made,
                    asks,
                    timeout=self.random.choice((None, None, None, 5.0)),
                    cancel_after=self.random.choice((None,) * 8 + (0.0, 0.001, 0.1)),
                )
            except ClosedError:
                assert made in self.closed, self.world.named("nothing can be submitted")
            self._use_cpu(made)
            if self.random.random() < 0.1:
                await self._get(made)

    def _one(self, made: EngineNode) -> Ask:
        draw = self.random
        reached = [
            area
            for other in self.world.engines
            if other is not made
            for area in other.areas
            if area.remote is not None
        ]
        local, remote = draw.choice(made.areas), draw.choice(reached)
        op = draw.choice(("read", "write"))
        if remote.region.access is not RegionAccess.READ_WRITE and draw.random() < 0.9:
            op = remote.region.access.value
        return Ask(
            op,
            local,
            remote,
            self._parts(local, remote),
            transport=draw.choice(("rdma", "rdma", "rdma", "tcp")),
            timeout=draw.choice((None, None, None, None, 0.002, 0.05, 1.0)),
            as_ranges=draw.random() < 0.1,
        )

    def _parts(self, local: Area, remote: Area) -> list[Part]:
        """One range, or some that overlap on neither side."""
        draw = self.random
        room = min(local.model.nbytes, remote.model.nbytes)
        if draw.random() < 0.75:
            nbytes = draw.choice((0, room, draw.randint(0, room), draw.randint(0, room)))
            here = draw.randint(0, local.model.nbytes - nbytes)
            return [(here, draw.randint(0, remote.model.nbytes - nbytes), nbytes)]
        count = min(draw.choice((2, 3, 8, 40)), room)
        cuts = sorted(draw.randint(0, room) for _ in range(count + 1))
        parts = [
            (begin, begin, draw.choice((0, end - begin, (end - begin) // 2)))
            for begin, end in pairwise(cuts)
        ]
        shift = draw.randint(0, remote.model.nbytes - room)
        parts = [(here, far + shift, nbytes) for here, far, nbytes in parts]
        draw.shuffle(parts)
        return parts or [(0, 0, 0)]

    async def _get(self, made: EngineNode) -> None:
        """A payload of another node, over the same arrays."""
        mine = made.node.identity.worker_id
        handles = [handle for handle in self.payloads if handle.worker_id != mine]
        if not handles:
            return
        handle, api = self.random.choice(handles), made.node.rendezvous.consumer
        try:
            data, lease = await api.get(handle, transport=None, timeout=1.0)
            assert data == self.payloads[handle], self.world.named("wrong bytes of a payload")
            await api.detach(handle, lease)
        except InternalError:
            raise
        except OrbitError:
            pass

    def _use_cpu(self, made: EngineNode) -> None:
        area = self.random.choice(made.areas)
        if self.random.random() < 0.3:
            offset = self.random.randrange(area.model.nbytes)
            size = self.random.randint(0, min(5000, area.model.nbytes - offset))
            self.world.write(area, offset, pattern(size, self.random.randrange(1000)))

    async def trouble(self) -> None:
        for turn in range(12):
            await asyncio.sleep(self.random.uniform(0, 0.2))
            made = self.random.choice(self.world.engines)
            if self.withholds and turn < 2:
                self._withhold_somewhere()
            if isinstance(made.node.rdma, SimRailedPath) and self.random.random() < 0.75:
                self._rail_trouble(made.node.rdma)
            else:
                await self._node_trouble(made)

    def _rail_trouble(self, path: SimRailedPath) -> None:
        draw = self.random
        match draw.randrange(12):
            case 0 | 1:
                path.rail_down(draw.randrange(len(path.local)))
            case 2:
                path.lose_arrays()
            case 3:
                path.rail_faults.receipts_lost += draw.choice((1, 3))
            case 4:
                failure = draw.randrange(100_000), draw.choice(FAILURES)
                path.faults.failures.append(failure)
            case 5:
                path.faults.expose = PathReason.WINDOWS_BUSY
            case 6:
                path.rail_faults.connect = PathReason.CONNECT_FAILED
            case 7:
                path.faults.stall_at_bytes = draw.choice((0, 50_000))
            case _:
                path.faults.expose = path.rail_faults.connect = PathReason.OK
                path.faults.stall_at_bytes = None
                for nic in range(len(path.local)):
                    path.rail_up(nic)

    def _withhold_somewhere(self) -> None:
        """From now on something of this world is never proven to be over."""
        self.world.proofs_withheld = True
        for made in self.world.engines:
            if isinstance(made.node.rdma, SimRailedPath):
                self._withhold(made.node.rdma)

    def _withhold(self, path: SimRailedPath) -> None:
        match self.random.randrange(3):
            case 0:
                path.rail_faults.withheld.append(self.random.choice((0, 5000, 50_000)))
            case 1:
                path.rail_faults.retracts_unproven += 1
            case 2:
                path.rail_faults.closes_unproven += 1

    async def _node_trouble(self, made: EngineNode) -> None:
        draw = self.random
        match draw.randrange(9):
            case 0 | 1 if self.world.network.links:
                self.world.network.cut(draw.choice(self.world.network.links))
            case 2 if draw.random() < 0.2:
                self.world.kill(made.node)
            case 3 if len(made.areas) > 2:
                area = draw.choice(made.areas)
                try:
                    await area.region.unregister(draw.choice((None, 0, 0.05)))
                except Unquiesced:
                    assert self.world.proofs_withheld, self.world.named("no end of a region")
            case 4 if draw.random() < 0.2:
                self.closed.append(made)
                await self._close(made)
            case 5:
                made.engine.cancel_all()
            case 8:
                await self._register_more(made)
            case 6:  # answers are late
                faults = self.world.network.faults
                before, faults.delay_max_s = faults.delay_max_s, draw.choice((0.1, 1.0))
                await asyncio.sleep(draw.uniform(0, 0.5))
                faults.delay_max_s = before
            case 7 if draw.random() < 0.3:  # or never come
                self.world.network.faults.stalled = True
                await asyncio.sleep(draw.uniform(0, 2.0))
                self.world.network.faults.stalled = False
                self.world.network.cut_all()

    async def _register_more(self, made: EngineNode) -> None:
        """While devices refuse, perhaps: all of it is there afterwards, or none."""
        memory, before = made.node.memory, _registered(made)
        if memory is not None:
            memory.refusals = Refusals(registrations=self.random.choice((0, 0, 1, 4)))
        contents = [pattern(5000, place) for place in range(3)]
        try:
            await self.world.place(made, contents, RegionAccess.READ_WRITE)
        except InternalError:
            raise
        except OrbitError:
            assert _registered(made) == before, self.world.named("a half of what was asked for")
        if memory is not None:
            memory.refusals = Refusals()

    async def _close(self, made: EngineNode) -> None:
        """In the middle of all: what still runs is waited for, or given up at last."""
        try:
            await made.engine.close(self.random.choice((None, 0.01, 5.0)))
        except DeadlineExceeded:
            made.engine.cancel_all()
        except Unquiesced:
            assert self.world.proofs_withheld


def _registered(made: EngineNode) -> tuple[object, ...]:
    found = made.engine.statistics()
    return found.regions, found.budgets["max_cached_mrs"], found.budgets["max_cached_mr_bytes"]


async def run_story(seed: int, withholds: bool | None = None) -> tuple[int, dict[str, int]]:
    """How many transfers were asked for, and how they ended. `withholds`: whether proofs are, in
    place of what the seed says.
    """
    faults = LinkFaults(delay_max_s=random.Random(seed).choice((0.0005, 0.02)))
    async with EngineWorld(seed, faults) as world:
        story = Story(world, withholds)
        await story.populate()
        asking = [story.ask(made, 8) for made in world.engines for _ in range(2)]
        await asyncio.gather(*asking, story.trouble())
        await world.close()
    return story.asked, {state.value: count for state, count in world.outcomes.items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_bytes_are_right_and_nothing_is_left(seed: int) -> None:
    run_virtual(run_story(seed))


def test_the_stories_are_not_empty_and_replay() -> None:
    """Enough of what is asked for succeeds, and every world does the same again."""
    told = [run_virtual(run_story(seed)) for seed in range(10)]
    asked = sum(count for count, _ in told)
    assert asked * len(SEEDS) >= 10_000 * len(told)
    assert sum(outcomes["succeeded"] for _, outcomes in told) > 0.25 * asked
    assert told == [run_virtual(run_story(seed)) for seed in range(10)]
