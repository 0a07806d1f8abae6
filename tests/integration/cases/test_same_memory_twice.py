"""C19 from threads: many of them register, serve and unregister the same memory through one
blocking node.

How overlaps and neighbours behave one after another is tests/scenarios/memory_cases.py's.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import orbit
import orbit.sync
from orbit.testing.pattern import pattern
from tests.integration.messages.settled import SOAK, TCP

THREADS = 16
ROUNDS = 100 if SOAK else 10
NBYTES = 1 << 20


def test_sixteen_threads_with_one_array() -> None:
    content = pattern(NBYTES)
    array = np.frombuffer(bytearray(content), "u1")
    parts = [range(NBYTES), range(NBYTES // 2), range(NBYTES // 2, NBYTES), range(100)]
    parts.append(range(100, 200))  # in one page with the one before
    with orbit.sync.Node(TCP) as owner, orbit.sync.Node(TCP) as consumer:
        consumer.add_peer(owner.address)
        start = threading.Barrier(THREADS)

        def work(seed: int) -> None:
            chance = random.Random(seed)
            start.wait()
            for number in range(ROUNDS):
                part = parts[0] if seed % 2 else chance.choice(parts)
                guard = owner.register_owned(array[part.start : part.stop])
                if number % 5 == 0:
                    handle = owner.register_data_in_region(guard)
                    data, lease = consumer.get(handle)
                    assert data == content[part.start : part.stop]
                    consumer.release(handle, lease)
                assert guard.unregister() is orbit.Deregistered.DRAINED
                assert guard.unregister() is orbit.Deregistered.DRAINED  # it joins the first
                with pytest.raises(orbit.ClosedError):
                    owner.register_data_in_region(guard)

        with ThreadPoolExecutor(THREADS) as pool:
            for outcome in [pool.submit(work, seed) for seed in range(THREADS)]:
                outcome.result(120)
        found = owner.statistics()
        assert (found.memory.regions, found.registered_bytes, found.slots.slots) == (0, 0, 0)
    assert bytes(array) == content


def test_unregister_with_transfers_running_from_other_threads() -> None:
    """Each get sees the whole content, or that the payload is gone."""
    content = pattern(NBYTES)
    with orbit.sync.Node(TCP) as owner, orbit.sync.Node(TCP) as consumer:
        consumer.add_peer(owner.address)
        for _ in range(10 * ROUNDS):
            buffer = bytearray(content)
            guard = owner.register_owned(buffer)
            handle = owner.register_data_in_region(guard, options=orbit.RegisterOptions(ttl=60))

            def read(handle: orbit.Handle = handle) -> bool:
                try:
                    data, lease = consumer.get(handle)
                    assert data == content
                    consumer.detach(handle, lease)
                except orbit.OrbitError:
                    return False
                return True

            with ThreadPoolExecutor(4) as pool:
                readers = [pool.submit(read) for _ in range(4)]
                how = guard.unregister(0)
                buffer[:] = bytes(NBYTES)  # the caller's again
                buffer.append(0)
                assert how in orbit.Deregistered
                for reader in readers:
                    reader.result(60)
        assert owner.statistics().slots.slots == 0
