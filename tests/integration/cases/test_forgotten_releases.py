"""C20: whoever calls without an await, raises in between or forgets a thing altogether leaves a
node as it was. ORBIT_SOAK (`make soak`) makes the counts the case's own.

Regions on the real pool are test_regions_scripted_rdma.py's; the warning that names where a guard
was made is tests/unit/runtime/test_regions.py's too.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import orbit
import orbit.sync
from orbit.model import Incarnation, SlotId, WorkerId
from orbit.protocol.address import NodeAddress
from orbit.protocol.endpoint import Endpoint
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.integration.messages.settled import SOAK, TCP

Run = Callable[[Coroutine[Any, Any, None]], None]
COUNT = 10_000 if SOAK else 500
WITHIN_S = 10.0 if SOAK else 5.0


def empty(node: orbit.Node) -> bool:
    found = node.statistics()
    slots = found.slots
    return (slots.slots, slots.leases_held, found.leases_held, found.memory.regions) == (0,) * 4


async def fail_within(guard: orbit.RegionGuard) -> None:
    async with guard:
        raise ZeroDivisionError


def test_regions_and_payloads(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            buffers = []
            for number in range(COUNT):
                buffers.append(bytearray(1000))
                match number % 5:
                    case 0:
                        guard = await owner.register_owned(buffers[-1])
                        guard.unregister()
                    case 1:
                        handle = await owner.register_data(buffers[-1])
                        owner.withdraw(handle)
                    case 2:
                        handle = await owner.register_data(buffers[-1])
                        _, lease = await consumer.get(handle)
                        consumer.release(handle, lease)
                    case 3:
                        guard = await owner.register_owned(buffers[-1])
                        handle = await owner.register_data_in_region(guard)
                        _, lease = await consumer.get(handle)
                        consumer.detach(handle, lease)
                        guard.unregister()
                        owner.withdraw(handle)
                    case 4:
                        with pytest.raises(ZeroDivisionError):
                            await fail_within(await owner.register_owned(buffers[-1]))
            await until(lambda: empty(owner) and empty(consumer), WITHIN_S)
            for buffer in buffers:
                buffer.append(0)  # nobody holds its export

    run_async(main())


def test_a_guard_that_was_forgotten_names_its_maker() -> None:
    with orbit.sync.Node(TCP) as owner:
        buffer = bytearray(1000)
        held = [owner.register_owned(buffer)]
        watch = held[0].watch()
        with pytest.warns(ResourceWarning, match=r"test_forgotten_releases\.py"):
            held.clear()
        assert watch.deregistered() is orbit.Deregistered.DRAINED
        buffer.append(0)


def test_a_blocking_node_has_nothing_to_forget() -> None:
    with orbit.sync.Node(TCP) as owner, orbit.sync.Node(TCP) as consumer:
        consumer.add_peer(owner.address)
        buffers = [bytearray(pattern(1000)) for _ in range(COUNT // 10)]
        for buffer in buffers:
            handle = owner.register_data(buffer)
            data, lease = consumer.get(handle)
            assert data == pattern(1000)
            consumer.release(handle, lease)
        assert owner.statistics().slots.slots == 0
        for buffer in buffers:
            buffer.append(0)


def test_transfers_to_a_port_that_refuses(run_async: Run) -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and never listens
            nowhere = Endpoint("127.0.0.1", taken.getsockname()[1])
            async with nothing_left(), orbit.Node(TCP) as consumer:
                peer = consumer.add_peer(NodeAddress(WorkerId(77), Incarnation(1), (nowhere,)))
                handle = orbit.Handle(peer.worker_id, SlotId(1))
                dest, source = bytearray(1000), bytearray(1000)
                at_a_time = asyncio.Semaphore(50)

                def transfer(number: int) -> Coroutine[Any, Any, object]:
                    match number % 3:
                        case 0:
                            return consumer.get(handle)
                        case 1:
                            return consumer.get_into(handle, dest)
                        case _:
                            return consumer.put(handle, source)

                async def attempt(number: int) -> None:
                    async with at_a_time:
                        with pytest.raises(orbit.PeerUnreachable):
                            await transfer(number)

                await asyncio.gather(*map(attempt, range(COUNT)))
                gc.collect()
                dest.append(0)  # nobody holds their exports
                source.append(0)
                await until(lambda: empty(consumer) and not consumer.statistics().tasks)

    run_async(main())
