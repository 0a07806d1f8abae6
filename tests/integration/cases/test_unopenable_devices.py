"""C31 on fake trees: a device that is listed and cannot be used costs the others nothing, is an
error only for who names it, and says which of the causes it is.

The verdicts themselves are tests/unit/verbs/test_discovery.py's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.model import PathReason
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.verbs.discovery import judged_by
from orbit.verbs.scripted import ScriptedFabric
from tests.integration.cases.fake_hosts import FakeHost

Run = Callable[[Any], Any]
SIZE = 1_000_003


def forbid(path: Path, patch: pytest.MonkeyPatch) -> None:
    """chmod 000 as an ordinary user meets it; root would be let through."""
    real = os.access
    patch.setattr(os, "access", lambda file, mode: file != path and real(file, mode))


def no_node(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    host.add(name, node=False)


def permission(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    forbid(host.add(name), patch)


def no_provider(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    host.add(name)
    host.known.remove(name)


def port_down(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    host.add(name, state="1: DOWN", address=False)


def no_gid(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    host.add(name, address=False)


def refused_at_open(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    """A container's device cgroup lets the node be seen, and not opened."""
    host.add(name)
    host.devices[name].fail_verb("open_device", 1, count=99)


def gone_at_open(host: FakeHost, name: str, patch: pytest.MonkeyPatch) -> None:
    host.add(name)
    host.devices[name].fail_verb("open_device", 19, count=99)


Breakage = Callable[[FakeHost, str, pytest.MonkeyPatch], None]
CAUSES: dict[Breakage, tuple[PathReason, str]] = {
    no_node: (PathReason.NO_DEVICE, "does not exist here"),
    permission: (PathReason.PERMISSION, "may not be opened by this user"),
    no_provider: (PathReason.DEVICE_FAILED, "has no driver for it"),
    port_down: (PathReason.PORT_DOWN, "no port is ACTIVE"),
    no_gid: (PathReason.NO_GID, "has no GID"),
    refused_at_open: (PathReason.PERMISSION, "open_device"),
    gone_at_open: (PathReason.DEVICE_FAILED, "open_device"),
}
FOUND_BY_OPENING = (no_provider, refused_at_open, gone_at_open)
by_cause = pytest.mark.parametrize("break_it", CAUSES, ids=lambda cause: str(cause.__name__))


def name_of(breakage: Breakage) -> str:
    return str(getattr(breakage, "__name__", ""))


@contextlib.asynccontextmanager
async def opened(host: FakeHost, **rdma: Any) -> AsyncIterator[orbit.TransferEngine]:
    node = orbit.NodeConfig(rdma=orbit.RdmaConfig(**rdma))
    async with contextlib.AsyncExitStack() as stack:
        with host.here():
            engine = orbit.TransferEngine(orbit.EngineConfig(node=node))
            await stack.enter_async_context(engine)
        yield engine


@by_cause
def test_an_engine_works_on_the_device_that_is_left(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Breakage
) -> None:
    async def main() -> None:
        fabric = ScriptedFabric()
        good, bad = FakeHost(fabric, 1, tmp_path / "a"), FakeHost(fabric, 2, tmp_path / "b")
        for name in ("a0", "a1"):
            good.add(name)
        bad.add("b0")
        break_it(bad, "b1", monkeypatch)
        async with nothing_left(), opened(good) as source, opened(bad) as requester:
            data, into = bytearray(pattern(SIZE)), bytearray(SIZE)
            there = await source.register(data, "read")
            here = await requester.register(into)
            peer = await requester.open_peer(source.address)
            assert [route.rail.device for route in peer.routes] == ["b0"]
            request = orbit.TransferRequest("read", here, there.remote(), "rdma", 20.0)
            (result,) = await requester.submit(request)
            assert (result.rails, result.nbytes) == (("b0",), SIZE)
            assert into == data
        for host in (good, bad):
            host.check_nothing_left()

    run_async(main())


@by_cause
def test_alone_it_is_a_reason_and_tcp_works(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Breakage
) -> None:
    async def main() -> None:
        reason, text = CAUSES[break_it]
        host = FakeHost(ScriptedFabric(), 1, tmp_path / "a")
        break_it(host, "a0", monkeypatch)
        async with opened(host) as source, opened(host) as requester:
            there = await source.register(bytearray(pattern(SIZE)), "read")
            into = bytearray(SIZE)
            here = await requester.register(into)
            await requester.open_peer(source.address)
            with pytest.raises(orbit.PathUnavailable, match=text) as caught:
                await requester.submit(orbit.TransferRequest("read", here, there.remote(), "rdma"))
            assert caught.value.reason == reason
            await requester.submit(orbit.TransferRequest("read", here, there.remote(), "tcp"))
            assert into == pattern(SIZE)
        with host.here(), pytest.raises(orbit.PathUnavailable, match=text):
            await orbit.Node(orbit.NodeConfig(transport="rdma")).open()
        if break_it not in FOUND_BY_OPENING:
            with host.here():
                found = orbit.available()
            assert (found.rdma, found.devices) == (reason, ())
            assert text in str(found)
        host.check_nothing_left()

    run_async(main())


def test_all_causes_at_once_are_told_apart(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        host = FakeHost(ScriptedFabric(), 1, tmp_path / "a")
        for break_it in CAUSES:
            break_it(host, name_of(break_it), monkeypatch)
        with host.here(), pytest.raises(orbit.PathUnavailable) as caught:
            await orbit.Node(orbit.NodeConfig(transport="rdma")).open()
        assert caught.value.reason == PathReason.DEVICE_FAILED  # of what got furthest
        assert name_of(gone_at_open) in caught.value.detail
        found = judged_by(host.tree.look(), host.known)
        assert len({device.verdict for device in found.devices}) == 6
        for break_it in set(CAUSES) - {refused_at_open, gone_at_open}:
            (device,) = (d for d in found.devices if d.name == name_of(break_it))
            assert CAUSES[break_it][0] == device.verdict.reason
            assert CAUSES[break_it][1] in device.detail
        host.check_nothing_left()

    run_async(main())


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("named", ["a1", "rxe9", "a0,rxe9"])
def test_one_that_is_named_is_an_error_with_the_names_that_are_valid(
    run_async: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    by_environment: bool,
) -> None:
    async def main() -> None:
        host = FakeHost(ScriptedFabric(), 1, tmp_path / "a")
        host.add("a0")
        permission(host, "a1", monkeypatch)
        pin = named
        if by_environment:
            monkeypatch.setenv("ORBIT_DEVICE", named)
            pin = "a0"  # the environment wins
        with pytest.raises(orbit.ConfigError, match="valid: a0") as caught:
            async with opened(host, device=pin):
                raise AssertionError("it opened")
        assert named.rpartition(",")[2] in str(caught.value)
        host.check_nothing_left()

    run_async(main())


def test_the_environment_may_name_another_one_than_the_code(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        host = FakeHost(ScriptedFabric(), 1, tmp_path / "a")
        for name in ("a0", "a1"):
            host.add(name)
        monkeypatch.setenv("ORBIT_DEVICE", "a1")
        async with opened(host, device="a0") as engine:
            rails = engine.statistics().rails
            assert rails is not None
            assert [rail.device for rail in rails.rails] == ["a1"]
        host.check_nothing_left()

    run_async(main())
