"""The shape of a lab and what its scripts and machines are told about it."""

from __future__ import annotations

import pytest

from orbit.errors import ConfigError
from orbit.softroce.topology import Topology


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 3},
        {"vms": 3},
        {"vms": 2, "hosts": 1},
        {"rails": 0},
        {"rails": 9},
        {"mtu_bytes": 575},
        {"mtu_bytes": 9001},
        {"numa": 0, "hosts": 1},
        {"numa": 3, "hosts": 1},
        {"numa": 2},
        {"numa": 2, "vms": 2},
        {"netem": "loss 1%\nrm"},
    ],
)
def test_impossible_shapes_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(**wrong)  # type: ignore[arg-type]
    assert str(caught.value).startswith(("hosts", "vms", "rails", "mtu", "numa", "netem"))


@pytest.mark.parametrize(("mtu", "rails"), [(576, 1), (9000, 8)])
def test_limits_are_allowed(mtu: int, rails: int) -> None:
    assert Topology(mtu_bytes=mtu, rails=rails).mtu_bytes == mtu


def test_devices_of_each_layout() -> None:
    assert Topology(hosts=1, rails=2).devices() == ("rxe0", "rxe1")
    assert Topology(rails=2).devices("A") == ("rxa1", "rxa2")
    assert Topology(rails=2).devices("B") == ("rxb1", "rxb2")
    assert Topology(vms=2).devices("B") == ("rxb1",)


def test_guests_learn_the_shape_by_variables() -> None:
    variables = Topology(rails=3, mtu_bytes=4200, netem="loss 1%").guest_variables("A")
    assert variables["LAYOUT"] == "pair"
    assert (variables["RAILS"], variables["MTU"], variables["NETEM"]) == ("3", "4200", "loss 1%")
    assert variables["ORBIT_LAB"] == "1"
    assert (variables["ORBIT_LAB_HOSTS"], variables["ORBIT_LAB_RAILS"]) == ("2", "3")


def test_one_guest_has_no_network_card() -> None:
    assert Topology(hosts=2).network_arguments("A", "/tmp/x") == ["-nic", "none"]


def test_rails_of_several_memory_nodes_are_cards_on_each_in_turn() -> None:
    text = " ".join(Topology(hosts=1, rails=3, numa=2).network_arguments("A", "/tmp/x"))
    assert "pxb,id=node0,bus=pci.0,bus_nr=64,numa_node=0" in text
    assert "pxb,id=node1,bus=pci.0,bus_nr=128,numa_node=1" in text
    for rail, place in enumerate(("bus=node0,addr=1", "bus=node1,addr=1", "bus=node0,addr=2")):
        assert f"netdev=link{rail},mac=52:54:00:0b:{rail:02x}:01,{place}" in text


def test_the_links_of_two_machines_meet() -> None:
    topology = Topology(vms=2, rails=2)
    ends = {role: topology.network_arguments(role, "/tmp/x") for role in ("A", "B")}
    links = {role: [a for a in ends[role] if a.startswith("dgram")] for role in ends}
    assert len(links["A"]) == len(links["B"]) == 3
    for left, right in zip(links["A"], links["B"], strict=True):
        own, other = (dict(p.split("=", 1) for p in end.split(",")[1:]) for end in (left, right))
        assert own["local.path"] == other["remote.path"]
        assert own["remote.path"] == other["local.path"]
    macs = [a for role in ends for a in ends[role] if a.startswith("virtio-net-pci")]
    assert len(set(macs)) == 6
