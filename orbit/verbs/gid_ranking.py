"""Which GID of a port to use: a pure ranking with its explanation, entry by entry.

RoCE v2 goes before v1; a routable address before a link-local one; then the family that the peer
has, a netdev that is here, up and holds the address, IPv4 before IPv6, and the lower index. It
reads nothing: entries and netdevs are given.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class GidKind(StrEnum):
    INFINIBAND = "InfiniBand"
    ROCE_V1 = "RoCE v1"
    ROCE_V2 = "RoCE v2"


class AddressClass(IntEnum):
    """Smaller is better."""

    FABRIC = 0  # InfiniBand: no IP address is involved
    IPV4 = 1
    IPV6 = 2  # global or unique-local
    LINK_LOCAL = 3  # IPv4 169.254/16 too
    UNUSABLE = 4  # multicast, loopback, unspecified


class Family(StrEnum):
    IPV4 = "IPv4"
    IPV6 = "IPv6"


class Presence(IntEnum):
    """What is known of the entry's netdev. Smaller is better."""

    HOLDS_ADDRESS = 0
    UP = 1
    OVERLAY = 2  # up or not: its addresses are often somebody else's too
    DOWN = 3
    ELSEWHERE = 4  # not in this network namespace
    UNKNOWN = 5  # the entry names none


# Interfaces that tunnels and container networks make. Their addresses may stand on a physical port
# as well, and RDMA packets do not go through most of them.
_OVERLAY_PREFIXES = ("vxlan", "flannel", "cni", "cali", "docker", "tunl", "virbr", "lxc", "br-")


@dataclass(frozen=True, slots=True)
class Netdev:
    """A network interface of this namespace. `addresses` are canonical texts."""

    up: bool
    addresses: frozenset[str] = frozenset()
    mtu: int = 0


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One non-empty row of a port's GID table."""

    index: int
    gid: str  # canonical, see `gid_text`
    kind: GidKind
    netdev: str = ""  # empty: the row names none


@dataclass(frozen=True, slots=True)
class RankedGid:
    """A row with its place. `why` explains it in the order of the criteria."""

    entry: GidEntry
    address_class: AddressClass
    presence: Presence
    why: tuple[str, ...]
    key: tuple[int, ...]

    @property
    def usable(self) -> bool:
        return self.address_class is not AddressClass.UNUSABLE

    @property
    def warning(self) -> str:
        """Not empty when the choice works only under a condition that nobody checks."""
        if self.entry.kind is GidKind.ROCE_V1:
            return f"GID {self.entry.index} is RoCE v1: it works inside one Ethernet segment only"
        if self.address_class is AddressClass.LINK_LOCAL:
            return f"GID {self.entry.index} is link-local: both ends must share the link"
        return ""

    def __str__(self) -> str:
        where = f" on {self.entry.netdev}" if self.entry.netdev else ""
        return f"GID {self.entry.index} {self.entry.gid}{where} ({'; '.join(self.why)})"


def rank_gids(
    entries: Sequence[GidEntry],
    netdevs: Mapping[str, Netdev],
    *,
    netdev: str | None = None,
    peer_families: Collection[Family] = (),
) -> tuple[RankedGid, ...]:
    """Best first. `netdev` keeps only rows of that interface. `peer_families` (empty: unknown) are
    what the peer's own rails offer."""
    kept = [e for e in entries if netdev is None or e.netdev == netdev]
    ranked = (_rank(entry, netdevs, peer_families) for entry in kept)
    return tuple(sorted(ranked, key=lambda r: r.key))


def _rank(
    entry: GidEntry, netdevs: Mapping[str, Netdev], peer_families: Collection[Family]
) -> RankedGid:
    address_class = _classify(entry)
    presence = _presence(entry, netdevs)
    why = [str(entry.kind)]
    mismatch = 0
    if address_class is not AddressClass.FABRIC:
        why += [_CLASS_WORDS[address_class], _presence_words(entry.netdev, presence)]
        family = family_of(entry.gid)
        if peer_families and family not in peer_families:
            mismatch = 1
            why.append(f"the peer has no {family}")
    key = (
        int(address_class is AddressClass.UNUSABLE),
        int(entry.kind is GidKind.ROCE_V1),
        int(address_class is AddressClass.LINK_LOCAL),
        mismatch,
        int(presence),
        int(address_class),
        entry.index,
    )
    return RankedGid(entry, address_class, presence, tuple(why), key)


def _classify(entry: GidEntry) -> AddressClass:
    if entry.kind is GidKind.INFINIBAND:
        return AddressClass.FABRIC
    address = address_of(entry.gid)
    if address.is_unspecified or address.is_loopback or address.is_multicast:
        return AddressClass.UNUSABLE
    if address.is_link_local:
        return AddressClass.LINK_LOCAL
    # Private ranges are as routable as any: a cluster's network usually is one.
    return AddressClass.IPV4 if address.version == 4 else AddressClass.IPV6


def _presence(entry: GidEntry, netdevs: Mapping[str, Netdev]) -> Presence:
    if not entry.netdev:
        return Presence.UNKNOWN
    found = netdevs.get(entry.netdev)
    if found is None:
        return Presence.ELSEWHERE
    if not found.up:
        return Presence.DOWN
    if entry.netdev.startswith(_OVERLAY_PREFIXES):
        return Presence.OVERLAY
    held = str(address_of(entry.gid)) in found.addresses
    return Presence.HOLDS_ADDRESS if held else Presence.UP


_CLASS_WORDS = {
    AddressClass.IPV4: "routable IPv4",
    AddressClass.IPV6: "routable IPv6",
    AddressClass.LINK_LOCAL: "link-local",
    AddressClass.UNUSABLE: "not a unicast address",
}


def _presence_words(netdev: str, presence: Presence) -> str:
    return {
        Presence.HOLDS_ADDRESS: f"{netdev} is up and holds the address",
        Presence.UP: f"{netdev} is up but does not hold the address",
        Presence.OVERLAY: f"{netdev} looks like an overlay",
        Presence.DOWN: f"{netdev} is down",
        Presence.ELSEWHERE: f"{netdev} is not in this network namespace",
        Presence.UNKNOWN: "no interface is named",
    }[presence]


def gid_text(raw: bytes) -> str:
    """16 bytes as canonical text; IPv4-mapped ones end in dotted form, on every Python."""
    return socket.inet_ntop(socket.AF_INET6, raw)


def gid_bytes(text: str) -> bytes:
    """Inverse of `gid_text`; takes any IPv6 spelling. Raises ValueError."""
    return ipaddress.IPv6Address(text).packed


def address_of(gid: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IP address that a RoCE GID stands for."""
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def family_of(gid: str) -> Family:
    return Family.IPV4 if address_of(gid).version == 4 else Family.IPV6
