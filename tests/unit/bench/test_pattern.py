"""Payload bytes by seed and number, where they lie, and who notices a wrong one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.bench.pattern import Pattern, compared
from orbit.bench.plan import SAMPLE_BYTES, Plan, Verb, Verify
from orbit.bench.slots import VARIANTS, Slots, bytes_needed, variant
from orbit.model import Transport
from orbit.testing.pattern import PERIOD

SIZES = (1, 4095, 2 * SAMPLE_BYTES + 1, 17 * PERIOD + 5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verify", [Verify.FULL, Verify.SAMPLE])
def test_what_was_filled_is_right_and_its_neighbour_is_not(size: int, verify: Verify) -> None:
    pattern = Pattern(seed=5)
    view = memoryview(bytearray(size))
    pattern.fill(view, 7)
    assert pattern.differs(view, 7, verify) is None
    assert pattern.differs(view, 8, verify) == 0
    assert Pattern(seed=6).differs(view, 7, verify) is not None


@given(st.sampled_from(SIZES), st.data())
def test_any_wrong_byte_is_found(size: int, data: st.DataObject) -> None:
    pattern, place = Pattern(seed=0), data.draw(st.integers(0, size - 1))
    view = memoryview(bytearray(size))
    pattern.fill(view, 3)
    view[place] ^= 0x55
    assert pattern.differs(view, 3, Verify.FULL) == place
    sampled = any(low <= place < high for low, high in compared(size, Verify.SAMPLE))
    assert pattern.differs(view, 3, Verify.SAMPLE) == (place if sampled else None)
    assert pattern.differs(view, 3, Verify.OFF) is None


def test_payloads_of_following_numbers_share_no_byte() -> None:
    pattern, size = Pattern(seed=1), 2 * PERIOD
    first, second = memoryview(bytearray(size)), memoryview(bytearray(size))
    pattern.fill(first, 10)
    pattern.fill(second, 11)
    assert not any(a == b for a, b in zip(first, second, strict=True))


def test_slots_are_pages_apart_and_name_each_payload_once() -> None:
    slots = Slots(workers=3, batch=2, size=5000, pattern=Pattern(0))
    assert slots.places == [0, 8192, 16384, 24576, 32768, 40960]
    assert [slots.places_of(1), len(slots.pieces(1)[1])] == [[16384, 24576], 5000]
    numbers = [slots.number(w, t, i) for t in range(3) for w in range(3) for i in range(2)]
    assert sorted(numbers) == list(range(18))
    slots.fill(1, 4, Verify.FULL)
    number = slots.number(1, 4, 1)
    assert Pattern(0).differs(slots.pieces(1)[1], number, Verify.FULL) is None


def test_a_piece_never_gets_the_payload_that_it_has() -> None:
    for item in range(3):
        turns = [variant(turn, item) for turn in range(6)]
        assert all(a != b for a, b in itertools.pairwise(turns))
        assert set(turns) == set(range(VARIANTS))


def test_room_counts_whole_pages_of_everything_in_flight() -> None:
    plan = Plan(
        verb=Verb.PUT,
        sizes=(1, 5000),
        transport=Transport.TCP,
        batch=2,
        inflight=3,
        iterations=1,
    )
    assert bytes_needed(plan) == 6 * 8192
