"""C29 through the handle API: lengths and offsets that need more than 31 or 32 bits. Memory that
nobody touches costs nothing, so the edges of huge mappings are moved, and named, for free.

Gigabytes that move in one piece are ORBIT_SOAK's (`make soak`); the data paths alone are in
test_tcp_sizes.py and tests/unit/verbs/test_sizes.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.integration.messages.settled import SOAK, TCP

Run = Callable[[Coroutine[Any, Any, None]], None]
GIB = 1 << 30
EDGES = ((1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1)
HUGE_BYTES = 5 * GIB + 1
BEYOND = ((1 << 40) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 65)
SOAK_BYTES = (5 << 29) + 1  # 2.5 GiB and a byte
_MAP_NORESERVE = 0x4000


def untouched(nbytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        pytest.skip(f"this host maps no {nbytes} bytes: {error}")


def test_ranges_at_the_edges(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            memory = untouched(HUGE_BYTES)
            to = await owner.register_destination(memory)
            assert (await consumer.metadata(to)).total_bytes == HUGE_BYTES
            for number, edge in enumerate((*EDGES, HUGE_BYTES - 50)):
                for size in (100, 70_000):
                    nbytes, start = min(size, HUGE_BYTES - edge + 50), edge - 50
                    source = pattern(nbytes, number)
                    put = await consumer.put(to, source, offset=start)
                    assert (put.offset, put.nbytes) == (start, nbytes)
                    assert memory[start : start + nbytes] == source
                    assert (await owner.wait_put(to, timeout=10)).offset == start
            with pytest.raises(orbit.OutOfRange):
                await consumer.put(to, b"12", offset=HUGE_BYTES - 1)
            await owner.withdraw(to)
            async with await owner.register_owned(memory) as guard:
                for edge in (*EDGES, HUGE_BYTES - 50):
                    where = range(edge - 50, min(edge + 70_000, HUGE_BYTES))
                    handle = await owner.register_data_in_region(guard, where)
                    data, lease = await consumer.get(handle)
                    assert data == memory[where.start : where.stop]
                    await consumer.release(handle, lease)
                handle = await owner.register_data(
                    [guard.slice(edge, 3) for edge in EDGES] + [guard.slice(HUGE_BYTES - 1)]
                )
                data, lease = await consumer.get(handle)
                expected = b"".join(memory[edge : edge + 3] for edge in EDGES)
                assert data == expected + memory[HUGE_BYTES - 1 :]
                await consumer.release(handle, lease)
            memory.close()

    run_async(main())


@pytest.mark.parametrize("start", BEYOND)
def test_what_lies_beyond_is_refused_and_does_not_wrap(run_async: Run, start: int) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            memory = bytearray(100)
            to = await owner.register_destination(memory)
            for nbytes in (0, 1, 100):
                with pytest.raises(orbit.OutOfRange):
                    await consumer.put(to, bytes(nbytes), offset=start)
            async with await owner.register_owned(bytearray(100)) as guard:
                for where in (range(start, start), range(start, start + 5), range(5, start)):
                    with pytest.raises(orbit.OutOfRange):
                        await owner.register_data_in_region(guard, where)
                for nbytes in (0, 5, start):
                    with pytest.raises(orbit.OutOfRange):
                        guard.slice(start, nbytes)
            assert not any(memory)

    run_async(main())


def test_a_terabyte_is_named_and_not_allocated(run_async: Run) -> None:
    nbytes = 1 << 40

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            handle = await owner.register_data(untouched(nbytes))
            found = await consumer.metadata(handle)
            assert found == orbit.Metadata(nbytes, 1, False)
            assert owner.statistics().slots.staged_bytes == nbytes
            with pytest.raises(orbit.OrbitError) as refused:
                await consumer.get_into(handle, bytearray(100))
            assert str(nbytes) in str(refused.value)
            await until(lambda: not owner.statistics().slots.leases_held)
            await owner.withdraw(handle)
        config = orbit.RendezvousConfig(payload_max_bytes=nbytes - 1)
        cautious = orbit.NodeConfig(transport="tcp", rendezvous=config)
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(cautious) as consumer:
            consumer.add_peer(owner.address)
            handle = await owner.register_data(untouched(nbytes))
            with pytest.raises(orbit.BudgetExceeded):
                await consumer.get(handle)
            await until(lambda: not owner.statistics().slots.leases_held)

    run_async(main())


@pytest.mark.skipif(not SOAK, reason="5 GiB of memory and most of a minute: `make soak`")
@pytest.mark.parametrize("how", ["get_into", "put"])
def test_two_and_a_half_gib(run_async: Run, how: str) -> None:
    marks = {at: bytes([n]) for n, at in enumerate((0, *EDGES[:3], SOAK_BYTES - 1), 1)}

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            source, target = untouched(SOAK_BYTES), untouched(SOAK_BYTES)
            for at, mark in marks.items():
                source[at : at + 1] = mark
            if how == "get_into":
                handle = await owner.register_data(source)
                lease = await consumer.get_into(handle, target)
                assert lease.nbytes == SOAK_BYTES
                await consumer.release(handle, lease)
            else:
                handle = await owner.register_destination(target)
                put = await consumer.put(handle, source)
                assert put.nbytes == SOAK_BYTES
                await owner.withdraw(handle)
            assert {at: target[at : at + 1] for at in marks} == marks
            assert [target.find(mark) for mark in marks.values()] == list(marks)
            source.close()
            target.close()

    run_async(main())
