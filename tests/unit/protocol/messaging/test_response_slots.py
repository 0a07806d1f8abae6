"""Response slots: bound, generations, late answers, epochs; and deadlines without leftovers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import BudgetExceeded
from orbit.protocol.messaging import response_slots
from orbit.protocol.messaging.response_slots import Deadlines, ResponseSlots

Slots = ResponseSlots[str, str]


def bound(slots: Slots, call: str, epoch: str = "e") -> int:
    call_id = slots.take(call)
    slots.bind(call_id, epoch)
    return call_id


def test_an_answer_ends_its_call_once() -> None:
    slots = Slots(4)
    call_id = bound(slots, "a")
    assert call_id
    assert slots.complete(call_id, "e") == "a"
    assert slots.complete(call_id, "e") is None
    assert (len(slots), slots.late) == (0, 1)


def test_a_slot_comes_back_under_another_id() -> None:
    slots = Slots(1)
    first = bound(slots, "a")
    assert slots.cancel(first)
    assert not slots.cancel(first)
    second = bound(slots, "b")
    assert first != second
    assert slots.complete(first, "e") is None, "the late answer of the first call"
    assert slots.complete(second, "e") == "b"


def test_only_the_epoch_that_carried_a_call_answers_it() -> None:
    slots = Slots(4)
    call_id = bound(slots, "a", "old")
    assert slots.complete(call_id, "new") is None
    assert slots.complete(call_id, "old") == "a"
    unbound = slots.take("b")
    assert slots.complete(unbound, "old") is None
    slots.bind(unbound, "old")
    slots.bind(unbound, None)
    assert slots.complete(unbound, "old") is None
    assert slots.late == 3


@pytest.mark.parametrize("call_id", [0, 1, 0xFFFF, (1 << 64) - 1, 1 << 16 | 3])
def test_ids_that_were_never_given_out(call_id: int) -> None:
    slots = Slots(8)
    bound(slots, "a")
    assert slots.complete(call_id, "e") is None
    assert not slots.cancel(call_id)
    assert len(slots) == 1


def test_the_bound_and_what_it_says() -> None:
    slots = Slots(3)
    ids = [bound(slots, str(n)) for n in range(3)]
    with pytest.raises(BudgetExceeded) as caught:
        slots.take("more")
    assert caught.value.knob == "messaging.outstanding_calls"
    assert slots.complete(ids[1], "e") == "1"
    assert bound(slots, "more") not in ids


def test_an_epoch_that_dies_fails_its_calls_alone() -> None:
    slots = Slots(8)
    bound(slots, "a", "one")
    keep = bound(slots, "b", "two")
    bound(slots, "c", "one")
    slots.take("unbound")
    assert slots.fail_epoch("one") == ["a", "c"]
    assert slots.complete(keep, "two") == "b"
    assert list(slots) == ["unbound"]
    assert slots.fail_all() == ["unbound"]
    assert len(slots) == 0


def test_a_slot_at_its_last_generation_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_slots, "GENERATION_MAX", 2)
    slots = Slots(1)
    for _ in range(2):
        assert slots.cancel(bound(slots, "a"))
    assert slots.retired == 1
    with pytest.raises(BudgetExceeded):
        slots.take("b")


@given(st.lists(st.tuples(st.sampled_from("tcxf"), st.integers(0, 30)), max_size=80))
def test_every_call_ends_once(steps: list[tuple[str, int]]) -> None:
    slots: ResponseSlots[int, int] = ResponseSlots(5)
    pending: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    for number, (step, pick) in enumerate(steps):
        chosen = list(pending)[pick % len(pending)] if pending else 0
        if step == "t" and len(pending) < 5:
            call_id = slots.take(number)
            assert call_id not in seen
            seen.add(call_id)
            slots.bind(call_id, pick % 2)
            pending[call_id] = (number, pick % 2)
        elif step == "c" and chosen:
            number_, epoch = pending.pop(chosen)
            assert slots.complete(chosen, 1 - epoch) is None
            assert slots.complete(chosen, epoch) == number_
        elif step == "x" and chosen:
            del pending[chosen]
            assert slots.cancel(chosen)
        elif step == "f":
            epoch = pick % 2
            failed = sorted(n for n, e in pending.values() if e == epoch)
            assert sorted(slots.fail_epoch(epoch)) == failed
            pending = {i: v for i, v in pending.items() if v[1] != epoch}
        assert len(slots) == len(pending)


def test_deadlines_come_in_order_and_once() -> None:
    live = {"a", "b", "c"}
    deadlines: Deadlines[str] = Deadlines(live.__contains__)
    deadlines.add(3.0, "a")
    deadlines.add(1.0, "b")
    deadlines.add(2.0, "c")
    assert deadlines.next == 1.0
    live.discard("b")
    assert deadlines.next == 2.0
    assert deadlines.due(1.9) == []
    assert deadlines.due(3.0) == ["c", "a"]
    assert deadlines.next is None


def test_what_is_over_does_not_pile_up() -> None:
    live: set[int] = set()
    deadlines: Deadlines[int] = Deadlines(live.__contains__)
    for n in range(10_000):
        live.add(n)
        deadlines.add(1e6 + n, n)
        live.discard(n - 3)
    assert len(deadlines) < 600
    assert deadlines.due(2e6) == sorted(live)
