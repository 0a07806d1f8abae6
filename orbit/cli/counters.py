"""Packet counters of software RDMA devices, as proof that bytes went over one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .failures import LocalFileError

_INFINIBAND = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")
_SENT = re.compile(r"\bsent_pkts (\d+)")
# A path MTU is one of these, and the device keeps 80 bytes of the link's MTU for its headers.
_PATH_MTUS = (4096, 2048, 1024, 512, 256)
_HEADER_BYTES = 80


def rxe_devices(prefix: str) -> tuple[str, ...]:
    """Names of the devices of one lab host."""
    if not _INFINIBAND.is_dir():
        return ()
    return tuple(sorted(p.name for p in _INFINIBAND.iterdir() if p.name.startswith(prefix)))


def packets_sent(devices: Sequence[str]) -> int:
    """Packets that these devices have sent since they exist."""
    return sum(_sent(device) for device in devices)


def packets_needed(nbytes: int, devices: Sequence[str]) -> int:
    """The fewest packets that can carry that many bytes over the widest of these devices."""
    if not devices:
        return 0
    return -(-nbytes // max(_path_mtu(device) for device in devices))


def _sent(device: str) -> int:
    counter = _INFINIBAND / device / "ports" / "1" / "hw_counters" / "sent_pkts"
    try:
        return int(counter.read_text())
    except OSError:
        pass  # not every network namespace shows it; the rdma tool asks the kernel directly
    command = ["rdma", "statistic", "show", "link", f"{device}/1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalFileError(f"{device}: the packet counter cannot be read: {error}") from error
    match = _SENT.search(done.stdout)
    if match is None:
        raise LocalFileError(f"{device}: no sent_pkts among its counters")
    return int(match[1])


def _path_mtu(device: str) -> int:
    try:
        link = (_INFINIBAND / device / "parent").read_text().strip()
        room = int((_NET / link / "mtu").read_text()) - _HEADER_BYTES
    except (OSError, ValueError):
        return _PATH_MTUS[0]  # the widest: asks for the fewest packets
    return next((mtu for mtu in _PATH_MTUS if mtu <= room), _PATH_MTUS[-1])
