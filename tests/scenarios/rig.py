"""Two whole nodes in one process for the rendezvous scenarios, and hooks into their data paths.

The same scenarios run over TCP and over RDMA, and RDMA runs on scripted devices and in the SoftRoCE
VM: who opens a rig says which devices its nodes get.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orbit
from orbit.errors import PathFailed
from orbit.model import LeaseId, PathName, PathReason
from orbit.runtime.paths import Paths
from orbit.testing import waiting
from orbit.testing.pattern import pattern
from orbit.transport.interface import DataPath, Exposure, Progress, PullReport, Session, Target

KIB, MIB = 1 << 10, 1 << 20
HANG_S = 120.0  # an emulated processor may stand still for a while; this bound is for hangs alone
NO_RDMA = orbit.RdmaConfig(enabled=False)


@dataclass(frozen=True)
class Devices:
    """The devices of the two nodes; empty: both nodes have none, and everything goes by TCP."""

    owner: str = ""
    consumer: str = ""

    @property
    def path(self) -> PathName:
        return PathName.RDMA if self.owner else PathName.TCP


class Hooks:
    """A node's data path with faults that a device does not give on demand. Everything else goes
    through to the real one.
    """

    def __init__(self, inner: DataPath) -> None:
        self._inner = inner
        self.name = inner.name
        self.fail_pulls = 0  # that many pulls fail after the bytes have come
        self.pull_delay_s = 0.0
        self.garble: Callable[[bytes], bytes] | None = None  # of the next descriptor to arrive
        self.pulls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        self.pulls += 1
        if self.garble is not None:
            garbled = self.garble(exposure.descriptor)
            exposure, self.garble = dataclasses.replace(exposure, descriptor=garbled), None
        if self.pull_delay_s:
            await asyncio.sleep(self.pull_delay_s)
        report = await self._inner.pull(session, exposure, lease_id, target, progress)
        if self.fail_pulls:
            self.fail_pulls -= 1
            raise PathFailed(self.name, PathReason.GET_FAILED, "hooked")
        return report


@dataclass
class Rig:
    """`owner` and `consumer` know each other. Counts are differences since `mark`."""

    owner: orbit.Node
    consumer: orbit.Node
    devices: Devices
    hooks: dict[str, Hooks] = field(default_factory=dict)  # of the consumer, by path name
    _marks: dict[orbit.Node, dict[str, int]] = field(default_factory=dict)

    @property
    def rdma(self) -> bool:
        return bool(self.devices.owner)

    @property
    def path(self) -> PathName:
        """By which a pinned payload moves here."""
        return self.devices.path

    def mark(self) -> None:
        for node in (self.owner, self.consumer):
            self._marks[node] = dict(node.statistics().counters)

    def counted(self, node: orbit.Node, text: str) -> dict[str, int]:
        before, after = self._marks.get(node, {}), node.statistics().counters
        return {
            name: count - before.get(name, 0)
            for name, count in after.items()
            if text in name and count != before.get(name, 0)
        }

    def decided(self, node: orbit.Node) -> dict[tuple[str, str], int]:
        """Path decisions of that node since `mark`, as (path, reason)."""
        found: dict[tuple[str, str], int] = {}
        for name, count in self.counted(node, "orbit_rendezvous_rdma_path_total").items():
            labels = dict(
                part.split("=")
                for part in name[name.index("{") + 1 : -1].replace('"', "").split(",")
            )
            key = labels["path"], labels["reason"]
            found[key] = found.get(key, 0) + count
        return found

    async def fetched(self, handle: orbit.Handle, payload: bytes, **options: Any) -> orbit.Lease:
        """Get, compare, detach; the lease as it was."""
        data, lease = await self.consumer.get(handle, **options)
        assert data == payload, first_difference(data, payload)
        await self.consumer.detach(handle, lease)
        return lease

    async def settled(self) -> None:
        """Until no lease is left at the owner."""
        await until(lambda: leases(self.owner) == 0)


def leases(node: orbit.Node) -> int:
    found = node.statistics().slots
    return found.leases_held + found.leases_retracting + found.leases_unquiesced


def slots(node: orbit.Node) -> int:
    return node.statistics().slots.slots


async def until(done: Callable[[], bool]) -> None:
    await waiting.until(done, HANG_S)


def payload_of(nbytes: int, seed: int = 0) -> bytes:
    """A pattern without a power-of-two period."""
    return bytes(pattern(nbytes, seed))


def first_difference(got: memoryview | bytes, wanted: bytes) -> str:
    if len(got) != len(wanted):
        return f"{len(got)} bytes instead of {len(wanted)}"
    pairs = enumerate(zip(got, wanted, strict=True))
    return f"differs at byte {next(i for i, (a, b) in pairs if a != b)}"


Knobs = dict[str, Any]
"""Overrides of one node: `rdma`, `pool`, `rendezvous`, `messaging` and NodeConfig's own."""


def node_config(device: str, knobs: Knobs) -> orbit.NodeConfig:
    rest = dict(knobs)
    pool = orbit.RdmaPoolConfig(**rest.pop("pool", {}))
    rdma_knobs = rest.pop("rdma", {})
    if device:
        rdma = orbit.RdmaConfig(device=device, pool=pool, **rdma_knobs)
    else:
        rdma = replace(NO_RDMA, pool=pool)
    return orbit.NodeConfig(
        rdma=rdma,
        rendezvous=orbit.RendezvousConfig(**rest.pop("rendezvous", {})),
        messaging=orbit.MessagingConfig(**rest.pop("messaging", {})),
        **rest,
    )


@contextlib.asynccontextmanager
async def open_rig(
    devices: Devices, owner: Knobs | None = None, consumer: Knobs | None = None
) -> AsyncIterator[Rig]:
    """Two open nodes; afterwards neither holds a slot, a lease or retained memory."""
    serving = orbit.Node(node_config(devices.owner, owner or {}))
    fetching = orbit.Node(node_config(devices.consumer, consumer or {}))
    async with serving, fetching:
        fetching.add_peer(serving.address)
        serving.add_peer(fetching.address)
        rig = Rig(serving, fetching, devices)
        _hook(rig)
        rig.mark()
        before = len(serving.statistics().retained)
        yield rig
    assert leases(serving) == slots(serving) == 0
    assert len(serving.statistics().retained) == before


def _hook(rig: Rig) -> None:
    """Put hooks around the consumer's paths. All its parts share one Paths value."""
    rendezvous = rig.consumer._rendezvous  # the seam that a device has no switch for
    assert rendezvous is not None
    paths: Paths = rendezvous._paths
    for name in ("tcp", "rdma"):
        path = getattr(paths, name)
        if path is not None:
            rig.hooks[name] = Hooks(path)
            object.__setattr__(paths, name, rig.hooks[name])


Scenario = Callable[[Rig], Awaitable[None]]
