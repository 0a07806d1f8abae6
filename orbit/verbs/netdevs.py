"""The network interfaces of this namespace: names, up or down, MTU and addresses, by rtnetlink.

Sysfs shows the interfaces of whoever mounted it, so it cannot answer for a process in another
namespace; the kernel's route socket can. Anything but Linux has none.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

from ..errors import DeviceError
from .gid_ranking import Netdev

_RTM_NEWLINK, _RTM_GETLINK = 16, 18
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFLA_IFNAME, _IFLA_MTU = 3, 4
_IFA_ADDRESS, _IFA_LOCAL = 1, 2

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBi")  # family, prefix length, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # length, type


def read_netdevs() -> dict[str, Netdev]:
    """By name. Raises DeviceError when the kernel does not answer."""
    if not hasattr(socket, "AF_NETLINK"):
        return {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as route:
            route.settimeout(2.0)
            links = dict(map(_parse_link, _dump(route, _RTM_GETLINK, _LINK)))
            addresses: dict[int, set[str]] = {}
            for index, address in map(_parse_address, _dump(route, _RTM_GETADDR, _ADDRESS)):
                addresses.setdefault(index, set()).add(address)
    except (OSError, struct.error) as error:
        raise DeviceError(
            "netlink", "listing interfaces", getattr(error, "errno", 0) or 0, str(error)
        ) from error
    return {
        name: Netdev(up, frozenset(addresses.get(index, ())), mtu)
        for index, (name, up, mtu) in links.items()
    }


def _dump(route: socket.socket, request: int, shape: struct.Struct) -> Iterator[bytes]:
    """Payloads of one dump: a fixed part of `shape` and attributes behind it."""
    body = bytes(shape.size)  # all families, all interfaces
    route.send(_HEADER.pack(_HEADER.size + len(body), request, _REQUEST_DUMP, 1, 0) + body)
    while True:
        data = route.recv(1 << 17)
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
            payload = data[offset + _HEADER.size : offset + length]
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                errno = -int(struct.unpack_from("=i", payload)[0])
                raise OSError(errno, os.strerror(errno))
            if kind in (_RTM_NEWLINK, _RTM_NEWADDR):
                yield payload
            offset += max((length + 3) & ~3, _HEADER.size)


def _parse_link(payload: bytes) -> tuple[int, tuple[str, bool, int]]:
    _, _, index, flags, _ = _LINK.unpack_from(payload)
    attributes = _attributes(payload, _LINK.size)
    name = attributes.get(_IFLA_IFNAME, b"").rstrip(b"\0").decode("utf-8", "surrogateescape")
    (mtu,) = struct.unpack("=I", attributes.get(_IFLA_MTU, bytes(4)))
    return index, (name, flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING, mtu)


def _parse_address(payload: bytes) -> tuple[int, str]:
    _, _, _, _, index = _ADDRESS.unpack_from(payload)
    attributes = _attributes(payload, _ADDRESS.size)
    # On a point-to-point link IFA_ADDRESS is the other end; IFA_LOCAL is always this one.
    raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS, bytes(4))
    return index, str(ipaddress.ip_address(raw))


def _attributes(payload: bytes, offset: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while offset + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if length < _ATTRIBUTE.size:
            break
        found[kind & 0x3FFF] = payload[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return found
