"""A peer that owes an answer is asked after a silence, and lost after a second one."""

from __future__ import annotations

from orbit.protocol.liveness import Liveness, Suspicion


def test_nothing_owed_is_nothing_to_wait_for() -> None:
    liveness = Liveness(10.0, 2.0)
    assert liveness.deadline is None
    assert liveness.on_deadline(100.0) is Suspicion.NONE
    liveness.watch(True, 0.0)
    assert liveness.deadline == 10.0
    liveness.watch(False, 5.0)
    assert liveness.deadline is None


def test_silence_then_a_ping_then_the_verdict() -> None:
    liveness = Liveness(10.0, 2.0)
    liveness.watch(True, 0.0)
    liveness.watch(True, 3.0)  # one more call extends nothing
    assert liveness.on_deadline(9.999) is Suspicion.NONE
    assert liveness.on_deadline(10.0) is Suspicion.PING
    assert liveness.deadline == 12.0
    assert liveness.on_deadline(12.0) is Suspicion.LOST
    assert liveness.deadline is None


def test_any_frame_is_an_answer() -> None:
    liveness = Liveness(10.0, 2.0)
    liveness.watch(True, 0.0)
    liveness.on_frame(4.0)
    assert liveness.on_deadline(10.0) is Suspicion.NONE
    assert liveness.deadline == 14.0
    assert liveness.on_deadline(14.0) is Suspicion.PING
    liveness.on_frame(15.0)
    assert liveness.on_deadline(16.0) is Suspicion.NONE
    assert liveness.deadline == 25.0
    liveness.watch(False, 20.0)
    liveness.watch(True, 30.0)
    assert liveness.deadline == 40.0
