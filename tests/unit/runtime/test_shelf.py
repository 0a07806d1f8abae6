"""Races between an exposure and the end of its lease: memory goes only after the verdict."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit.errors import PathUnavailable, Unquiesced
from orbit.events import Recorder
from orbit.model import LeaseId, PathName, PathReason, WorkerId
from orbit.runtime import retained
from orbit.runtime.runner import TaskRunner
from orbit.runtime.shelf import Shelf
from orbit.runtime.staging import stage_held
from orbit.testing.clock import run_virtual
from orbit.testing.sessions import StubSession
from orbit.transport.interface import Exposure


class SlowPath:
    """Exposes and retracts when its gates open; says what it did."""

    name = PathName.RDMA

    def __init__(self) -> None:
        self.exposing, self.retracting = asyncio.Event(), asyncio.Event()
        self.fail_expose = self.fail_retract = False
        self.log: list[str] = []

    async def expose(self, *args: Any) -> Exposure:
        await self.exposing.wait()
        if self.fail_expose:
            raise PathUnavailable(PathName.RDMA, PathReason.WINDOWS_BUSY)
        self.log.append("exposed")
        return Exposure(descriptor=b"d")

    async def retract(self, *args: Any, transferred: bool) -> None:
        await self.retracting.wait()
        if self.fail_retract:
            raise OSError("a bug")
        self.log.append("retracted")


class Bench:
    """One shelf, one slot of `source`, one lease on it that is being exposed."""

    def __init__(self) -> None:
        self.source = bytearray(10)
        self.runner = TaskRunner()
        self.shelf = Shelf(WorkerId(1), 30.0, Recorder(), self.runner)
        self.path: Any = SlowPath()
        self.session: Any = StubSession(1, dialer=False)
        staged = stage_held(self.source)
        self.handle = self.shelf.register(staged, retain_slot=False)
        self.lease_id: LeaseId = self.shelf.store.acquire(self.handle, self.session.attempt)
        self.exposing = asyncio.ensure_future(
            self.shelf.expose(self.path, self.session, self.lease_id, staged)
        )

    @property
    def freed(self) -> bool:
        try:
            self.source.append(0)
        except BufferError:
            return False
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_withdrawn_while_it_is_being_exposed(fails: bool) -> None:
    async def main() -> None:
        bench = Bench()
        bench.path.fail_expose = fails
        await asyncio.sleep(0.1)
        withdrawing = asyncio.ensure_future(bench.shelf.withdraw(bench.handle))
        await asyncio.sleep(0.1)
        assert not bench.freed
        assert not bench.shelf.arm(bench.lease_id)
        bench.path.exposing.set()
        await asyncio.sleep(0.1)
        assert bench.freed == fails
        bench.path.retracting.set()
        await withdrawing
        assert bench.freed
        assert bench.path.log == ([] if fails else ["exposed", "retracted"])
        await asyncio.gather(bench.exposing, return_exceptions=True)
        assert len(bench.runner) == 0

    run_virtual(main())


def test_an_epoch_that_ends_meanwhile_waits_for_the_verdict() -> None:
    async def main() -> None:
        bench = Bench()
        await asyncio.sleep(0.1)
        ending = asyncio.ensure_future(bench.shelf.end_epoch(bench.session.attempt))
        bench.path.exposing.set()
        await asyncio.sleep(0.1)
        assert not ending.done()
        bench.path.retracting.set()
        await ending
        assert bench.freed
        await bench.exposing

    run_virtual(main())


def test_a_retraction_that_fails_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def main() -> None:
        bench = Bench()
        bench.path.fail_retract = True
        bench.path.exposing.set()
        bench.path.retracting.set()
        await bench.exposing
        with pytest.raises(Unquiesced):
            await bench.shelf.withdraw(bench.handle)
        assert not bench.freed
        await bench.shelf.close()
        assert not bench.freed
        assert bench.shelf.store.statistics().leases_unquiesced == 1

    run_virtual(main())
    assert len(kept) == 1
