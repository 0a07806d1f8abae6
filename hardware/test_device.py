"""The contract of DataPath on the device that the environment names, with both ends on it.

Collected only by `smoke.sh`: the project's own tests never touch hardware.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from orbit.config import NodeConfig, resolve
from orbit.model import PathReason
from orbit.testing.contracts import PATH_CASES, check_data_path
from orbit.transport.interface import Session, Target
from orbit.verbs.opening import open_rdma_path
from orbit.verbs.rdma_path import RdmaPath
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import NotifyingSession, join


def pinned_config() -> RdmaPathConfig:
    """What the environment says, and nothing chosen for it."""
    rdma = resolve(NodeConfig()).rdma
    assert rdma.device is not None, "set ORBIT_DEVICE"
    return RdmaPathConfig(
        device=rdma.device,
        port=rdma.port or 0,
        gid_index=rdma.gid_index,
        pkey=rdma.pkey,
    )


async def open_end() -> RdmaPath:
    path, reason, detail = await open_rdma_path(None, pinned_config())
    assert path is not None, f"{reason}: {detail}"
    assert await path.memory.ensure() is PathReason.OK
    return path


@dataclass(eq=False)
class DevicePair:
    """An owner and a consumer that share the device."""

    owner: RdmaPath
    consumer: RdmaPath
    owner_end: NotifyingSession
    consumer_end: NotifyingSession
    big_bytes: int = 32 << 20

    @property
    def owner_session(self) -> Session:
        return self.owner_end

    @property
    def consumer_session(self) -> Session:
        return self.consumer_end

    def allocate_source(self, nbytes: int) -> Target:
        buffer = self.owner.memory.allocate_nowait(nbytes)
        return Target(buffer.view, buffer)

    def allocate_target(self, nbytes: int) -> Target:
        return Target(memoryview(bytearray(nbytes)))

    def free(self, memory: Target) -> None:
        if memory.pinned is not None:
            self.owner.memory.free(memory.pinned)

    async def kill_owner(self) -> None:
        self.owner_end.close()
        await self.owner.close()


@contextlib.asynccontextmanager
async def device_pair() -> AsyncIterator[DevicePair]:
    owner, consumer = await open_end(), await open_end()
    try:
        yield DevicePair(owner, consumer, *join(owner, consumer))
    finally:
        await consumer.close()
        await owner.close()


@pytest.mark.parametrize("case", PATH_CASES)
def test_device(case: str, run_async: Callable[..., Any]) -> None:
    run_async(check_data_path(case, device_pair))


def test_range(run_async: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Not a verdict: orbit serves a device that ignores ranges unless it is told not to."""

    async def enforced() -> bool:
        path = await open_end()
        await path.close()
        return all(rail.range_enforced for rail in path.hints)

    answer = "enforced" if run_async(enforced()) else "NOT enforced by this device"
    with capsys.disabled():
        print(f"\nrange of a memory window: {answer}")
