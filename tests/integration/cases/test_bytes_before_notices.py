"""C50 with scripted devices: a transfer is over for its caller only when the bytes of every rail
are there, in whatever order completions come; and each receipt that is on its way has a buffer of
its own, which nobody writes before it has left.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.protocol.binding import BINDING_BYTES
from orbit.verbs import records
from orbit.verbs.queue_pair import BulkQueuePair
from orbit.verbs.records import Completion
from orbit.verbs.scripted_fabric import ANY_OPCODE
from orbit.verbs.status import REM_ACCESS_ERR
from orbit.verbs.turn import PostResult, Turn
from tests.integration.cases.fake_hosts import FakeHost, HostPair
from tests.soak import SOAK

Run = Callable[[Any], Any]
AT_ONCE = 64
PART = 96 << 10  # two slices, so one for each rail
ROUNDS = 200 if SOAK else 4
OPS = ["read", "write"]


def two_rails(hosts: list[FakeHost]) -> None:
    for host in hosts:
        host.add(f"more{host.number}")


def without_inline(hosts: list[FakeHost]) -> None:
    two_rails(hosts)
    for host in hosts:
        for device in host.devices.values():
            device.facts.inline_max = 0


def devices(pair: HostPair) -> list[Any]:
    return [device for host in pair.hosts for device in host.devices.values()]


def fill(pair: HostPair, chance: random.Random) -> None:
    """Other bytes everywhere, on both sides."""
    for memory in pair.memory:
        memory[:] = chance.randbytes(len(memory))


def equal(pair: HostPair, part: int) -> bool:
    far, near = pair.memory
    return far[part * PART : (part + 1) * PART] == near[part * PART : (part + 1) * PART]


async def at_once(pair: HostPair, op: str) -> None:
    """All parts by requests of their own; whoever hears of one finds its bytes in place."""
    requests = [pair.request(op, n * PART, (n + 1) * PART) for n in range(AT_ONCE)]
    batches = [pair.engines[1].submit(request) for request in requests]

    async def check(part: int, batch: orbit.Batch) -> None:
        (result,) = await batch
        assert equal(pair, part), f"told of part {part} before its bytes were there"
        assert result.nbytes == PART

    async with asyncio.TaskGroup() as group:
        for part, batch in enumerate(batches):
            group.create_task(check(part, batch))


async def reconnect(pair: HostPair, op: str) -> None:
    """Every queue pair of that direction is lost, and made anew."""
    kind = records.READ if op == "read" else records.WRITE
    for device in pair.hosts[1].devices.values():
        device.fail(kind, REM_ACCESS_ERR, count=8)
    batch = pair.engines[1].submit(pair.request(op))
    assert await batch.wait(20.0)
    (result,) = batch.results()
    assert result.state is orbit.TransferState.FAILED
    for device in pair.hosts[1].devices.values():
        device.clear_rules()
    for _ in range(100):
        if (await _outcome(pair, op)).error is None:
            return
        await asyncio.sleep(0.02)  # the back-off after a failure
    raise AssertionError("it never works again")


async def _outcome(pair: HostPair, op: str) -> orbit.TransferResult:
    batch = pair.engines[1].submit(pair.request(op, 0, PART))
    assert await batch.wait(20.0)
    return batch.results()[0]


@pytest.mark.parametrize("op", OPS)
def test_completions_in_any_order(run_async: Run, tmp_path: Path, op: str) -> None:
    """Each device gives them by its own moods; within one they come in the order of the queue."""

    async def main() -> None:
        chance = random.Random(op)
        async with HostPair.opened(tmp_path, two_rails, nbytes=AT_ONCE * PART) as pair:
            await pair.move(op)
            for number in range(ROUNDS):
                fill(pair, chance)
                for device in devices(pair):
                    device.hold(ANY_OPCODE)
                moving = asyncio.ensure_future(at_once(pair, op))
                while not moving.done():
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                    chance.choice(devices(pair)).release()
                await moving
                for device in devices(pair):
                    device.clear_rules()
                    device.release()
                if number % 2:
                    await reconnect(pair, op)

    run_async(main())


@pytest.mark.parametrize("op", OPS)
def test_one_rail_that_is_late_is_waited_for(run_async: Run, tmp_path: Path, op: str) -> None:
    async def main() -> None:
        async with HostPair.opened(tmp_path, two_rails, nbytes=AT_ONCE * PART) as pair:
            await pair.move(op)
            for late in devices(pair):
                fill(pair, random.Random(late.name))
                late.hold(ANY_OPCODE)
                batch = pair.engines[1].submit(pair.request(op))
                assert not await batch.wait(0.2)
                late.clear_rules()
                late.release()
                (result,) = await batch
                assert len(result.rails) == 2
                assert pair.memory[0] == pair.memory[1]

    run_async(main())


class Receipts:
    """Those that are on their way, by queue pair and work request."""

    def __init__(self, patch: pytest.MonkeyPatch, *, poison: bool) -> None:
        self.buffers: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.inline = self.from_memory = self.at_once_max = 0
        post_send, completed = Turn.post_send, BulkQueuePair._completed

        def post(turn: Turn, qp: int, requests: Sequence[bytes]) -> PostResult:
            sends = [f for f in map(records.WR.unpack, requests) if f[8] == records.SEND_WITH_INV]
            for fields in sends:
                wr_id, address, flags = fields[0], fields[1], fields[9]
                if flags & records.INLINE:
                    self.inline += 1
                    continue
                self.from_memory += 1
                taken = {at for at, _ in self.buffers.values()}
                assert address not in taken, "two receipts of one buffer"
                content = ctypes.string_at(address, BINDING_BYTES)
                self.buffers[wr_id, qp] = address, content
                self.at_once_max = max(self.at_once_max, len(self.buffers))
            result = post_send(turn, qp, requests)
            for fields in sends if poison else ():
                if fields[9] & records.INLINE:
                    ctypes.memset(fields[1], 0xEE, BINDING_BYTES)
            return result

        def complete(queue_pair: BulkQueuePair, completion: Completion) -> None:
            kept = self.buffers.pop((completion.wr_id, queue_pair.native), None)
            if kept is not None:
                assert ctypes.string_at(kept[0], BINDING_BYTES) == kept[1], "written too early"
            completed(queue_pair, completion)

        patch.setattr(Turn, "post_send", post)
        patch.setattr(BulkQueuePair, "_completed", complete)


@pytest.mark.parametrize("op", OPS)
def test_a_receipt_that_left_inline_needs_no_buffer(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    async def main() -> None:
        receipts = Receipts(monkeypatch, poison=True)
        async with HostPair.opened(tmp_path, two_rails, nbytes=AT_ONCE * PART) as pair:
            for seed in range(3):
                fill(pair, random.Random(seed))
                await at_once(pair, op)
                await reconnect(pair, op)
        assert receipts.inline > 3 * AT_ONCE
        assert not receipts.from_memory

    run_async(main())


@pytest.mark.parametrize("op", OPS)
def test_a_receipt_that_is_on_its_way_keeps_its_buffer(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    async def main() -> None:
        chance = random.Random(op)
        receipts = Receipts(monkeypatch, poison=True)
        async with HostPair.opened(tmp_path, without_inline, nbytes=AT_ONCE * PART) as pair:
            for _ in range(3):
                fill(pair, chance)
                for device in pair.hosts[1].devices.values():
                    device.hold(records.SEND_WITH_INV)
                moving = asyncio.ensure_future(at_once(pair, op))
                while not moving.done():
                    await asyncio.sleep(0.001)
                    for device in pair.hosts[1].devices.values():
                        device.release()
                await moving
                for device in pair.hosts[1].devices.values():
                    device.clear_rules()
                    device.release()
                await reconnect(pair, op)
        assert receipts.from_memory > 3 * AT_ONCE
        assert receipts.at_once_max > 1
        assert not receipts.inline

    run_async(main())
