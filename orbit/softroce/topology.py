"""The shape of a lab: how many hosts and virtual machines, how many rails, and what the links are
like.

A frozen, validated value and the variables by which the guest's scripts learn it. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orbit.errors import ConfigError

Role = Literal["A", "B"]

RAILS_MAX = 8
MTU_MIN, MTU_MAX = 576, 9000
NODES_MAX = 2  # of memory


@dataclass(frozen=True, slots=True)
class Topology:
    """`hosts` in one guest, or `vms` guests with one host each. `mtu_bytes` is the net devices'
    MTU: 1500 gives RoCE 1024 byte packets, 4200 the largest, 4096. `netem` are tc-netem words put
    on both ends of every rail. With `numa` memory nodes, rails are cards on these in turn."""

    hosts: int = 2
    vms: int = 1
    rails: int = 1
    mtu_bytes: int = 1500
    netem: str = ""
    numa: int = 1

    def __post_init__(self) -> None:
        if self.hosts not in (1, 2):
            raise ConfigError("hosts", self.hosts, "must be 1 or 2")
        if self.vms not in (1, 2):
            raise ConfigError("vms", self.vms, "must be 1 or 2")
        if self.vms == 2 and self.hosts == 1:
            raise ConfigError("vms", 2, "two virtual machines are two hosts: leave --hosts out")
        if not 1 <= self.rails <= RAILS_MAX:
            raise ConfigError("rails", self.rails, f"must be 1 to {RAILS_MAX}")
        if not MTU_MIN <= self.mtu_bytes <= MTU_MAX:
            raise ConfigError("mtu", self.mtu_bytes, f"must be {MTU_MIN} to {MTU_MAX}")
        if not 1 <= self.numa <= NODES_MAX:
            raise ConfigError("numa", self.numa, f"must be 1 to {NODES_MAX}")
        if self.numa > 1 and self.layout != "single":
            raise ConfigError(
                "numa", self.numa, "needs --hosts 1: links between hosts are no cards"
            )
        if "\n" in self.netem or "\0" in self.netem:
            raise ConfigError("netem", self.netem, "must be one line of tc-netem words")

    @property
    def layout(self) -> Literal["single", "pair", "machines"]:
        """The name by which the guest's scripts know the shape."""
        if self.vms == 2:
            return "machines"
        return "pair" if self.hosts == 2 else "single"

    def devices(self, role: Role = "A") -> tuple[str, ...]:
        """RDMA devices of one host. A lab of one host has rxe0 and up, whatever the role."""
        if self.layout == "single":
            return tuple(f"rxe{n}" for n in range(self.rails))
        return tuple(f"rx{role.lower()}{n}" for n in range(1, self.rails + 1))

    def guest_variables(self, role: Role) -> dict[str, str]:
        """What the guest's scripts and the command see. Only the ORBIT_ names reach the command."""
        return {
            "ORBIT_LAB": "1",
            "ORBIT_LAB_HOSTS": str(self.hosts),
            "ORBIT_LAB_VMS": str(self.vms),
            "ORBIT_LAB_RAILS": str(self.rails),
            "LAYOUT": self.layout,
            "ROLE": role,
            "RAILS": str(self.rails),
            "MTU": str(self.mtu_bytes),
            "NETEM": self.netem,
            "NUMA": str(self.numa),
        }

    def network_arguments(self, role: Role, sockets: str) -> list[str]:
        """QEMU arguments for the links of one of two machines, or for the cards of one with several
        memory nodes; none for another lab inside one guest. `sockets` is a folder with a short
        path: a unix socket's path has at most 107 bytes."""
        if self.numa > 1:
            return self._cards()
        if self.layout != "machines":
            return ["-nic", "none"]
        own, other, last = ("a", "b", 1) if role == "A" else ("b", "a", 2)
        arguments: list[str] = []
        for link in range(self.rails + 1):  # link 0 carries TCP, link n is rail n
            mac = f"52:54:00:0b:{link:02x}:{last:02x}"
            arguments += [
                "-netdev",
                f"dgram,id=link{link},local.type=unix,local.path={sockets}/{own}{link},"
                f"remote.type=unix,remote.path={sockets}/{other}{link}",
                "-device",
                f"virtio-net-pci,netdev=link{link},mac={mac},host_mtu=9000",
            ]
        return arguments

    def _cards(self) -> list[str]:
        """One for each rail, that nothing is connected to, behind a bridge of its memory node."""
        arguments: list[str] = []
        for node in range(self.numa):
            bridge = f"pxb,id=node{node},bus=pci.0,bus_nr={0x40 * (node + 1)},numa_node={node}"
            arguments += ["-device", bridge]
        for rail in range(self.rails):
            where = f"bus=node{rail % self.numa},addr={1 + rail // self.numa}"
            card = f"virtio-net-pci,netdev=link{rail},mac=52:54:00:0b:{rail:02x}:01,{where}"
            arguments += ["-netdev", f"hubport,id=link{rail},hubid={rail}"]
            arguments += ["-device", f"{card},host_mtu=9000"]
        return arguments
