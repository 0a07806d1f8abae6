"""Which local rail reaches which remote one, from what both nodes announced.

Pure arithmetic over GIDs, link layers and MTUs. It knows no device and opens nothing.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence

from ..protocol.messages import RailHint

_PATH_MTUS = (4096, 2048, 1024, 512, 256)


def common_prefix_bits(a: str, b: str) -> int:
    """Leading bits that two GIDs share; 0 for text that is no GID."""
    left, right = _number(a), _number(b)
    if left is None or right is None:
        return 0
    return 128 - (left ^ right).bit_length()


def path_mtu(a: int, b: int) -> int:
    """The largest path MTU that both ends carry: a larger one loses every long message."""
    smaller = min(a, b)
    return next((mtu for mtu in _PATH_MTUS if mtu <= smaller), 256)


def is_gid(text: str) -> bool:
    return bool(_number(text))


@functools.lru_cache(maxsize=1024)
def _number(text: str) -> int | None:
    """Of a GID; None for text that is none. Remembered: each transfer pairs rails anew."""
    try:
        return int(ipaddress.IPv6Address(text))
    except ValueError:
        return None


def choose_pair(local: Sequence[RailHint], remote: Sequence[RailHint]) -> tuple[int, int] | None:
    """Indexes of the pair with the longest common prefix; both sequences are ranked, so that
    equals go to the better ranked one. None when no pair has the same link layer.
    """
    pairs = [
        (-common_prefix_bits(mine.gid, theirs.gid), i, j)
        for i, mine in enumerate(local)
        for j, theirs in enumerate(remote)
        if mine.link_layer == theirs.link_layer and is_gid(theirs.gid)
    ]
    if not pairs:
        return None
    _, i, j = min(pairs)
    return i, j


def pair_rails(local: Sequence[RailHint], remote: Sequence[RailHint]) -> list[tuple[int, int]]:
    """For each local rail the remote one that it would be used with, by index: that of the same
    device name, else the one with the longest common prefix, else the first; same-name pairs first.
    A rail without one of the same link layer is left out.
    """
    found: list[tuple[bool, int, int]] = []
    for i, mine in enumerate(local):
        fits = [
            (theirs.device != mine.device, -common_prefix_bits(mine.gid, theirs.gid), j)
            for j, theirs in enumerate(remote)
            if mine.link_layer == theirs.link_layer and is_gid(theirs.gid)
        ]
        if fits:
            other_name, _, j = min(fits)
            found.append((other_name, i, j))
    return [(i, j) for _, i, j in sorted(found)]
