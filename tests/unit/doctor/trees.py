"""A made-up host for the checks: healthy as it comes, to be spoiled in one place by a test."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

from orbit.doctor.host import Host, Limits, Netdev, VerbsFacts
from orbit.errors import ConfigError
from tests.unit.verbs.test_discovery import V1, V2, Tree

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
LIBIBVERBS = "/opt/verbs/libibverbs.so.1.14.44.0"
ROCE, INFINIBAND = "mlx5_0", "mlx5_1"
Gids = dict[int, tuple[str, str, str]]

_STATUS = "CapEff:\t{eff}\nCapBnd:\t{bnd}\nCpus_allowed_list:\t{cpus}"
_DPKG = "Package: libibverbs1\nStatus: ok\nVersion: 44.0-2\n\n"
_DPKG += "Package: python3-pyverbs\nStatus: ok\nVersion: {}\n\nPackage: x\nVersion: 1\n"


def mapped(address: str) -> str:
    """The GID of an IPv4 address, as the kernel writes it."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


GOOD_GIDS: Gids = {
    0: (LINK_LOCAL, V1, "eth0"),
    1: (LINK_LOCAL, V2, "eth0"),
    2: (mapped("10.0.0.1"), V1, "eth0"),
    3: (mapped("10.0.0.1"), V2, "eth0"),
    4: (EMPTY, "", ""),
}


class FakeHost:
    """A server with a RoCE card on node 0 and an InfiniBand card on node 1, unprivileged user."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = Tree(root)
        self.netdevs: dict[str, Netdev] = {
            "lo": Netdev(True, frozenset({"127.0.0.1"}), 65_536),
            "eth0": Netdev(True, frozenset({"10.0.0.1", "fe80::ff:fe00:1"}), 9000),
        }
        self.memlock: Limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        self.environment: dict[str, str] = {}
        self.helper = {"helper": "/orbit/_native.so"}
        self.pyverbs = {"pyverbs": "/usr/lib/python3/dist-packages/pyverbs"}
        self.listed: tuple[str, ...] | None = None  # None: whatever is there
        self.loaded: Mapping[str, tuple[str, ...]] = {"libibverbs": (LIBIBVERBS,)}
        self.taken: ConfigError | None = None
        self._kernel()

    @classmethod
    def healthy(cls, root: Path) -> FakeHost:
        host = cls(root)
        host.roce()
        fabric = "fe80:0000:0000:0000:e41d:2d03:0000:0001"
        host.tree.add(INFINIBAND, {0: (fabric, "", "")}, link_layer="InfiniBand", lid="0x5")
        host.write(f"sys/class/infiniband/{INFINIBAND}/ports/1/sm_lid", "0x1")
        host.card(INFINIBAND, node=1)
        for name in (ROCE, INFINIBAND):
            port = f"sys/class/infiniband/{name}/ports/1"
            host.write(f"{port}/rate", "100 Gb/sec (4X EDR)")
            host.write(f"{port}/phys_state", "5: LinkUp")
        host.write("dev/rdma_cm", "")
        return host

    def roce(self, gids: Gids | None = None, name: str = ROCE, **port: object) -> None:
        self.tree.add(name, GOOD_GIDS if gids is None else gids, **port)  # type: ignore[arg-type]
        self.card(name, node=0)
        self.write(f"sys/class/infiniband/{name}/device/net/eth0/mtu", "9000")

    def rxe(self, name: str = "rxe0", netdev: str = "eth0", **port: object) -> None:
        self.tree.add(name, {1: (mapped("10.0.0.1"), V2, netdev)}, **port)  # type: ignore[arg-type]
        self.write(f"sys/class/infiniband/{name}/parent", netdev)

    def card(self, name: str, node: int, *, relaxed: bool = True, width: str = "16") -> None:
        device = f"sys/class/infiniband/{name}/device"
        self.write(f"{device}/vendor", "0x15b3")
        self.write(f"{device}/numa_node", str(node))
        self.write(f"{device}/iommu_group/type", "identity")
        speed = "16.0 GT/s PCIe"
        for what, now, most in (("width", width, "16"), ("speed", speed, speed)):
            self.write(f"{device}/current_link_{what}", now)
            self.write(f"{device}/max_link_{what}", most)
        space = bytearray(256)
        space[0x34], space[0x60], space[0x68] = 0x60, 0x10, 0x10 if relaxed else 0
        (self.root / device / "config").write_bytes(space)

    def status(self, *, eff: str = "0", bnd: str = "0", cpus: str = "0-7") -> None:
        self.write("proc/self/status", _STATUS.format(eff=eff, bnd=bnd, cpus=cpus))

    def package(self, version: str) -> None:
        self.write("dpkg", _DPKG.format(version))

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def namespace(self, process: str, number: int) -> None:
        link = self.root / "proc" / process / "ns/net"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"net:[{number}]")

    def remove(self, file: str) -> None:
        (self.root / file).unlink()

    def host(self) -> Host:
        return Host(
            sysfs=self.root / "sys",
            proc=self.root / "proc",
            etc=self.root / "etc",
            usr=self.root / "usr",
            nodes=self.root / "dev",
            modules=self.root / "modules",
            packages=self.root / "dpkg",
            memlock=lambda: self.memlock,
            netdevs=lambda: self.netdevs,
            environment=self.environment,
            verbs=self._verbs,
            listen=self._listen,
        )

    def _verbs(self) -> VerbsFacts:
        broken = any("problem" in name for name in (*self.helper, *self.pyverbs))
        there = tuple(sorted(p.name for p in (self.root / "sys/class/infiniband").glob("*")))
        devices = there if self.listed is None else self.listed
        return VerbsFacts(
            **self.helper,
            **self.pyverbs,
            devices=devices if self.pyverbs and not broken else None,
            loaded=tuple(self.loaded.items()),
        )

    def _listen(self, _host: str, _port: int) -> None:
        if self.taken is not None:
            raise self.taken

    def _kernel(self) -> None:
        self.status()
        self.package("44.0-2")
        for file, text in {
            "usr/include/infiniband/verbs.h": "",
            "usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so": "",
            "proc/meminfo": "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\nHugePages_Free: 0",
            "proc/self/cgroup": "0::/user.slice/session.scope",
            "proc/1/cgroup": "0::/init.scope",
            "proc/sys/vm/max_map_count": "65530",
            "proc/sys/vm/overcommit_memory": "0",
            "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
            "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304",
            "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999",
            "proc/sys/net/ipv4/tcp_congestion_control": "cubic",
            "proc/sys/net/core/somaxconn": "4096",
            "proc/sys/kernel/hostname": "server",
            "proc/sys/kernel/osrelease": "6.1.0-1-cloud-amd64",
            "sys/fs/cgroup/user.slice/memory.max": "max",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/module/ib_core/parameters/netns_mode": "Y",
            "sys/devices/system/node/node0/cpulist": "0-3",
            "sys/devices/system/node/node1/cpulist": "4-7",
            "etc/hosts": "127.0.0.1 localhost\n10.0.0.1 server  # static",
        }.items():
            self.write(file, text)
