"""One line per key and interval, and no more keys than the bound."""

from __future__ import annotations

import logging

import pytest

from orbit.runtime.limited_log import LimitedLog


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limited(clock: Clock) -> LimitedLog:
    return LimitedLog(logging.getLogger("orbit"), interval_s=10.0, keys_max=3, clock=clock)


def test_a_key_is_told_once_an_interval_with_what_was_left_out(
    limited: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for second in (0, 1, 2, 9, 10, 11, 20):
        clock.now = second
        limited.warning("key", "by %s", "tcp", reason="budget")
    assert [record.getMessage() for record in caplog.records] == [
        "by tcp",
        "by tcp (3 more since 10 s ago)",
        "by tcp (1 more since 10 s ago)",
    ]
    assert [getattr(record, "left_out", None) for record in caplog.records] == [None, 3, 1]
    assert {record.reason for record in caplog.records} == {"budget"}


def test_keys_do_not_stand_for_each_other(
    limited: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for key in (("peer", 1), ("peer", 2), ("peer", 1)):
        limited.warning(key, "line")
    assert len(caplog.records) == 2


def test_keys_are_bounded_and_the_one_told_longest_ago_goes(
    limited: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for key in range(3):
        limited.warning(key, "line")
    clock.now = 10.0
    limited.warning(0, "line")  # told again: now the youngest
    limited.warning(3, "line")
    assert len(limited) == 3
    told = len(caplog.records)
    limited.warning(0, "line")  # known, so held back
    assert len(caplog.records) == told
    limited.warning(1, "line")  # forgotten, so told
    assert len(caplog.records) == told + 1
