"""The links between the lab's two hosts, as tests change them: down, slow or lossy, under other
addresses, with other packet sizes.

Rail `n` is the link between a<n> and b<n>, which both stay in the first network namespace. What a
test changed is put back by its context manager.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from orbit.softroce.topology import Role

# About 3 MB/s, so that something can happen in the middle of a transfer.
SLOW = ("tbf", "rate", "25mbit", "burst", "64kb", "limit", "16mb")
SLOWER = ("tbf", "rate", "8mbit", "burst", "64kb", "limit", "16mb")
ENDS: tuple[Role, ...] = ("A", "B")
_NUMBER: dict[Role, int] = {"A": 1, "B": 2}  # last byte of an end's address
ROCE_PORT = "4791"


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"


def netdev(end: Role, rail: int) -> str:
    return f"{end.lower()}{rail}"


def device(end: Role, rail: int) -> str:
    return f"rx{end.lower()}{rail}"


def take_down(rail: int) -> None:
    """One end; the other one loses its carrier, so both ports go."""
    run("orbit-link", netdev("A", rail), "down")


def bring_up(rail: int) -> None:
    run("orbit-link", netdev("A", rail), "up")
    run("orbit-link", netdev("B", rail), "up")  # its route and neighbour


@contextlib.contextmanager
def down(*rails: int) -> Iterator[None]:
    try:
        for rail in rails:
            take_down(rail)
        yield
    finally:
        for rail in rails:
            bring_up(rail)


@contextlib.contextmanager
def shaped(*netdevs: str, shape: tuple[str, ...] = SLOW) -> Iterator[None]:
    """What these ends send."""
    with contextlib.ExitStack() as stack:
        for name in netdevs:
            run("tc", "qdisc", "add", "dev", name, "root", *shape)
            stack.callback(run, "tc", "qdisc", "del", "dev", name, "root")
        yield


@contextlib.contextmanager
def dropped(*netdevs: str) -> Iterator[None]:
    """All RDMA packets that these ends send; the ports stay as they are."""
    with contextlib.ExitStack() as stack:
        for name in netdevs:
            run("tc", "qdisc", "add", "dev", name, "clsact")
            stack.callback(run, "tc", "qdisc", "del", "dev", name, "clsact")
            match = ("match", "ip", "protocol", "17", "0xff", "match", "ip", "dport", ROCE_PORT)
            filters = ("tc", "filter", "add", "dev", name, "egress", "protocol", "ip", "u32")
            run(*filters, *match, "0xffff", "action", "drop")
        yield


@contextlib.contextmanager
def mtu(sizes: dict[str, int], usual: int = 4200) -> Iterator[None]:
    try:
        for name, size in sizes.items():
            run("ip", "link", "set", name, "mtu", str(size))
        yield
    finally:
        for name in sizes:
            run("ip", "link", "set", name, "mtu", str(usual))


def address(end: Role, rail: int, shift: int = 0, net: int | None = None) -> str:
    """The one from the start, or another one in the rail's subnet, or in that of rail `net`."""
    return f"198.18.{rail if net is None else net}.{_NUMBER[end] + shift}"


def gid(end: Role, rail: int, shift: int = 0) -> str:
    return f"::ffff:{address(end, rail, shift)}"


def _masked(end: Role, rail: int, shift: int, net: int | None) -> str:
    # A second address of one subnet would go together with the first one.
    return f"{address(end, rail, shift, net)}/{32 if shift else 24}"


def add_address(end: Role, rail: int, *, shift: int = 0, net: int | None = None) -> None:
    """With the way to it from the rail's other end, through the link."""
    text, other = address(end, rail, shift, net), ENDS[end == "A"]
    table = str(202 + 2 * rail - _NUMBER[end])  # of packets to that end, see layout.sh
    here, there = netdev(end, rail), netdev(other, rail)
    mac = f"02:0b:00:00:{rail:02x}:{_NUMBER[end]:02x}"
    run("ip", "addr", "add", _masked(end, rail, shift, net), "dev", here)
    run("ip", "route", "replace", text, "dev", there, "table", table)
    run("ip", "neigh", "replace", text, "lladdr", mac, "dev", there)
    run("ip", "rule", "add", "pref", "10", "iif", "lo", "to", text, "lookup", table)


def remove_address(end: Role, rail: int, *, shift: int = 0, net: int | None = None) -> None:
    text = address(end, rail, shift, net)
    run("ip", "addr", "del", _masked(end, rail, shift, net), "dev", netdev(end, rail))
    run("ip", "rule", "del", "pref", "10", "iif", "lo", "to", text)


def counter(name: str, which: str) -> int:
    """One of a device's own."""
    return int(Path(f"/sys/class/infiniband/{name}/ports/1/hw_counters/{which}").read_text())


def sent_pkts(*rails: int) -> dict[int, int]:
    """Packets that both devices of each rail have sent."""
    return {rail: sum(counter(device(end, rail), "sent_pkts") for end in ENDS) for rail in rails}
