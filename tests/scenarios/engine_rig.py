"""Two transfer engines in one process for the engine's scenarios, over TCP or over RDMA.

Who opens a rig says which devices the nodes get: scripted ones on the host, two rails a side in the
SoftRoCE VM.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orbit
from orbit.testing import waiting
from orbit.testing.pattern import pattern

KIB, MIB = 1 << 10, 1 << 20
HANG_S = 120.0  # an emulated processor may stand still for a while; this bound is for hangs alone
GUARD = 0xE5

Transport = Literal["tcp", "rdma"]
Side = Literal["source", "requester"]


@dataclass(frozen=True)
class Devices:
    """Names of the rails of both nodes; empty: none, and everything goes by TCP."""

    source: tuple[str, ...] = ()
    requester: tuple[str, ...] = ()

    @property
    def transport(self) -> Transport:
        return "rdma" if self.source else "tcp"


@dataclass
class EngineRig:
    """`source` owns the remote regions, `requester` asks. Both know each other."""

    source: orbit.TransferEngine
    requester: orbit.TransferEngine
    devices: Devices
    _before: dict[Side, Any] = field(default_factory=dict)

    @property
    def transport(self) -> Transport:
        return self.devices.transport

    @property
    def rails(self) -> int:
        return len(self.devices.source)

    def request(
        self,
        op: str,
        local: orbit.EngineRegion | orbit.RegionRange,
        remote: orbit.RemoteRegion | orbit.RemoteRange,
        **options: Any,
    ) -> orbit.TransferRequest:
        return orbit.TransferRequest(op, local, remote, transport=self.transport, **options)

    async def idle(self) -> None:
        """Until every budget of both sides is repaid and no grant is left."""
        for engine in (self.source, self.requester):
            await waiting.until(lambda e=engine: in_use(e) == {}, HANG_S)


def in_use(engine: orbit.TransferEngine) -> dict[str, int]:
    """Budgets that are charged at this moment, registrations and endpoints apart."""
    budgets = engine.statistics().budgets
    lasting = {"max_cached_mrs", "max_cached_mr_bytes", "max_endpoints", "max_window_key_indices"}
    return {name: used for name, (used, _) in budgets.items() if used and name not in lasting}


def filled(nbytes: int, seed: int = 0) -> bytearray:
    """A pattern without a power-of-two period."""
    return bytearray(pattern(nbytes, seed))


def guarded(nbytes: int) -> bytearray:
    return bytearray([GUARD]) * nbytes


def changed_only(before: bytes, after: bytes | bytearray, ranges: list[tuple[int, int]]) -> bool:
    """Nothing outside `ranges` (offset, size) differs."""
    end = 0
    for offset, nbytes in sorted(ranges):
        if before[end:offset] != after[end:offset]:
            return False
        end = max(end, offset + nbytes)
    return before[end:] == bytes(after[end:])


@contextlib.asynccontextmanager
async def open_engines(
    devices: Devices,
    source: dict[str, Any] | None = None,
    requester: dict[str, Any] | None = None,
    *,
    node: orbit.NodeConfig | None = None,
) -> AsyncIterator[EngineRig]:
    """Two open engines; afterwards neither holds a grant, a charge or retained memory."""
    serving = orbit.TransferEngine(_config(devices.source, source or {}, node))
    asking = orbit.TransferEngine(_config(devices.requester, requester or {}, node))
    async with serving, asking:
        await asking.open_peer(serving.address)
        serving.node.add_peer(asking.address)
        rig = EngineRig(serving, asking, devices)
        yield rig
        await rig.idle()
        for engine in (serving, asking):
            assert engine.retained() == ()


def _config(
    devices: tuple[str, ...], knobs: dict[str, Any], node: orbit.NodeConfig | None
) -> orbit.EngineConfig:
    node = node or orbit.NodeConfig()
    rdma = replace(node.rdma, whitelist=devices) if devices else replace(node.rdma, enabled=False)
    config = orbit.EngineConfig(node=replace(node, rdma=rdma))
    large = orbit.EngineConfig.for_bytes(128 * MIB, rails=max(1, len(devices)))
    budgets = {
        name: getattr(large, name)
        for name in ("max_cached_mr_bytes", "max_cached_mrs", "max_direct_bytes")
    }
    return replace(config, **{**budgets, **knobs})


EngineScenario = Callable[[EngineRig], Awaitable[None]]
