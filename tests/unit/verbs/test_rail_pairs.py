"""Which rail reaches which: prefixes, link layers, MTUs."""

from __future__ import annotations

import pytest

from orbit.protocol.messages import RailHint
from orbit.verbs.rail_pairs import choose_pair, common_prefix_bits, is_gid, pair_rails, path_mtu


def rail(device: str, gid: str, link_layer: str = "ethernet") -> RailHint:
    return RailHint(device, 1, gid, 1, 4096, link_layer)


def test_the_nearest_pair_wins() -> None:
    local = [rail("a1", "::ffff:198.18.1.1"), rail("a2", "::ffff:198.18.2.1")]
    remote = [rail("b2", "::ffff:198.18.2.2"), rail("b9", "::ffff:10.0.0.1")]
    assert choose_pair(local, remote) == (1, 0)


def test_equals_go_to_the_better_ranked() -> None:
    local = [rail("a1", "::ffff:10.0.0.1"), rail("a2", "::ffff:10.0.0.1")]
    remote = [rail("b1", "::ffff:10.0.0.2"), rail("b2", "::ffff:10.0.0.2")]
    assert choose_pair(local, remote) == (0, 0)


def test_link_layers_are_not_mixed() -> None:
    local = [rail("a1", "fe80::1"), rail("a2", "fe80::2", "infiniband")]
    assert choose_pair(local, [rail("b", "fe80::3", "infiniband")]) == (1, 0)
    assert choose_pair(local[:1], [rail("b", "fe80::3", "infiniband")]) is None
    assert choose_pair(local, []) is None
    assert choose_pair(local, [rail("b", "nonsense"), rail("c", "::")]) is None


def test_every_rail_has_one_of_its_name_or_the_nearest() -> None:
    local = [rail("x", "::ffff:10.1.0.1"), rail("mlx_0", "::ffff:10.2.0.1"), rail("y", "::9")]
    remote = [rail("mlx_0", "::ffff:10.1.0.2"), rail("other", "::ffff:10.2.0.2")]
    # The name first, although the other one is nearer; then by the local order.
    assert pair_rails(local, remote) == [(1, 0), (0, 0), (2, 0)]
    assert pair_rails(local[:1], remote[::-1]) == [(0, 1)]
    assert pair_rails(local, remote) == pair_rails(local, remote)


def test_a_rail_that_nobody_can_answer_has_no_route() -> None:
    local = [rail("a", "fe80::1", "infiniband"), rail("b", "fe80::2")]
    assert pair_rails(local, [rail("a", "fe80::3")]) == [(1, 0)]
    assert pair_rails(local, [rail("b", "::")]) == []
    assert pair_rails([], [rail("b", "fe80::3")]) == []


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [("::1", "::1", 128), ("::1", "::", 127), ("8000::", "::", 0), ("x", "::", 0)],
)
def test_common_prefix(a: str, b: str, bits: int) -> None:
    assert common_prefix_bits(a, b) == bits


@pytest.mark.parametrize(
    ("a", "b", "mtu"), [(4096, 1024, 1024), (4096, 4096, 4096), (2000, 9000, 1024), (0, 64, 256)]
)
def test_path_mtu_is_what_both_carry(a: int, b: int, mtu: int) -> None:
    assert path_mtu(a, b) == path_mtu(b, a) == mtu


def test_an_empty_gid_is_none() -> None:
    assert is_gid("::ffff:1.2.3.4")
    assert not is_gid("::")
    assert not is_gid("")
