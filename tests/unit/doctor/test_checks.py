"""The checks on made-up hosts: each trouble has its code, level and fix, with no "ok" beside it;
and a healthy host raises no alarm."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit.config import MIB, NodeConfig, RdmaConfig
from orbit.doctor.checks import host_findings
from orbit.doctor.finding import Finding, Level
from orbit.doctor.host import Host, Netdev
from orbit.doctor.verdict import rdma_verdict
from orbit.errors import ConfigError
from orbit.model import Transport
from tests.unit.doctor.trees import (
    GOOD_GIDS,
    INFINIBAND,
    LIBIBVERBS,
    LINK_LOCAL,
    ROCE,
    V1,
    V2,
    FakeHost,
    mapped,
)

WARN, FAIL, SKIPPED = Level.WARN, Level.FAIL, Level.SKIPPED
RXE = NodeConfig(rdma=RdmaConfig(device="rxe0"))
RDMA = NodeConfig(transport="rdma")
ROUTABLE_V6 = "fd00:0000:0000:0000:0000:0000:0000:0005"

Spoil = Callable[[FakeHost], object]


def look(host: FakeHost, config: NodeConfig | None = None) -> list[Finding]:
    return host_findings(host.host(), config or NodeConfig())


def by_code(found: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code]


def test_a_healthy_host_raises_no_alarm(tmp_path: Path) -> None:
    found = look(FakeHost.healthy(tmp_path))
    assert [f for f in found if f.level >= WARN] == []
    assert {f.code for f in found if f.level is SKIPPED} == {"no_gpu", "mtu_not_in_sysfs"}
    assert [f.data["device"] for f in by_code(found, "device_usable")] == [ROCE, INFINIBAND]


def test_the_name_that_debian_gives_each_host_is_no_alarm(tmp_path: Path) -> None:
    host = FakeHost.healthy(tmp_path)
    host.write("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 server.example server")
    for config in (NodeConfig(), NodeConfig(listen="0.0.0.0:0"), NodeConfig(listen="localhost:0")):
        found = look(host, config)
        assert [f for f in found if f.level >= WARN] == []
        assert "do not advertise it" in by_code(found, "hostname_ok")[0].text


def test_of_a_copied_sysfs_the_device_nodes_are_not_known(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.roce()
    found = host_findings(Host.at(tmp_path / "sys"), RDMA)
    assert next(f.code for f in found if f.data.get("device") == ROCE) == "device_untried"
    assert not {"device_no_node", "nodes_not_passed"} & {f.code for f in found}


def test_without_a_device_its_surroundings_are_not_judged(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    _memlock(8)(host)
    host.write("proc/meminfo", "MemTotal: 900000 kB\nMemAvailable: 500000 kB")
    assert {f.code for f in look(host) if f.level >= WARN} == {"no_device"}


def test_a_host_of_which_nothing_can_be_read_has_no_ok_about_it(tmp_path: Path) -> None:
    found = host_findings(Host.at(tmp_path / "nothing"), NodeConfig())
    fine = {f.code for f in found if f.level is Level.OK}
    assert fine == {"python", "environment_ok", "listen_loopback"}
    assert by_code(found, "no_device")[0].level is WARN


def _attribute(file: str, text: str) -> Spoil:
    return lambda host: host.write(file, text)


def _set(**values: Any) -> Spoil:
    def spoil(host: FakeHost) -> None:
        for name, value in values.items():
            setattr(host, name, value)

    return spoil


def _port(device: str, file: str, text: str) -> Spoil:
    return _attribute(f"sys/class/infiniband/{device}/ports/1/{file}", text)


def _netdev(name: str, **changes: Any) -> Spoil:
    def spoil(host: FakeHost) -> None:
        old = host.netdevs.get(name, Netdev(True, frozenset({"10.0.0.1"}), 9000))
        host.netdevs[name] = replace(old, **changes)

    return spoil


def _memlock(mib: int, **caps: str) -> Spoil:
    def spoil(host: FakeHost) -> None:
        host.memlock = (mib * MIB, mib * MIB)
        host.status(**caps)

    return spoil


def _no_nodes(host: FakeHost) -> None:
    for node in host.tree.nodes.iterdir():
        node.unlink()


def _gpu(version: str) -> Spoil:
    return _attribute("proc/driver/nvidia/version", f"NVRM version: NVIDIA {version} 550.1")


TCP = "proc/sys/net/ipv4"
# What is wrong, the code, its level, and the codes of "ok" that must not stand beside it.
TROUBLES: dict[str, tuple[Spoil, NodeConfig | None, str, Level, str]] = {
    "helper not built": (
        _set(helper={"helper_problem": "without the native helper"}),
        None, "helper_missing", WARN, "helper_ok device_usable",
    ),
    "helper not built, RDMA demanded": (
        _set(helper={"helper_problem": "without the native helper"}),
        RDMA, "helper_missing", FAIL, "helper_ok device_usable",
    ),
    "helper of another version": (
        _set(helper={"helper": "/x.so", "helper_problem": "has ABI 2, expected 3"}),
        None, "helper_unusable", WARN, "helper_ok device_usable",
    ),
    "no pyverbs": (_set(pyverbs={}), None, "pyverbs_missing", WARN, "pyverbs_ok device_usable"),
    "pyverbs does not load": (
        _set(pyverbs={"pyverbs": "/p", "pyverbs_problem": "undefined symbol"}),
        None, "pyverbs_broken", WARN, "pyverbs_ok device_usable libibverbs_ok",
    ),
    "C32: two copies of libibverbs": (
        _set(loaded={"libibverbs": (LIBIBVERBS, "/w/orbit.libs/libibverbs-3f2a.so.1.14.44.0")}),
        None, "library_twice", FAIL, "",
    ),
    "C32: pyverbs of another release": (
        lambda host: host.package("39.0-1"), None, "pyverbs_mismatch", WARN, "libibverbs_ok",
    ),
    "C31: no drivers": (
        lambda host: host.remove("usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so"),
        None, "drivers_missing", WARN, "drivers_ok",
    ),
    "C31: the library has no driver for one": (
        _set(listed=(INFINIBAND,)), None, "device_no_provider", WARN, "",
    ),
    "C31: no node": (
        lambda host: host.roce(name="mlx5_2", node=False), None, "device_no_node", WARN, "",
    ),
    "C31: port down": (
        lambda host: host.roce(name="mlx5_2", state="1: DOWN"), None, "device_port_down", WARN, "",
    ),
    "C31: no GID": (lambda host: host.roce({}, "mlx5_2"), None, "device_no_gid", WARN, ""),
    "C31: a name that is not there": (_set(), RXE, "device_unknown", FAIL, ""),
    "C31: a list with a typing error": (
        _set(), NodeConfig(rdma=RdmaConfig(device=f"{ROCE},rxe9")), "device_unknown", FAIL, "",
    ),
    "C31: a name on the whitelist": (
        _set(), NodeConfig(rdma=RdmaConfig(whitelist=(ROCE, "rxe9"))),
        "whitelist_unknown", WARN, "",
    ),
    "a pin that nothing meets": (
        _set(), NodeConfig(rdma=RdmaConfig(pkey=0x8123)), "pin_refused", FAIL, "",
    ),
    "InfiniBand without a subnet manager": (
        _port(INFINIBAND, "state", "2: INIT"), None, "port_init", WARN, "",
    ),
    "LID 0": (_port(INFINIBAND, "lid", "0x0"), None, "lid_zero", WARN, "lid"),
    "LID 0 of a named device": (
        _port(INFINIBAND, "lid", "0x0"), NodeConfig(rdma=RdmaConfig(device=INFINIBAND)),
        "lid_zero", FAIL, "lid",
    ),
    "SM LID 0": (_port(INFINIBAND, "sm_lid", "0x0"), None, "sm_missing", WARN, "lid"),
    "one lane": (
        _port(INFINIBAND, "rate", "25 Gb/sec (1X EDR)"), None, "port_narrow", WARN, "",
    ),
    "slow slot": (
        lambda host: host.card(ROCE, 0, width="8"), None, "pci_link_slow", WARN, "",
    ),
    "C36: MTU 1500": (_netdev("eth0", mtu=1500), None, "mtu_small", WARN, "mtu_ok"),
    "limited membership": (
        _port(INFINIBAND, "pkeys/0", "0x7fff"), None, "pkey_limited", WARN, "",
    ),
    "no partition": (_port(INFINIBAND, "pkeys/0", "0x0"), None, "pkey_none", WARN, ""),
    "GID of another namespace": (
        lambda host: host.netdevs.pop("eth0"), None, "gid_elsewhere", WARN, "mtu_ok",
    ),
    "GID of an interface that is down": (
        _netdev("eth0", up=False), None, "gid_netdev_down", WARN, "",
    ),
    "GID that the interface does not hold": (
        _netdev("eth0", addresses=frozenset({"10.0.0.9"})), None, "gid_not_held", WARN, "",
    ),
    "no GID of use": (
        lambda host: host.roce({0: ("ff02::1", V2, "eth0")}, "mlx5_2"),
        None, "gid_none_usable", WARN, "",
    ),
    "a pinned GID of no use": (
        lambda host: host.roce({0: ("ff02::1", V2, "eth0")}, "mlx5_2"),
        NodeConfig(rdma=RdmaConfig(device="mlx5_2", gid_index=0)),
        "gid_unusable", FAIL, "gid_chosen",
    ),
    "memlock of 8 MiB": (_memlock(8), None, "memlock_below_arena", WARN, "memlock_ok"),
    "memlock of 8 MiB, IPC_LOCK bounding alone": (
        _memlock(8, bnd="4000"), RDMA, "memlock_below_arena", FAIL, "memlock_ok memlock_exempt",
    ),
    "memlock below the budget": (
        _memlock(512), None, "memlock_below_budget", WARN, "memlock_ok",
    ),
    "few mappings": (
        _attribute("proc/sys/vm/max_map_count", "2000"), None, "mappings_few", WARN, "",
    ),
    "little memory": (
        _attribute("proc/meminfo", "MemTotal: 900000 kB\nMemAvailable: 500000 kB"),
        None, "budget_above_ram", WARN, "ram_ok",
    ),
    "a small cgroup": (
        _attribute("sys/fs/cgroup/user.slice/memory.max", str(256 * MIB)),
        None, "cgroup_below_budget", WARN, "cgroup_ok",
    ),
    "no overcommit": (
        _attribute("proc/sys/vm/overcommit_memory", "2"), None, "overcommit_strict", WARN, "",
    ),
    "no huge pages": (
        _attribute("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
        None, "huge_pages_off", WARN, "huge_pages",
    ),
    "far from the card": (lambda host: host.status(cpus="4-7"), None, "numa_far", WARN, ""),
    "no relaxed ordering": (
        lambda host: host.card(ROCE, 0, relaxed=False), None, "relaxed_ordering_off", WARN, "",
    ),
    "a translating IOMMU": (
        lambda host: [
            host.write(f"sys/class/infiniband/{name}/device/iommu_group/type", "DMA-FQ")
            for name in (ROCE, INFINIBAND)
        ],
        None, "iommu_translates", WARN, "iommu_ok",
    ),
    "GPU without peer memory": (
        _gpu("x86_64 Kernel Module"), None, "no_peer_memory", SKIPPED, "peer_memory",
    ),
    "scatter to CQE": (
        _gpu("Open Kernel Module"), None,
        "scatter_to_cqe", SKIPPED, "peer_memory scatter_to_cqe_off",
    ),
    "no rxe module": (_set(), RXE, "rxe_module_missing", FAIL, ""),
    "rxe not loaded": (
        _attribute("modules/6.1.0-1-cloud-amd64/modules.dep", "kernel/sw/rxe/rdma_rxe.ko.xz: x"),
        RXE, "rxe_not_loaded", FAIL, "",
    ),
    "rxe loaded and no device": (
        _attribute("sys/module/rdma_rxe/refcnt", "0"), RXE, "rxe_no_device", FAIL, "",
    ),
    "C12: interface of rxe down": (
        lambda host: (_netdev("net1", up=False)(host), host.rxe(netdev="net1", state="1: DOWN")),
        None, "rxe_netdev_down", WARN, "rxe_netdev",
    ),
    "C12: interface of rxe elsewhere": (
        lambda host: host.rxe(netdev="net1"), None, "rxe_netdev_elsewhere", SKIPPED, "rxe_netdev",
    ),
    "C12: rxe in a namespace": (
        lambda host: (host.rxe(), host.namespace("self", 7), host.namespace("1", 1)),
        None, "rxe_namespace", WARN, "rxe_netdev",
    ),
    "C12: rxe in a container, which has a first process of its own": (
        lambda host: (
            host.rxe(), host.namespace("self", 7), host.namespace("1", 7),
            host.write("proc/1/cgroup", "0::/docker/5a"),
        ),
        None, "rxe_namespace_unknown", SKIPPED, "rxe_netdev",
    ),
    "a container without nodes": (
        _no_nodes, None, "nodes_not_passed", WARN, "device_usable rdma_cm port_active gid_chosen",
    ),
    "small receive buffers": (
        _attribute(f"{TCP}/tcp_rmem", "4096 131072 262144"), None, "tcp_buffer_small", WARN, "",
    ),
    "C40: few ports": (
        _attribute(f"{TCP}/ip_local_port_range", "50000 50031"), None,
        "ports_few", WARN, "ports_ok",
    ),
    "a small backlog": (
        _attribute("proc/sys/net/core/somaxconn", "64"), None, "backlog_small", WARN, "",
    ),
    "C25: host name of 127.0.1.1 is listened on": (
        _attribute("etc/hosts", "127.0.1.1 server.example server"),
        NodeConfig(listen="server.example:0"),
        "hostname_loopback", WARN, "hostname_ok listen_loopback",
    ),
    "C25: loopback advertised by address": (
        _set(), NodeConfig(listen="0.0.0.0:0", advertise="127.0.0.1"),
        "advertise_loopback", WARN, "advertise_ok",
    ),
    "C25: host name of 127.0.1.1 is advertised": (
        _attribute("etc/hosts", "127.0.1.1 server"),
        NodeConfig(listen="0.0.0.0:0", advertise="server"),
        "hostname_loopback", WARN, "hostname_ok advertise_ok",
    ),
    "nothing to advertise": (
        lambda host: host.netdevs.pop("eth0"), NodeConfig(listen="0.0.0.0:0"),
        "advertise_nothing", WARN, "advertise_ok",
    ),
    "not an address": (
        _set(), NodeConfig(listen="127.0.0.1:70000"), "address_invalid", FAIL, "listen_ok",
    ),
    "C26: port taken": (
        _set(taken=ConfigError("listen", "10.0.0.1:7000", "Address already in use")),
        NodeConfig(listen="10.0.0.1:7000"), "listen_refused", FAIL, "listen_ok",
    ),
    "a name that nothing reads": (
        _set(environment={"ORBIT_DEVIEC": "x"}), None,
        "environment_unknown", WARN, "environment_ok",
    ),
    "a pin that is no number": (
        _set(environment={"ORBIT_GID_INDEX": "three"}),
        None, "environment_invalid", FAIL, "environment_ok",
    ),
    "kill switch": (
        _set(environment={"ORBIT_RDMA_RENDEZVOUS_DISABLE": "1"}), None, "kill_switch", WARN, "",
    ),
    "fork protection": (
        _set(environment={"IBV_FORK_SAFE": "1"}), None, "fork_safe", WARN, "environment_ok",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_is_named_and_no_ok_stands_beside_it(name: str, tmp_path: Path) -> None:
    spoil, config, code, level, forbidden = TROUBLES[name]
    host = FakeHost.healthy(tmp_path)
    spoil(host)
    found = look(host, config)
    hits = by_code(found, code)
    assert {f.level for f in hits} == {level}, [f.code for f in found]
    assert all(f.fix for f in hits if f.level >= WARN)
    fine = {f.code for f in found if f.level is Level.OK}
    assert not fine & set(forbidden.split())


# --- C04: which GID -------------------------------------------------------------------------------

RANKINGS: dict[str, tuple[dict[int, tuple[str, str, str]], int, str]] = {
    "a": (GOOD_GIDS, 3, "gid_chosen"),
    "b": (
        {
            0: (LINK_LOCAL, V1, "eth0"),
            1: (LINK_LOCAL, V2, "eth0"),
            2: (ROUTABLE_V6, V1, "eth0"),
            3: (ROUTABLE_V6, V2, "eth0"),
        },
        3,
        "gid_chosen",
    ),
    "c": ({0: (LINK_LOCAL, V1, "eth0"), 1: (LINK_LOCAL, V2, "eth0")}, 1, "gid_link_local"),
    "d": (
        {
            2: (mapped("10.0.0.1"), V1, "vxlan0"),
            3: (mapped("10.0.0.1"), V2, "vxlan0"),
            4: (mapped("10.0.0.1"), V1, "eth0"),
            5: (mapped("10.0.0.1"), V2, "eth0"),
        },
        5,
        "gid_chosen",
    ),
    "d, overlay alone": ({3: (mapped("10.0.0.1"), V2, "vxlan0")}, 3, "gid_overlay"),
    "e": (
        {3: (mapped("10.0.0.7"), V2, "eth0"), 7: (mapped("10.0.0.1"), V2, "eth0")},
        7,
        "gid_chosen",
    ),
    "f, 172.16/12": ({0: (LINK_LOCAL, V2, "eth0"), 1: (mapped("172.16.0.5"), V2, "eth0")}, 1, ""),
    "f, 192.168/16": ({0: (LINK_LOCAL, V2, "eth0"), 1: (mapped("192.168.0.5"), V2, "eth0")}, 1, ""),
    "f, 100.64/10": ({0: (LINK_LOCAL, V2, "eth0"), 1: (mapped("100.64.0.5"), V2, "eth0")}, 1, ""),
    "v1 alone": ({0: (mapped("10.0.0.1"), V1, "eth0")}, 0, "gid_roce_v1"),
}


@pytest.mark.parametrize("name", RANKINGS)
def test_the_gid_that_is_taken_and_why_the_others_are_not(name: str, tmp_path: Path) -> None:
    gids, index, code = RANKINGS[name]
    host = FakeHost(tmp_path)
    host.roce(gids)
    addresses = frozenset({"10.0.0.1", "fd00::5", "172.16.0.5", "192.168.0.5", "100.64.0.5"})
    _netdev("eth0", addresses=addresses)(host)
    _netdev("vxlan0")(host)
    of_port = [f for f in look(host) if f.area == f"gids {ROCE}/1"]
    assert (of_port[0].code, of_port[0].data["index"]) == (code or "gid_chosen", index)
    others = by_code(of_port, "gid_other")
    rows = {i for i, (gid, _, _) in gids.items() if gid.strip("0:")}
    assert {f.data["index"] for f in others} == rows - {index}
    assert all("first" in f.text or "fits" in f.text for f in others)


def test_the_others_are_told_apart_by_the_criterion_that_decided(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.roce({**GOOD_GIDS, 5: (mapped("10.0.0.1"), V2, "eth0"), 6: (ROUTABLE_V6, V2, "eth0")})
    _netdev("eth0", addresses=frozenset({"10.0.0.1", "fd00::5"}))(host)
    why = {f.data["index"]: f.text.rpartition(": ")[2] for f in by_code(look(host), "gid_other")}
    assert why == {
        0: "RoCE v2 comes first",
        1: "routable addresses come first",
        2: "RoCE v2 comes first",
        5: "the lower index comes first",
        6: "IPv4 comes first",
    }


# --- what depends on what was asked for -----------------------------------------------------------


def test_permission_is_not_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost(tmp_path)
    host.roce()
    real, node = os.access, tmp_path / "dev/uverbs0"  # chmod 000, which root would not notice

    monkeypatch.setattr(os, "access", lambda file, mode: file != node and real(file, mode))
    (found,) = by_code(look(host), "device_permission")
    assert (found.level, found.data["verdict"]) == (WARN, "permission")
    assert by_code(look(host), "device_usable") == []
    assert by_code(look(host, RDMA), "device_permission")[0].level is FAIL
    named = NodeConfig(rdma=RdmaConfig(device=ROCE))
    assert [f.code for f in look(host, named) if f.level is FAIL] == ["device_permission"]


def test_one_unusable_device_is_no_failure_while_another_works(tmp_path: Path) -> None:
    host = FakeHost.healthy(tmp_path)
    host.roce(name="mlx5_2", node=False)
    found = look(host, RDMA)
    assert by_code(found, "device_no_node")[0].level is WARN
    assert not [f for f in found if f.level is FAIL]


def test_libraries_that_do_not_load_are_no_rdma(tmp_path: Path) -> None:
    host = FakeHost.healthy(tmp_path)
    verdict = rdma_verdict(host.host(), NodeConfig(), [])
    assert (verdict.code, verdict.level) == ("rdma_untried", SKIPPED)
    host.pyverbs = {"pyverbs": "/p", "pyverbs_problem": "undefined symbol"}
    verdict = rdma_verdict(host.host(), RDMA, [])
    assert (verdict.code, verdict.level) == ("rdma_missing", FAIL)
    assert "undefined symbol" in verdict.text


def test_a_name_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    (found,) = by_code(look(FakeHost.healthy(tmp_path), RXE), "device_unknown")
    assert found.data["valid"] == [ROCE, INFINIBAND]
    assert ROCE in found.text
    assert INFINIBAND in found.fix


def test_the_second_copy_is_listed(tmp_path: Path) -> None:
    host = FakeHost.healthy(tmp_path)
    other = "/w/orbit.libs/libibverbs-3f2a.so.1.14.44.0"
    host.loaded = {"libibverbs": (LIBIBVERBS, other)}
    (found,) = by_code(look(host), "library_twice")
    assert LIBIBVERBS in found.text
    assert other in found.text


def test_effective_ipc_lock_lifts_the_limit(tmp_path: Path) -> None:
    host = FakeHost.healthy(tmp_path)
    _memlock(8, eff="4000")(host)
    assert [f for f in look(host) if f.level >= WARN] == []


def test_tcp_alone_looks_at_no_device(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    _memlock(8)(host)
    found = look(host, NodeConfig(transport=Transport.TCP))
    assert [f for f in found if f.level >= WARN] == []
    assert by_code(found, "rdma_not_wanted")


def test_a_file_that_makes_no_sense_spoils_its_own_area_only(tmp_path: Path) -> None:
    host = FakeHost.healthy(tmp_path)
    host.write(f"{TCP}/tcp_rmem", "a b c")
    found = look(host)
    assert by_code(found, "unreadable")[0].area == "tcp"
    assert by_code(found, "listen_ok")
    assert not by_code(found, "tcp_buffer")
