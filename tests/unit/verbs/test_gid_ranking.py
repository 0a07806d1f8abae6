"""The GID ranking on the tables that have misled others: overlays, IPv6 only, v1 twins, 10.x."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.verbs.gid_ranking import (
    AddressClass,
    Family,
    GidEntry,
    GidKind,
    Netdev,
    Presence,
    gid_bytes,
    gid_text,
    rank_gids,
)

V1, V2, IB = GidKind.ROCE_V1, GidKind.ROCE_V2, GidKind.INFINIBAND
FE80 = "fe80::1"
UP = Netdev(up=True)


def _best(
    entries: list[GidEntry],
    netdevs: dict[str, Netdev] | None = None,
    *,
    netdev: str | None = None,
    peer_families: tuple[Family, ...] = (),
) -> GidEntry:
    ranked = rank_gids(entries, netdevs or {}, netdev=netdev, peer_families=peer_families)
    return ranked[0].entry


def _table(*rows: tuple[str, GidKind]) -> list[GidEntry]:
    return [GidEntry(i, gid, kind, "eth0") for i, (gid, kind) in enumerate(rows)]


def test_a_routable_ipv4_in_version_2() -> None:
    ip = "::ffff:10.14.1.72"
    table = _table((FE80, V1), (FE80, V2), (ip, V1), (ip, V2))
    assert _best(table).index == 3
    assert _best(table, {"eth0": UP}).index == 3


def test_b_ipv6_only_takes_the_unique_local_address() -> None:
    table = _table((FE80, V1), (FE80, V2), ("fd00::5", V1), ("fd00::5", V2))
    assert _best(table).index == 3


def test_c_only_link_local_is_taken_with_a_warning() -> None:
    ranked = rank_gids(_table((FE80, V1), (FE80, V2)), {"eth0": UP})
    assert ranked[0].entry.index == 1
    assert "share the link" in ranked[0].warning


def test_d_the_interface_that_was_asked_for() -> None:
    ip = "::ffff:192.168.7.1"
    table = [
        GidEntry(2, ip, V1, "vxlan0"),
        GidEntry(3, ip, V2, "vxlan0"),
        GidEntry(4, ip, V1, "bond1"),
        GidEntry(5, ip, V2, "bond1"),
    ]
    held = Netdev(True, frozenset({"192.168.7.1"}))
    both = {"vxlan0": held, "bond1": held}
    assert _best(table, both, netdev="bond1").index == 5
    assert _best(table, both, netdev="vxlan0").index == 3
    assert _best(table, both).index == 5  # and nobody had to ask
    assert rank_gids(table, both, netdev="eth9") == ()


def test_e_an_address_that_is_held_here() -> None:
    table = [
        GidEntry(3, "::ffff:10.0.0.3", V2, "eth0"),
        GidEntry(7, "::ffff:10.0.0.7", V2, "eth0"),
    ]
    assert _best(table, {"eth0": Netdev(True, frozenset({"10.0.0.7"}))}).index == 7


@pytest.mark.parametrize(
    "ip", ["172.16.0.1", "172.31.255.1", "192.168.0.1", "100.64.0.1", "10.0.0.1", "8.8.8.8"]
)
@pytest.mark.parametrize("first", [True, False])
def test_f_no_ipv4_range_loses_to_link_local(ip: str, first: bool) -> None:
    rows = [("::ffff:" + ip, V2), (FE80, V2)]
    table = _table(*(rows if first else rows[::-1]))
    for netdevs in ({}, {"eth0": UP}, {"eth0": Netdev(True, frozenset({FE80}))}):
        assert _best(table, netdevs).gid == "::ffff:" + ip


def test_link_local_ipv4_is_link_local() -> None:
    table = _table(("::ffff:169.254.1.1", V2), ("fd00::1", V2))
    assert _best(table).index == 1


def test_version_2_link_local_goes_before_version_1_routable() -> None:
    ranked = rank_gids(_table(("::ffff:10.0.0.1", V1), (FE80, V2)), {})
    assert [r.entry.index for r in ranked] == [1, 0]
    assert "RoCE v1" in ranked[1].warning


def test_the_family_of_the_peer_wins_over_the_better_class() -> None:
    table = _table(("::ffff:10.0.0.1", V2), ("fd00::1", V2))
    assert _best(table).index == 0
    assert _best(table, peer_families=(Family.IPV6,)).index == 1
    assert _best(table, peer_families=(Family.IPV4, Family.IPV6)).index == 0
    ranked = rank_gids(table, {}, peer_families=(Family.IPV6,))
    assert "the peer has no IPv4" in ranked[1].why


def test_what_is_known_of_the_interface_orders_equals() -> None:
    names = ["gone", "down", "docker0", "up", "held", ""]
    table = [GidEntry(i, f"::ffff:10.0.0.{i}", V2, name) for i, name in enumerate(names)]
    netdevs = {
        "down": Netdev(up=False, addresses=frozenset({"10.0.0.1"})),
        "docker0": Netdev(up=True, addresses=frozenset({"10.0.0.2"})),
        "up": UP,
        "held": Netdev(up=True, addresses=frozenset({"10.0.0.4"})),
    }
    ranked = rank_gids(table, netdevs)
    assert [r.presence for r in ranked] == list(Presence)
    assert [r.entry.netdev for r in ranked] == ["held", "up", "docker0", "down", "gone", ""]


def test_infiniband_takes_its_first_row_without_a_warning() -> None:
    table = [GidEntry(0, "fe80::ec0d:9a03:1:2", IB), GidEntry(1, "fec0::1", IB)]
    ranked = rank_gids(table, {})
    assert ranked[0].entry.index == 0
    assert ranked[0].address_class is AddressClass.FABRIC
    assert not ranked[0].warning


@pytest.mark.parametrize("gid", ["ff02::1", "::1", "::ffff:127.0.0.1", "::ffff:224.0.0.1"])
def test_what_no_peer_can_reach_is_last_and_unusable(gid: str) -> None:
    ranked = rank_gids(_table((gid, V2), (FE80, V1)), {})
    assert [r.entry.gid for r in ranked] == [FE80, gid]
    assert not ranked[1].usable


def test_each_row_explains_itself() -> None:
    table = _table(("::ffff:10.0.0.1", V2))
    (row,) = rank_gids(table, {"eth0": Netdev(True, frozenset({"10.0.0.1"}))})
    assert str(row) == (
        "GID 0 ::ffff:10.0.0.1 on eth0 (RoCE v2; routable IPv4; eth0 is up and holds the address)"
    )


def test_an_ipv6_address_is_compared_by_value() -> None:
    (row,) = rank_gids(_table(("fd00::a", V2)), {"eth0": Netdev(True, frozenset({"fd00::a"}))})
    assert row.presence is Presence.HOLDS_ADDRESS


_entries = st.lists(
    st.builds(
        GidEntry,
        st.integers(0, 255),
        st.binary(min_size=16, max_size=16).map(gid_text)
        | st.sampled_from(["fe80::1", "fd00::1", "::ffff:10.0.0.1", "::"]),
        st.sampled_from(GidKind),
        st.sampled_from(["", "eth0", "vxlan1", "gone"]),
    ),
    max_size=6,
    unique_by=lambda e: e.index,
)


@given(_entries, st.randoms())
def test_the_order_is_total_and_does_not_depend_on_the_input_order(
    entries: list[GidEntry], random: object
) -> None:
    netdevs = {"eth0": UP, "vxlan1": UP}
    ranked = rank_gids(entries, netdevs)
    assert sorted(r.entry.index for r in ranked) == sorted(e.index for e in entries)
    assert rank_gids(entries[::-1], netdevs) == ranked
    assert all(a.key < b.key for a, b in itertools.pairwise(ranked))


@given(st.binary(min_size=16, max_size=16))
def test_gid_text_is_canonical(raw: bytes) -> None:
    assert gid_bytes(gid_text(raw)) == raw
    assert gid_text(gid_bytes(gid_text(raw))) == gid_text(raw)


def test_mapped_addresses_are_printed_dotted() -> None:
    full = "0000:0000:0000:0000:0000:ffff:0a00:0001"
    assert gid_text(gid_bytes(full)) == "::ffff:10.0.0.1"
