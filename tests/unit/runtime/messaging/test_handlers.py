"""Names, modes and kinds of handlers."""

from __future__ import annotations

import functools

import pytest

from orbit import UsageError
from orbit.events import DURATION_BOUNDS_S
from orbit.runtime.messaging.handlers import (
    Dispatch,
    HandlerCounts,
    HandlerRegistry,
    OrderedConfig,
    Overflow,
    is_async_function,
)


def plain(message: object) -> bytes:
    return b""


async def waiting(message: object) -> bytes:
    return b""


class Callable_:
    def __call__(self, message: object) -> bytes:
        return b""


class AsyncCallable:
    async def __call__(self, message: object) -> bytes:
        return b""


def test_kinds_of_functions() -> None:
    assert is_async_function(waiting)
    assert is_async_function(functools.partial(waiting))
    assert is_async_function(AsyncCallable())
    assert not is_async_function(plain)
    assert not is_async_function(functools.partial(plain))
    assert not is_async_function(Callable_())


@pytest.mark.parametrize("name", ["", "_", "_mine", "x" * 256, "é" * 128, "\ud800", None, 3])
def test_names_that_are_refused(name: str) -> None:
    registry = HandlerRegistry()
    with pytest.raises(UsageError):
        registry.add(name, plain)
    assert registry.names() == []


@pytest.mark.parametrize("name", ["a", "a_", "with space", "x" * 255, "é" * 127])
def test_names_that_are_taken(name: str) -> None:
    registry = HandlerRegistry()
    registry.add(name, plain)
    assert registry.find(name) is not None
    assert registry.names() == [name]


def test_a_duplicate_is_refused_and_the_first_stays() -> None:
    registry = HandlerRegistry()
    first = registry.add("echo", plain)
    with pytest.raises(UsageError, match="registered"):
        registry.add("echo", waiting)
    assert registry.find("echo") is first
    assert registry.remove("echo") is first
    assert registry.add("echo", waiting).is_async


def test_names_of_orbit_are_its_own() -> None:
    registry = HandlerRegistry()
    registry.add("_handlers", plain, reserved=True)
    with pytest.raises(UsageError):
        registry.add("user", plain, reserved=True)
    with pytest.raises(UsageError):
        registry.remove("_handlers")
    with pytest.raises(UsageError):
        registry.remove("never")
    assert registry.names() == []
    assert [handler.name for handler in registry] == ["_handlers"]


def test_what_cannot_be_a_handler() -> None:
    registry = HandlerRegistry()
    with pytest.raises(UsageError, match="called"):
        registry.add("x", b"not callable")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dispatch"):
        registry.add("x", plain, "ordered")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_concurrent": 0},
        {"max_concurrent": True},
        {"max_queue_depth": 0},
        {"max_queue_depth": 1.5},
        {"overflow": "drop"},
        {"idle_lane_ttl_s": 0},
        {"idle_lane_ttl_s": float("inf")},
        {"key": "sender"},
    ],
)
def test_bounds_that_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        OrderedConfig(**arguments)  # type: ignore[arg-type]


def test_modes() -> None:
    assert Dispatch.spawn().lanes is None
    ordered = Dispatch.ordered().lanes
    assert ordered is not None
    assert ordered.key is None
    everyone = Dispatch.ordered_global().lanes
    assert everyone is not None
    assert everyone.key is not None
    config = OrderedConfig(max_concurrent=2, overflow="reject")
    assert config.overflow is Overflow.REJECT
    assert Dispatch.ordered_with(config).lanes is config
    modes = (Dispatch.spawn(), Dispatch.ordered(), Dispatch.ordered_global())
    assert [mode.mode for mode in modes] == ["spawn", "ordered", "ordered_global"]


def test_durations_fall_into_their_bucket() -> None:
    counts = HandlerCounts()
    for seconds in (0.0, DURATION_BOUNDS_S[0], DURATION_BOUNDS_S[0] * 1.01, 1000.0):
        counts.finished(seconds)
    assert counts.buckets[:2] == [2, 1]
    assert counts.buckets[-1] == 1
    assert sum(counts.buckets) == 4
