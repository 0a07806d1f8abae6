"""From a discovery to the rails that a node uses: the best GID of each usable port, under pins.

A pin is strict: what it names is used or it is an error that lists the valid values; nothing else
is taken instead. Without pins unusable devices are skipped, and the reason is kept. A port that is
down but has an address is a rail all the same: it is opened, and waits. It reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from ..errors import ConfigError
from ..model import PathReason
from ..protocol.messages import RailHint
from .discovery import DeviceReport, Discovery, PortReport
from .gid_ranking import AddressClass, Family, RankedGid, gid_bytes, gid_text, rank_gids

_PKEY_DEFAULT = 0xFFFF
_PKEY_NUMBER_BITS = 0x7FFF  # the top bit only says full or limited member
# What precedes the payload in a RoCE v2 packet: IPv6 40, UDP 8, BTH 12, RETH 16, ICRC 4.
_ROCE_OVERHEAD_BYTES = 80
_PATH_MTUS = (4096, 2048, 1024, 512, 256)
NICS_MAX = 64  # a device mask has that many bits


@dataclass(frozen=True, slots=True)
class Pins:
    """What code or environment asked for by name. None and an empty text ask for nothing.

    `device` may list several names, separated by commas. `gid` is any IPv6 spelling. The lists are
    filters and no pins: a device that they leave out does not exist for the rest.
    """

    device: str | None = None
    port: int | None = None
    gid_index: int | None = None
    gid: str | None = None
    pkey: int | None = None
    netdev: str | None = None
    whitelist: tuple[str, ...] = ()
    blacklist: tuple[str, ...] = ()  # counts where the whitelist is empty

    def allows(self, device: str) -> bool:
        return device in self.whitelist if self.whitelist else device not in self.blacklist

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(n.strip() for n in (self.device or "").split(",") if n.strip())

    @property
    def any(self) -> bool:
        return bool(self.devices or self.port or self.gid or self.netdev) or (
            self.gid_index is not None or self.pkey is not None
        )


@dataclass(frozen=True, slots=True)
class RailChoice:
    """One port of one device with the GID that won, and the others of that port, best first. Not
    `active`: the port is down, and may come up.
    """

    rail: RailHint
    pkey_index: int  # where the port's table holds rail.pkey
    chosen: RankedGid
    runners_up: tuple[RankedGid, ...]
    nic: int = 0
    numa_node: int = -1
    pci_bridges: int = 0
    active: bool = True

    def __str__(self) -> str:
        others = "; then ".join(map(str, self.runners_up))
        text = f"{self.rail.device} port {self.rail.port}: {self.chosen}"
        return text + (f"; then {others}" if others else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """The rails to use, best first. Without any, `reason` and `detail` say why."""

    rails: tuple[RailChoice, ...]
    reason: PathReason
    detail: str = ""


def choose_rails(
    discovery: Discovery, pins: Pins | None = None, *, peer_families: Collection[Family] = ()
) -> Choice:
    """Raises ConfigError naming the pin and what would be valid. Without pins it never raises."""
    pins = pins or Pins()
    allowed = replace(discovery, devices=tuple(filter(_filter(pins), discovery.devices)))
    devices = _pinned_devices(discovery, allowed, pins)
    if not devices:
        if discovery.devices and not allowed.devices:
            return Choice((), PathReason.NO_DEVICE, _left_out(discovery, pins))
        return Choice((), allowed.reason, allowed.detail)
    wanted_gid = _pinned_gid(pins)
    rails = [
        choice
        for device in devices
        for port in _pinned_ports(device, pins)
        for choice in _choose_gid(device, port, discovery, pins, wanted_gid, peer_families)
    ]
    if not rails:
        if pins.any and any(_openable_ports(device) for device in devices):
            _refuse_combination(devices, pins)
        if allowed.reason is not PathReason.OK:
            return Choice((), allowed.reason, allowed.detail)
        return Choice((), PathReason.NO_GID, "no port has a GID that can be used")
    # Stable: equal ones stay in device order.
    rails.sort(key=lambda r: (not r.active, *r.chosen.key[:-1]))
    return Choice(tuple(rails), PathReason.OK, allowed.detail)


def _filter(pins: Pins) -> Callable[[DeviceReport], bool]:
    return lambda device: pins.allows(device.name)


def _left_out(discovery: Discovery, pins: Pins) -> str:
    names = ", ".join(device.name for device in discovery.devices)
    return f"the {'whitelist' if pins.whitelist else 'blacklist'} leaves none of {names}"


def _pinned_devices(
    discovery: Discovery, allowed: Discovery, pins: Pins
) -> tuple[DeviceReport, ...]:
    """Raises ConfigError for one that cannot be opened, or whose port is down and has no GID."""
    if not pins.devices:
        return tuple(device for device in allowed.devices if device.within_reach)
    by_name = {device.name: device for device in discovery.devices}
    valid = ", ".join(d.name for d in allowed.usable) or "none is usable"
    for name in pins.devices:
        device = by_name.get(name)
        if device is None:
            raise ConfigError("device", name, f"no such RDMA device; valid: {valid}")
        if not pins.allows(name):
            which = "is not in the whitelist" if pins.whitelist else "is in the blacklist"
            raise ConfigError("device", name, f"{which}; valid: {valid}")
        if not _openable_ports(device):
            problem = f"{device.verdict.value}: {device.detail}; valid: {valid}"
            raise ConfigError("device", name, problem)
    return tuple(by_name[name] for name in dict.fromkeys(pins.devices))


def _openable_ports(device: DeviceReport) -> list[PortReport]:
    """Ports with a GID, down or not: a rail that is down keeps its registrations and waits."""
    if not device.within_reach:
        return []
    return [port for port in device.ports if port.gids and port.nic < NICS_MAX]


def _pinned_ports(device: DeviceReport, pins: Pins) -> list[PortReport]:
    usable = _openable_ports(device)
    if pins.port is None:
        return usable
    kept = [p for p in usable if p.number == pins.port]
    if not kept and pins.devices:
        valid = ", ".join(str(p.number) for p in usable)
        problem = f"{device.name} has no usable port of that number; valid: {valid}"
        raise ConfigError("port", pins.port, problem)
    return kept


def _pinned_gid(pins: Pins) -> str | None:
    if not pins.gid:
        return None
    try:
        return gid_text(gid_bytes(pins.gid))
    except ValueError as error:
        problem = "not a GID; it is written like ::ffff:10.0.0.1 or fe80::1"
        raise ConfigError("gid", pins.gid, problem) from error


def _choose_gid(
    device: DeviceReport,
    port: PortReport,
    discovery: Discovery,
    pins: Pins,
    wanted_gid: str | None,
    peer_families: Collection[Family],
) -> list[RailChoice]:
    """One rail, or none when this port does not satisfy the pins."""
    ranked = rank_gids(
        port.gids, discovery.netdevs, netdev=pins.netdev or None, peer_families=peer_families
    )
    pinned = wanted_gid is not None or pins.gid_index is not None
    kept = [
        r
        for r in ranked
        if (wanted_gid is None or r.entry.gid == wanted_gid)
        and (pins.gid_index is None or r.entry.index == pins.gid_index)
        and (pinned or r.usable)
    ]
    partition = _partition(port, pins)
    if not kept or partition is None:
        return []
    chosen = kept[0]
    pkey_index, pkey = partition
    rail = RailHint(
        device=device.name,
        port=port.number,
        gid=chosen.entry.gid,
        gid_index=chosen.entry.index,
        mtu=_path_mtu(discovery, chosen),
        link_layer=port.link_layer,
        lid=port.lid,
        pkey=pkey,
    )
    others = tuple(r for r in ranked if r is not chosen)
    place = port.nic, device.numa_node, device.pci_bridges
    return [RailChoice(rail, pkey_index, chosen, others, *place, active=port.active)]


def _partition(port: PortReport, pins: Pins) -> tuple[int, int] | None:
    """Index and value of the partition key, or None when the port lacks the pinned one."""
    if pins.pkey is None:
        return 0, port.pkeys[0] if port.pkeys else _PKEY_DEFAULT
    for index, pkey in enumerate(port.pkeys):
        if pkey and pkey & _PKEY_NUMBER_BITS == pins.pkey & _PKEY_NUMBER_BITS:
            return index, pkey
    return None


def _refuse_combination(devices: Sequence[DeviceReport], pins: Pins) -> NoReturn:
    knob, value = next(
        (name, value)
        for name in ("gid", "gid_index", "netdev", "pkey", "port", "device")
        if (value := getattr(pins, name)) not in (None, "")
    )
    rows = [
        f"{d.name} port {p.number} GID {g.index} {g.gid}"
        + (f" on {g.netdev}" if g.netdev else "")
        + (f" pkeys {'/'.join(f'{key:#06x}' for key in p.pkeys if key)}" if pins.pkey else "")
        for d in devices
        for p in d.ports
        for g in p.gids
    ]
    raise ConfigError(knob, value, f"nothing matches all the pins; valid: {', '.join(rows)}")


def _path_mtu(discovery: Discovery, chosen: RankedGid) -> int:
    """An estimate for announcements; the opened port's active MTU replaces it."""
    netdev = discovery.netdevs.get(chosen.entry.netdev)
    if netdev is None or not netdev.mtu or chosen.address_class is AddressClass.FABRIC:
        return 1024  # what a 1500-byte Ethernet carries
    return roce_path_mtu(netdev.mtu)


def roce_path_mtu(netdev_mtu: int) -> int:
    """The path MTU, in bytes, that an interface of that MTU carries."""
    room = netdev_mtu - _ROCE_OVERHEAD_BYTES
    return next((mtu for mtu in _PATH_MTUS if mtu <= room), _PATH_MTUS[-1])
