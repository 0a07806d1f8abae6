"""Random conversations that part and meet again: no frame is lost, doubled or reordered.

Both ends send, consume late, ping and say goodbye at any moment, over wires with seeded delays; a
link that was closed by agreement is followed by a fresh one, which takes what was given back.
ORBIT_SOAK (`make soak`) runs 10,000 seeds; a failing one names itself.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from orbit.errors import OrbitError
from orbit.model import PathName
from orbit.protocol.messaging.credits import Windows
from orbit.protocol.messaging.packets import PacketKind
from orbit.testing.clock import run_virtual
from orbit.testing.message_link_rig import LinkEnd, Received, Sent
from orbit.testing.packet_network import SimPacketNetwork, WireFaults
from orbit.testing.waiting import until
from orbit.transport.message_link import LinkTerms, PacketLink
from orbit.transport.messages import LinkLimits
from tests.soak import SOAK

BATCH = 100
BATCHES = range(100 if SOAK else 3)
KINDS = (PacketKind.MESSAGE, PacketKind.MESSAGE, PacketKind.EVENT)


class Conversation:
    """Two ends over one link after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        faults = WireFaults(
            delay_max_s=self.random.choice((0.0001, 0.002)),
            pass_packets_max=self.random.choice((1, 4, 16)),
            room=self.random.choice((1, 3, 1000)),
        )
        self.network = SimPacketNetwork(seed, faults)
        window = self.random.choice((1, 2, 8))
        self.limits = LinkLimits(
            windows=Windows(window, max(window // 4, 1)),
            slab_bytes=64,
            ceiling_bytes=300,
            inbound_bytes_max=2000,
        )
        self.ends = self.meet([], [])
        self.heard: tuple[list[Received], list[Received]] = ([], [])  # by ends that are no more
        self.agreed = 0
        self.count = [0, 0]

    def meet(self, *left_over: list[Sent]) -> tuple[LinkEnd, LinkEnd]:
        """A fresh link; what the last one gave back goes first."""
        ends = LinkEnd(self.limits), LinkEnd(self.limits)
        slabs = self.limits.windows.slabs
        wires = self.network.wire_pair(self.limits.slab_bytes, slabs, slabs)
        terms = LinkTerms.between(PathName.RDMA, "the other end", self.limits, self.limits)
        for end, wire in zip(ends, wires, strict=True):
            end.link = PacketLink(wire, end, terms)
            end.consume = False
        for end, frames in zip(ends, left_over, strict=True):
            for frame in frames:
                end.send(frame.payload, kind=frame.kind)
        return ends

    async def run(self) -> None:
        for _ in range(self.random.randint(5, 40)):
            await self.act(self.random.randrange(2))
            if self.random.random() < 0.6:
                await asyncio.sleep(self.random.choice((0, 0, 0.00005, 0.0003, 0.005)))
            await self.follow()
        await self.settle()

    async def act(self, side: int) -> None:
        end, link = self.ends[side], self.ends[side].link
        match self.random.randrange(6):
            case 0 | 1:
                for _ in range(self.random.randint(1, 4)):
                    number = b"%d " % self.count[side]
                    self.count[side] += 1
                    payload = number * self.random.choice((1, 1, 5, 60 // len(number) * 4))
                    end.send(payload[:300], kind=self.random.choice(KINDS))
            case 2:
                self.consume(end)
            case 3:
                task = asyncio.ensure_future(link.ping(1.0))
                task.add_done_callback(_only_typed_errors)
            case _:
                timeout_s = self.random.choice((0.0001, 0.001, 0.1))
                self.agreed += await link.goodbye(timeout_s)

    def consume(self, end: LinkEnd) -> None:
        if end.link.closed:
            return
        charges, end.charges = end.charges, []
        for charge in charges:
            end.link.consumed(charge)

    async def follow(self) -> None:
        """When one end was closed by agreement, the other one follows: then they meet again."""
        if not any(end.link.closed for end in self.ends):
            return
        for side in (0, 1):
            assert await self.ends[side].wait_lost() is None
            self.heard[side].extend(self.ends[side].frames)
        left_over = []
        for end in self.ends:
            assert all(f.outcome in (["done"], ["given back"]) for f in end.sent)
            left_over.append([f for f in end.sent if f.outcome == ["given back"]])
        self.ends = self.meet(*left_over)

    async def settle(self) -> None:
        """Consume until everything has arrived; then the last goodbye must be agreed to."""
        for _ in range(10_000):
            for end in self.ends:
                self.consume(end)
            await asyncio.sleep(0.001)
            await self.follow()
            if all(len(self.total(side)) == self.count[1 - side] for side in (0, 1)):
                break
        for end in self.ends:
            self.consume(end)
        await until(lambda: all(f.settled for end in self.ends for f in end.sent))
        for side in (0, 1):
            self.check_order(side)
        assert await self.ends[0].link.goodbye(5.0)
        assert await self.ends[1].wait_lost() is None

    def total(self, side: int) -> list[Received]:
        return self.heard[side] + self.ends[side].frames

    def check_order(self, side: int) -> None:
        by_kind: dict[int, list[int]] = {kind: [] for kind in KINDS}
        for kind, _, payload in self.total(side):
            by_kind[kind].append(int(payload.split()[0]))
        for numbers in by_kind.values():
            assert numbers == sorted(numbers), "reordered"
        heard = sorted(number for numbers in by_kind.values() for number in numbers)
        assert heard == list(range(self.count[1 - side])), "lost or doubled"


def _only_typed_errors(task: asyncio.Future[float]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        assert isinstance(error, OrbitError), error


@pytest.mark.parametrize("batch", BATCHES)
def test_nothing_is_lost_where_links_part_and_meet(batch: int) -> None:
    agreed = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:

            async def converse(seed: int = seed) -> int:
                conversation = Conversation(seed)
                await conversation.run()
                return conversation.agreed

            agreed += run_virtual(converse())
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert agreed > 0
