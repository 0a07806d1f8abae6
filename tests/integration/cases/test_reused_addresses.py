"""C30 over TCP: memory that was freed comes back at the same address, to other sizes and contents.

Over RDMA, where keys matter, it is tests/scenarios/memory_cases.py's.
"""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.memory.buffer import address_of
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from tests.integration.messages.settled import SOAK, TCP

Run = Callable[[Coroutine[Any, Any, None]], None]
ROUNDS = 1000 if SOAK else 200
NBYTES = 1 << 20


def test_the_allocator_gives_the_same_memory_again(run_async: Run) -> None:
    """Every third owner says nothing at the end: its consumer's release is what ends the slot."""

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            chance = random.Random(30)
            addresses: set[int] = set()
            seen: list[weakref.ref[Any]] = []
            for number in range(ROUNDS):
                nbytes, fill = chance.randint(1, 65_536), number % 251
                array = np.full(nbytes, fill, "u1")
                addresses.add(array.ctypes.data)
                seen.append(weakref.ref(array))
                guard = None
                if number % 3 == 1:
                    guard = await owner.register_owned(array)
                    handle = await owner.register_data_in_region(guard)
                else:
                    handle = await owner.register_data(array)
                del array
                data, lease = await consumer.get(handle)
                assert (len(data), bytes(data).count(fill)) == (nbytes, nbytes)
                if number % 3 == 0:
                    await consumer.release(handle, lease)
                else:
                    await consumer.detach(handle, lease)
                    await owner.withdraw(handle)
                if guard is not None:
                    await guard.unregister()
                with pytest.raises(orbit.UnknownHandle):
                    await consumer.get(handle)
            gc.collect()
            assert not any(one() is not None for one in seen)
            assert len(addresses) < ROUNDS  # it did come back
            found = owner.statistics()
            assert (found.slots.slots, found.memory.regions, found.registered_bytes) == (0, 0, 0)

    run_async(main())


def test_a_mapping_in_the_place_of_another(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            addresses: set[int] = set()
            old: orbit.Handle | None = None
            for life in range(10):
                pages = mmap.mmap(-1, NBYTES)
                pages[:] = pattern(NBYTES, life)
                with memoryview(pages) as view:
                    addresses.add(address_of(view))
                handle = await owner.register_data(pages)
                with pytest.raises(BufferError):
                    pages.close()  # it cannot be unmapped under a registration
                data, lease = await consumer.get(handle)
                assert data == pattern(NBYTES, life)
                await consumer.detach(handle, lease)
                if old is not None:
                    with pytest.raises(orbit.UnknownHandle):
                        await consumer.get(old)
                await owner.withdraw(handle)
                del data
                pages.close()
                old = handle
            assert len(addresses) < 10

    run_async(main())
