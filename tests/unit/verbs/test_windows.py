"""Keys that are used once: the history of a domain, the pool of a queue pair, parked indexes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import DeviceError, PathUnavailable
from orbit.model import PathReason
from orbit.verbs.windows import KeyHistory, ParkedWindows, WindowPool


class FakeWindow:
    def __init__(self, key: int) -> None:
        self.key = key
        self.native = 1
        self.refuse = False

    def close(self) -> None:
        if self.refuse:
            raise DeviceError("fake", "dealloc_mw", 16)
        self.native = 0


class FakeDomain:
    """Hands out windows with the given keys, then the last one again and again."""

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = list(keys)
        self.windows: list[FakeWindow] = []
        self.errno = 0

    def allocate_window(self) -> FakeWindow:
        if self.errno:
            raise DeviceError("fake", "alloc_mw", self.errno)
        window = FakeWindow(self.keys.pop(0) if len(self.keys) > 1 else self.keys[0])
        self.windows.append(window)
        return window

    @property
    def alive(self) -> int:
        return sum(1 for window in self.windows if window.native)


def make_pool(domain: FakeDomain, indices_max: int = 100) -> tuple[WindowPool, KeyHistory]:
    history = KeyHistory(indices_max)
    return WindowPool(domain, history, ParkedWindows()), history  # type: ignore[arg-type]


def test_every_key_of_an_index_comes_once_and_never_the_allocated_one() -> None:
    history = KeyHistory(1)
    assert history.admit(7 << 8 | 0x20)
    keys = [history.next_key(7 << 8 | 0x20)]
    while (key := history.next_key(keys[-1] or 0)) is not None:
        keys.append(key)
    assert len(keys) == len(set(keys)) == 255
    assert 7 << 8 | 0x20 not in keys
    assert {(key or 0) >> 8 for key in keys} == {7}
    assert history.keys_remaining == 0
    assert history.keys_used == 255


def test_an_index_that_was_freed_and_comes_back_keeps_its_history() -> None:
    history = KeyHistory(1)
    history.admit(5 << 8)
    used = {history.next_key(5 << 8) for _ in range(10)}
    assert history.admit(5 << 8 | 0x80)  # deallocated, allocated again with another tag
    later = set()
    key = history.next_key(5 << 8 | 0x80)
    while key is not None:
        later.add(key)
        key = history.next_key(key)
    assert not used & later
    assert len(later) == 255 - 10 - 1  # the second allocation's own tag is skipped as well


def test_an_index_too_many_is_refused() -> None:
    history = KeyHistory(2)
    assert history.admit(1 << 8)
    assert history.admit(2 << 8)
    assert history.admit(2 << 8 | 9)
    assert not history.admit(3 << 8)


def test_keys_are_scarce_at_a_tenth_and_that_is_told_once() -> None:
    history, told = KeyHistory(2), list[int]()
    history.watch(lambda: told.append(history.keys_remaining))
    history.admit(1 << 8)
    history.admit(2 << 8)
    key = 1 << 8
    for _ in range(255):
        key = history.next_key(key) or 0
    key = 2 << 8
    for _ in range(255 - 52):
        key = history.next_key(key) or 0
    assert not told
    assert not history.scarce
    for _ in range(5):
        key = history.next_key(key) or 0
    assert told == [51]
    assert history.scarce
    history.watch(lambda: told.append(-1))  # who comes later hears at once
    assert told == [51, -1]


def test_tags_of_a_freed_window_are_out_of_reach_until_its_index_comes_back() -> None:
    history = KeyHistory(1)
    assert history.admit(1 << 8)
    key = history.next_key(1 << 8) or 0
    assert not history.scarce
    history.freed(key)
    assert history.scarce
    assert history.keys_remaining == 254  # they are not used up
    assert history.admit(1 << 8 | 0x80)
    assert not history.scarce
    assert history.next_key(1 << 8 | 0x80) is not None


def test_a_pool_that_finds_no_key_says_so() -> None:
    domain = FakeDomain([1 << 8, 2 << 8])
    pool, history = make_pool(domain, indices_max=1)
    told: list[bool] = []
    history.watch(lambda: told.append(history.ran_out))
    pool.take()
    with pytest.raises(PathUnavailable):
        pool.take()
    assert told == [True]


def test_a_window_comes_back_with_a_fresh_key() -> None:
    domain = FakeDomain([3 << 8])
    pool, history = make_pool(domain)
    first = pool.take()
    pool.give_back(first)
    second = pool.take()
    assert second.window is first.window
    assert second.key != first.key
    assert len(domain.windows) == 1
    assert history.keys_used == 2


def test_a_spent_window_is_freed_and_its_index_parked() -> None:
    domain = FakeDomain([3 << 8, 3 << 8 | 1, 4 << 8])
    pool, _ = make_pool(domain)
    parked = pool._parked
    for _ in range(255):
        pool.give_back(pool.take())
    # The device hands the spent index out once more: that window is kept, never bound.
    fresh = pool.take()
    assert fresh.key >> 8 == 4
    assert len(parked) == 1
    assert domain.alive == 2
    parked.close()
    assert len(parked) == 0
    assert domain.alive == 1


def test_exhaustion_is_window_keys_and_costs_nothing() -> None:
    domain = FakeDomain([1 << 8, 2 << 8, 3 << 8])
    pool, history = make_pool(domain, indices_max=2)
    taken = [pool.take(), pool.take()]
    with pytest.raises(PathUnavailable) as caught:
        pool.take()
    assert caught.value.reason == PathReason.WINDOW_KEYS
    assert domain.alive == 2  # the window that could not be used was freed again
    assert history.keys_remaining == 2 * 255 - 2
    assert pool.taken == len(taken)


def test_a_device_without_windows_left_is_windows_busy() -> None:
    domain = FakeDomain([1 << 8])
    domain.errno = 12
    pool, _ = make_pool(domain)
    with pytest.raises(PathUnavailable) as caught:
        pool.take()
    assert caught.value.reason == PathReason.WINDOWS_BUSY


def test_close_frees_bound_and_free_windows_and_can_be_repeated() -> None:
    domain = FakeDomain([1 << 8, 2 << 8, 3 << 8])
    pool, _ = make_pool(domain)
    bound, free, stubborn = pool.take(), pool.take(), pool.take()
    pool.give_back(free)
    stubborn.window.refuse = True  # type: ignore[attr-defined]
    with pytest.raises(DeviceError):
        pool.close()
    assert not bound.window.native
    assert not free.window.native
    assert pool.allocated == 1
    stubborn.window.refuse = False  # type: ignore[attr-defined]
    pool.close()
    assert domain.alive == 0
    pool.give_back(stubborn)  # late: nothing comes back to life
    assert pool.allocated == 0


@given(
    indices_max=st.integers(1, 4),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=300),
)
def test_no_key_comes_twice_whatever_the_order(
    indices_max: int, steps: list[tuple[bool, int]]
) -> None:
    counter = iter(range(10_000))
    domain = FakeDomain([0])

    def allocate() -> FakeWindow:
        number = next(counter)
        window = FakeWindow((number % 5 + 1) << 8 | number % 256)
        domain.windows.append(window)
        return window

    domain.allocate_window = allocate  # type: ignore[method-assign]
    pool, history = make_pool(domain, indices_max)
    out, seen = [], set()
    for take, which in steps:
        if take:
            try:
                fresh = pool.take()
            except PathUnavailable:
                continue
            assert fresh.key not in seen
            seen.add(fresh.key)
            out.append(fresh)
        elif out:
            pool.give_back(out.pop(which % len(out)))
    assert history.keys_used == len(seen)
