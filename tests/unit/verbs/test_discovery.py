"""Discovery and rail choice on fake trees: one verdict a device, and pins that are never bent."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orbit.errors import ConfigError, DeviceError
from orbit.model import PathReason
from orbit.verbs.discovery import Discovery, Verdict, discover, judged_by
from orbit.verbs.gid_ranking import Family, GidKind, Netdev
from orbit.verbs.netdevs import read_netdevs
from orbit.verbs.rail_choice import Choice, Pins, choose_rails

V1, V2 = "IB/RoCE v1", "RoCE v2"
_EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
_LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
_NO_GIDS = {0: (_EMPTY, "", "")}
_NETDEVS = {"eth0": Netdev(True, frozenset({"10.0.0.1"}), 1500)}


def _mapped(last: int) -> str:
    return f"0000:0000:0000:0000:0000:ffff:0a00:{last:04x}"


class Tree:
    """A fake /sys and /dev/infiniband."""

    def __init__(self, root: Path) -> None:
        self.sysfs = root / "sys"
        self.nodes = root / "dev"
        self.nodes.mkdir()
        self._count = 0

    def add(
        self,
        name: str,
        gids: dict[int, tuple[str, str, str]] | None = None,
        *,
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        lid: str = "0x0",
        pkeys: tuple[str, ...] = ("0xffff",),
        port: int = 1,
        node: bool = True,
    ) -> Path:
        """A port of a device (new or known). `gids`: index -> (gid, type, netdev)."""
        if gids is None:
            gids = {0: (_LINK_LOCAL, V2, "eth0"), 1: (_mapped(1), V2, "eth0"), 2: (_EMPTY, "", "")}
        folder = self.sysfs / "class/infiniband" / name / "ports" / str(port)
        new_device = not folder.parent.exists()
        for file, text in (("state", state), ("link_layer", link_layer), ("lid", lid)):
            self._write(folder / file, text)
        for index, pkey in enumerate(pkeys):
            self._write(folder / "pkeys" / str(index), pkey)
        for index, (gid, kind, netdev) in gids.items():
            self._write(folder / "gids" / str(index), gid)
            if kind:  # the kernel refuses to read these of an empty row
                self._write(folder / "gid_attrs/types" / str(index), kind)
                self._write(folder / "gid_attrs/ndevs" / str(index), netdev)
        path = self.nodes / f"uverbs{self._count}"
        if new_device:
            ibdev = self.sysfs / f"class/infiniband_verbs/uverbs{self._count}/ibdev"
            self._write(ibdev, name)
            self._write(ibdev.parent.parent / "abi_version", "6")
            if node:
                path.touch()
            self._count += 1
        return path

    def look(self, *known: str) -> Discovery:
        """`known`: to the verbs library; none: it is not asked."""
        found = discover(sysfs=self.sysfs, nodes=self.nodes, netdevs=lambda: _NETDEVS)
        return judged_by(found, known) if known else found

    @staticmethod
    def _write(file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def _names(choice: Choice) -> list[str]:
    return [r.rail.device for r in choice.rails]


# --- verdicts -------------------------------------------------------------------------------------


def test_a_host_without_rdma(tmp_path: Path) -> None:
    found = discover(sysfs=tmp_path / "no", nodes=tmp_path / "no", netdevs=dict)
    assert found.devices == ()
    assert found.reason is PathReason.NO_DEVICE
    choice = choose_rails(found)
    assert choice.rails == ()
    assert choice.reason is PathReason.NO_DEVICE
    assert "no RDMA device" in choice.detail


def test_one_good_device(tree: Tree) -> None:
    node = tree.add("rxe0")
    (device,) = tree.look("rxe0").devices
    assert device.verdict is Verdict.USABLE
    assert device.node == str(node)
    (port,) = device.ports
    assert (port.number, port.state, port.link_layer, port.lid) == (1, "ACTIVE", "ethernet", 0)
    assert [(g.index, g.gid, g.kind, g.netdev) for g in port.gids] == [
        (0, "fe80::ff:fe00:1", GidKind.ROCE_V2, "eth0"),
        (1, "::ffff:10.0.0.1", GidKind.ROCE_V2, "eth0"),
    ]


def _forbid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """chmod 000 as an ordinary user meets it; root would be let through."""
    real = os.access

    def access(file: object, mode: int) -> bool:
        return file != path and real(file, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "access", access)


def test_each_cause_has_its_own_verdict_and_the_rest_goes_on_working(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.add("rxe0", node=False)
    _forbid(tree.add("rxe1"), monkeypatch)
    tree.add("rxe2")
    tree.add("rxe3", _NO_GIDS, state="1: DOWN")
    tree.add("rxe4", _NO_GIDS)
    tree.add("rxe5")
    found = tree.look("rxe0", "rxe1", "rxe3", "rxe4", "rxe5")
    assert [(d.name, d.verdict) for d in found.devices] == [
        ("rxe0", Verdict.NO_NODE),
        ("rxe1", Verdict.PERMISSION),
        ("rxe2", Verdict.NO_PROVIDER),
        ("rxe3", Verdict.PORT_DOWN),
        ("rxe4", Verdict.NO_GID),
        ("rxe5", Verdict.USABLE),
    ]
    assert len({d.detail for d in found.devices}) == 6
    choice = choose_rails(found)
    assert _names(choice) == ["rxe5"]
    assert choice.reason is PathReason.OK
    for name in ("rxe0", "rxe1", "rxe2", "rxe3", "rxe4"):
        assert f"{name}: " in choice.detail


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (Verdict.NO_NODE, PathReason.NO_DEVICE),
        (Verdict.PERMISSION, PathReason.PERMISSION),
        (Verdict.NO_PROVIDER, PathReason.DEVICE_FAILED),
        (Verdict.PORT_DOWN, PathReason.PORT_DOWN),
        (Verdict.NO_GID, PathReason.NO_GID),
        (Verdict.USABLE, PathReason.OK),
    ],
)
def test_verdicts_are_path_reasons(verdict: Verdict, reason: PathReason) -> None:
    assert verdict.reason is reason


def test_the_reason_is_that_of_the_device_that_got_furthest(tree: Tree) -> None:
    tree.add("rxe0", node=False)
    tree.add("rxe1", _NO_GIDS, state="1: DOWN")
    choice = choose_rails(tree.look())
    assert choice.reason is PathReason.PORT_DOWN
    assert "does not exist" in choice.detail
    assert "port 1 DOWN" in choice.detail


def test_a_device_without_the_uverbs_module(tree: Tree) -> None:
    tree.add("rxe0")
    (tree.sysfs / "class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert tree.look().devices[0].verdict is Verdict.NO_NODE


def test_a_second_port_saves_the_device(tree: Tree) -> None:
    tree.add("mlx4_0", state="1: DOWN")
    tree.add("mlx4_0", port=2)
    found = tree.look()
    assert found.devices[0].verdict is Verdict.USABLE
    rails = choose_rails(found).rails
    assert [(r.rail.port, r.active) for r in rails] == [(2, True), (1, False)]


def test_names_are_in_the_order_of_people(tree: Tree) -> None:
    for name in ("mlx5_10", "mlx5_9", "bnxt_re0"):
        tree.add(name)
    assert [d.name for d in tree.look().devices] == ["bnxt_re0", "mlx5_9", "mlx5_10"]


def test_damaged_files_are_no_exception(tree: Tree) -> None:
    tree.add("rxe0", {0: ("nonsense", V2, ""), 1: (_mapped(1), "", "")}, state="?", lid="x")
    (device,) = tree.look().devices
    assert device.verdict is Verdict.PORT_DOWN
    assert [g.kind for g in device.ports[0].gids] == [GidKind.ROCE_V1]


def test_a_sandbox_without_route_sockets_still_discovers(tree: Tree) -> None:
    tree.add("rxe0")

    def forbidden() -> dict[str, Netdev]:
        raise DeviceError("netlink", "listing interfaces", 1)

    found = discover(sysfs=tree.sysfs, nodes=tree.nodes, netdevs=forbidden)
    assert [r.rail.gid_index for r in choose_rails(found).rails] == [1]


# --- rails ----------------------------------------------------------------------------------------


def test_the_rail_carries_what_a_peer_needs(tree: Tree) -> None:
    tree.add("rxe0")
    (choice,) = choose_rails(tree.look()).rails
    rail = choice.rail
    assert (rail.device, rail.port, rail.gid, rail.gid_index) == ("rxe0", 1, "::ffff:10.0.0.1", 1)
    assert (rail.mtu, rail.link_layer, rail.lid, rail.pkey) == (1024, "ethernet", 0, 0xFFFF)
    assert [r.entry.index for r in choice.runners_up] == [0]
    assert "then GID 0" in str(choice)


def test_infiniband_carries_its_lid_and_first_partition(tree: Tree) -> None:
    gid = "fe80:0000:0000:0000:ec0d:9a03:0001:0002"
    tree.add(
        "mlx5_0",
        {0: (gid, V1, "")},
        link_layer="InfiniBand",
        lid="0x5",
        pkeys=("0x7fff", "0x8001"),
    )
    (choice,) = choose_rails(tree.look()).rails
    assert (choice.rail.link_layer, choice.rail.lid) == ("infiniband", 5)
    assert choice.chosen.entry.kind is GidKind.INFINIBAND
    assert (choice.pkey_index, choice.rail.pkey) == (0, 0x7FFF)


@pytest.mark.parametrize(("netdev_mtu", "path_mtu"), [(1500, 1024), (4200, 4096), (9000, 4096)])
def test_the_path_mtu_follows_the_interface(tree: Tree, netdev_mtu: int, path_mtu: int) -> None:
    tree.add("rxe0")
    found = discover(
        sysfs=tree.sysfs,
        nodes=tree.nodes,
        netdevs=lambda: {"eth0": Netdev(True, frozenset(), netdev_mtu)},
    )
    assert choose_rails(found).rails[0].rail.mtu == path_mtu


def test_the_better_rail_comes_first(tree: Tree) -> None:
    tree.add("rxe0", {0: (_LINK_LOCAL, V2, "eth0")})
    tree.add("rxe1")
    tree.add("rxe2")
    assert _names(choose_rails(tree.look())) == ["rxe1", "rxe2", "rxe0"]


def test_the_peers_family_is_preferred(tree: Tree) -> None:
    ula = "fd00:0000:0000:0000:0000:0000:0000:0005"
    tree.add("rxe0", {0: (_mapped(1), V2, "eth0"), 1: (ula, V2, "eth0")})
    found = tree.look()
    assert choose_rails(found).rails[0].rail.gid_index == 0
    assert choose_rails(found, peer_families=[Family.IPV6]).rails[0].rail.gid_index == 1


# --- pins -----------------------------------------------------------------------------------------


@pytest.fixture
def pair(tree: Tree) -> Tree:
    tree.add("rxe0")
    tree.add("rxe1", _NO_GIDS, state="1: DOWN")
    tree.add("rxe2", pkeys=("0xffff", "0x8001"))
    return tree


@pytest.mark.parametrize(
    ("pins", "names"),
    [
        (Pins(), ["rxe0", "rxe2"]),
        (Pins(device=""), ["rxe0", "rxe2"]),
        (Pins(device="rxe2"), ["rxe2"]),
        (Pins(device="rxe2, rxe0"), ["rxe2", "rxe0"]),
        (Pins(device="rxe0,rxe0"), ["rxe0"]),
        (Pins(port=1), ["rxe0", "rxe2"]),
        (Pins(pkey=0x0001), ["rxe2"]),
        (Pins(netdev="eth0"), ["rxe0", "rxe2"]),
        (Pins(gid="::FFFF:a00:1"), ["rxe0", "rxe2"]),
        (Pins(device="rxe0", port=1, gid_index=0, gid="fe80::ff:fe00:1"), ["rxe0"]),
    ],
)
def test_a_pin_that_can_be_had(pair: Tree, pins: Pins, names: list[str]) -> None:
    assert _names(choose_rails(pair.look(), pins)) == names


def test_a_pinned_index_is_taken_though_a_better_one_exists(pair: Tree) -> None:
    for rail in choose_rails(pair.look(), Pins(gid_index=0)).rails:
        assert rail.rail.gid_index == 0
        assert rail.chosen.warning


def test_a_pinned_partition_gives_its_index(pair: Tree) -> None:
    (choice,) = choose_rails(pair.look(), Pins(pkey=0x8001)).rails
    assert (choice.pkey_index, choice.rail.pkey) == (1, 0x8001)


@pytest.mark.parametrize(
    ("pins", "knob", "valid"),
    [
        (Pins(device="rxe9"), "device", "valid: rxe0, rxe2"),
        (Pins(device="rxe0,rxe9"), "device", "rxe9.*valid: rxe0, rxe2"),
        (Pins(device="rxe1"), "device", "port_down.*valid: rxe0, rxe2"),
        (Pins(device="rxe0", port=2), "port", "valid: 1"),
        (Pins(port=2), "port", "GID 1 ::ffff:10.0.0.1 on eth0"),
        (Pins(gid_index=2), "gid_index", "GID 1 ::ffff:10.0.0.1 on eth0"),
        (Pins(gid="fd00::1"), "gid", "GID 1 ::ffff:10.0.0.1"),
        (Pins(gid="10.0.0.1"), "gid", "written like"),
        (Pins(gid="fe80::ff:fe00:1", gid_index=1), "gid", "all the pins"),
        (Pins(netdev="eth1"), "netdev", "on eth0"),
        (Pins(pkey=0x8002), "pkey", "0xffff/0x8001"),
        (Pins(device="rxe0", pkey=0x8001), "pkey", "pkeys 0xffff"),
    ],
)
def test_a_pin_that_cannot_be_had_lists_what_can(
    pair: Tree, pins: Pins, knob: str, valid: str
) -> None:
    with pytest.raises(ConfigError, match=valid) as caught:
        choose_rails(pair.look(), pins)
    assert caught.value.knob == knob


def test_a_named_device_on_a_host_without_any(tmp_path: Path) -> None:
    found = discover(sysfs=tmp_path, nodes=tmp_path, netdevs=dict)
    with pytest.raises(ConfigError, match="none is usable"):
        choose_rails(found, Pins(device="mlx5_0"))
    assert choose_rails(found, Pins(gid_index=3)).reason is PathReason.NO_DEVICE


def test_a_device_with_nothing_but_a_loopback_gid(tree: Tree) -> None:
    loopback = "0000:0000:0000:0000:0000:ffff:7f00:0001"
    tree.add("rxe0", {0: (loopback, V2, "lo")})
    assert choose_rails(tree.look()).reason is PathReason.NO_GID
    with pytest.raises(ConfigError):
        choose_rails(tree.look(), Pins(device="rxe0"))
    assert _names(choose_rails(tree.look(), Pins(gid_index=0))) == ["rxe0"]


# --- ports that are down --------------------------------------------------------------------------


def test_a_port_that_is_down_and_has_an_address_is_a_rail_behind_all_others(tree: Tree) -> None:
    tree.add("rxe0", state="1: DOWN")
    tree.add("rxe1", {0: (_LINK_LOCAL, V2, "eth0")})
    choice = choose_rails(tree.look())
    assert [(r.rail.device, r.active) for r in choice.rails] == [("rxe1", True), ("rxe0", False)]
    assert choice.rails[1].rail.gid == "::ffff:10.0.0.1"
    assert "rxe0: no port is ACTIVE" in choice.detail


@pytest.mark.parametrize("pins", [Pins(), Pins(device="rxe0"), Pins(device="rxe0", gid_index=1)])
def test_a_port_that_is_down_may_be_the_only_one(tree: Tree, pins: Pins) -> None:
    tree.add("rxe0", state="1: DOWN")
    (rail,) = choose_rails(tree.look(), pins).rails
    assert (rail.active, rail.rail.gid_index) == (False, 1)


def test_a_pin_that_a_port_that_is_down_does_not_have_is_refused(tree: Tree) -> None:
    tree.add("rxe0", state="1: DOWN")
    with pytest.raises(ConfigError) as caught:
        choose_rails(tree.look(), Pins(gid_index=7))
    assert caught.value.knob == "gid_index"


# --- identity -------------------------------------------------------------------------------------


def test_a_nic_id_is_a_place_among_all_that_is_listed(tree: Tree) -> None:
    tree.add("mlx5_10")
    tree.add("mlx5_2", node=False)
    tree.add("mlx5_2", port=2)
    tree.add("mlx5_1", _NO_GIDS)
    tree.add("mlx5_9")
    found = tree.look()
    assert [(d.name, [p.nic for p in d.ports]) for d in found.devices] == [
        ("mlx5_1", [0]),
        ("mlx5_2", [1, 2]),
        ("mlx5_9", [3]),
        ("mlx5_10", [4]),
    ]
    assert [(r.rail.device, r.nic) for r in choose_rails(found).rails] == [
        ("mlx5_9", 3),
        ("mlx5_10", 4),
    ]


def test_only_the_first_64_ports_are_used(tree: Tree) -> None:
    for number in range(66):
        tree.add(f"rxe{number}")
    assert [r.nic for r in choose_rails(tree.look()).rails] == list(range(64))


def test_a_rail_knows_its_numa_node_and_its_bridges(tree: Tree) -> None:
    tree.add("mlx5_0")
    card = tree.sysfs / "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    tree._write(card / "numa_node", "1")
    (tree.sysfs / "class/infiniband/mlx5_0/device").symlink_to(card)
    tree.add("rxe0")
    rails = choose_rails(tree.look()).rails
    assert [(r.numa_node, r.pci_bridges) for r in rails] == [(1, 1), (-1, 0)]


@pytest.mark.parametrize(
    ("pins", "names"),
    [
        (Pins(whitelist=("rxe2",)), ["rxe2"]),
        (Pins(whitelist=("rxe2", "rxe9")), ["rxe2"]),
        (Pins(blacklist=("rxe2",)), ["rxe0"]),
        (Pins(blacklist=("rxe9",)), ["rxe0", "rxe2"]),
        (Pins(whitelist=("rxe0",), blacklist=("rxe0",)), ["rxe0"]),  # the whitelist wins
        (Pins(device="rxe2", whitelist=("rxe2",)), ["rxe2"]),
    ],
)
def test_lists_filter_what_there_is(pair: Tree, pins: Pins, names: list[str]) -> None:
    assert _names(choose_rails(pair.look(), pins)) == names


def test_lists_that_leave_nothing_say_so(pair: Tree) -> None:
    choice = choose_rails(pair.look(), Pins(whitelist=("mlx5_0",)))
    assert choice.reason is PathReason.NO_DEVICE
    assert choice.detail == "the whitelist leaves none of rxe0, rxe1, rxe2"
    choice = choose_rails(pair.look(), Pins(blacklist=("rxe0", "rxe1", "rxe2")))
    assert "blacklist" in choice.detail


@pytest.mark.parametrize(
    ("pins", "problem"),
    [
        (Pins(device="rxe0", whitelist=("rxe2",)), "not in the whitelist; valid: rxe2"),
        (Pins(device="rxe0", blacklist=("rxe0",)), "in the blacklist; valid: rxe2"),
    ],
)
def test_a_pin_outside_the_lists_is_refused(pair: Tree, pins: Pins, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        choose_rails(pair.look(), pins)
    assert caught.value.knob == "device"


# --- the network ----------------------------------------------------------------------------------


def test_the_kernel_is_asked_about_this_namespace() -> None:
    found = read_netdevs()
    assert found["lo"].mtu > 0
    if found["lo"].up:
        assert "127.0.0.1" in found["lo"].addresses


def test_no_descriptor_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    count: Callable[[], int] = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
    before = count()
    for _ in range(5):
        read_netdevs()
    assert count() == before
