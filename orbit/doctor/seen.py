"""What is read once and judged by several areas: the devices, the pins, the rails they give."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import NodeConfig
from ..errors import ConfigError
from ..model import Transport
from ..verbs.discovery import DeviceReport, Discovery, Verdict, discover, judged_by
from ..verbs.libraries import VerbsFacts
from ..verbs.rail_choice import Pins, RailChoice, choose_rails
from .advice import rdma_level
from .finding import Level
from .host import Host


@dataclass(frozen=True, slots=True)
class Seen:
    """`rails` is what a node would take; where the pins are `refused`, what it would without."""

    host: Host
    config: NodeConfig
    verbs: VerbsFacts | None
    discovery: Discovery
    pins: Pins
    rails: tuple[RailChoice, ...]
    refused: ConfigError | None

    @property
    def missing(self) -> Level:
        """What it is that RDMA cannot be had."""
        return rdma_level(self.config)

    @property
    def devices(self) -> tuple[DeviceReport, ...]:
        """Those that the lists of the configuration leave and that are not another container's."""
        return tuple(
            d
            for d in self.discovery.devices
            if self.pins.allows(d.name) and d.verdict is not Verdict.NO_NODE
        )

    def level_of(self, device: DeviceReport) -> Level:
        """What a fault of this one is: another is used instead, unless it was named or is all
        there is.
        """
        if device.name in self.pins.devices:
            return Level.FAIL
        others = (d for d in self.devices if d.name != device.name)
        return Level.WARN if any(d.verdict is Verdict.USABLE for d in others) else self.missing


def wants_rdma(config: NodeConfig) -> bool:
    return config.rdma.enabled and config.transport is not Transport.TCP


def look(host: Host, config: NodeConfig) -> Seen:
    """`config` as `resolve` gives it. Loads the verbs libraries if the host may be asked."""
    verbs = host.verbs() if host.verbs is not None and wants_rdma(config) else None
    found = discover(sysfs=host.sysfs, nodes=host.nodes, netdevs=host.netdevs)
    if verbs is not None and verbs.devices is not None:
        found = judged_by(found, verbs.devices)
    rdma = config.rdma
    pins = Pins(
        device=rdma.device,
        port=rdma.port,
        gid_index=rdma.gid_index,
        gid=rdma.gid,
        pkey=rdma.pkey,
        whitelist=rdma.whitelist,
        blacklist=rdma.blacklist,
    )
    try:
        rails, refused = choose_rails(found, pins).rails, None
    except ConfigError as error:
        unpinned = Pins(whitelist=pins.whitelist, blacklist=pins.blacklist)
        rails, refused = choose_rails(found, unpinned).rails, error
    return Seen(host, config, verbs, found, pins, rails, refused)


def netdevs_of(host: Host, device: str) -> tuple[str, ...]:
    """The interfaces that a RoCE device stands on, as sysfs names them."""
    folder = host.sysfs / "class/infiniband" / device
    if parent := host.read(folder / "parent"):  # of a software device
        return (parent,)
    return host.names(folder / "device/net")
