"""A host's devices as a test makes them up: a fake /sys and /dev, and scripted devices behind what
they list, under whole nodes and engines; and two such hosts.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.model import PathReason
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.verbs import discovery, opening
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider
from orbit.verbs.scripted_fabric import ScriptedDevice
from tests.unit.verbs.test_discovery import V2, Tree


@dataclass(eq=False)
class FakeHost:
    """Number `number` on `fabric`, with its trees below `root`. Each device has a network of its
    own, the same one as that of the other hosts' device in the same place.
    """

    fabric: ScriptedFabric
    number: int
    root: Path
    devices: dict[str, ScriptedDevice] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)  # to the verbs library

    def __post_init__(self) -> None:
        self.root.mkdir()
        self.tree = Tree(self.root)

    def add(
        self, name: str, *, state: str = "4: ACTIVE", address: bool = True, node: bool = True
    ) -> Path:
        """One that works, unless told otherwise; its device node."""
        place = len(self.devices) + 1
        gids = f"fe80::{place}:{self.number}", f"::ffff:198.18.{place}.{self.number}"
        device = self.devices[name] = self.fabric.add_device(name, *gids)
        rows = {i: (ipaddress.IPv6Address(g).exploded, V2, "eth0") for i, g in enumerate(gids)}
        if not address:
            rows = {0: ("0000:" * 7 + "0000", "", "")}
        if not state.endswith("ACTIVE"):
            device.set_port(active=False)
        self.known.append(name)
        return self.tree.add(name, rows, state=state, node=node)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """What is opened within is opened on this host."""
        provider = ScriptedProvider(self.fabric, self.known)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "system_provider", lambda: (provider, PathReason.OK, ""))
            for module in (opening, discovery):
                patch.setattr(module, "discover", self.tree.look)
            yield

    def check_nothing_left(self) -> None:
        """Its devices were used as they may be, and hold nothing any more."""
        for name, device in self.devices.items():
            counters = device.counters()
            assert not counters.misuse, (name, counters)
            assert counters.live_objects == 0, (name, counters)


class HostPair:
    """Two hosts with a device each, and an engine on either; the first is the source. Afterwards
    nothing may be left.
    """

    def __init__(self, hosts: list[FakeHost], engines: list[orbit.TransferEngine]) -> None:
        self.hosts = hosts
        self.engines = engines
        self.memory: list[bytearray] = []
        self.regions: list[orbit.EngineRegion] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls,
        root: Path,
        prepare: Callable[[list[FakeHost]], object] = list,
        *,
        nbytes: int = (2 << 20) + 17,
        **changes: Any,
    ) -> AsyncIterator[HostPair]:
        """With a region of `nbytes` on each. `prepare` is called before anything is opened;
        `changes`: of the engines' configuration.
        """
        fabric = ScriptedFabric()
        hosts = [FakeHost(fabric, number, root / f"{number}") for number in (1, 2)]
        for host in hosts:
            host.add(f"dev{host.number}")
        prepare(hosts)
        rails = max(len(host.devices) for host in hosts)
        config = orbit.EngineConfig.for_bytes(2 * nbytes, rails=rails, **changes)
        async with nothing_left(), contextlib.AsyncExitStack() as stack:
            engines = []
            for host in hosts:
                with host.here():
                    engine = orbit.TransferEngine(config)
                    engines.append(await stack.enter_async_context(engine))
            pair = cls(hosts, engines)
            for number, engine in enumerate(engines):
                pair.memory.append(bytearray(pattern(nbytes, number)))
                pair.regions.append(await engine.register(pair.memory[-1], "readwrite"))
            await engines[1].open_peer(engines[0].address)
            yield pair
        for host in hosts:
            host.check_nothing_left()

    def request(self, op: str, low: int = 0, high: int | None = None) -> orbit.TransferRequest:
        """Of the same bytes on both sides, by RDMA."""
        there, here = self.regions
        return orbit.TransferRequest(op, here[low:high], there.remote()[low:high], "rdma", 20.0)

    async def move(self, *ops: str) -> None:
        """Each over the whole of both regions. Raises what a transfer raised."""
        far, near = self.memory
        for number, op in enumerate(ops):
            near[: len(near) // 2] = pattern(len(near) // 2, number + 2)
            (result,) = await self.engines[1].submit(self.request(op))
            assert result.nbytes == len(near)
            assert near == far
