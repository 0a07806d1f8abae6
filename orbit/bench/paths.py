"""The words for the path that really ran, made and read again: `tcp`, `rdma/mlx5_0:1 gid 3`,
several rails of one operation joined by ` + `, several transports by ` and `. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..model import PathName

_RAILS: Final = " + "
_TRANSPORTS: Final = " and "


def rail_words(device: object, port: object, gid_index: object) -> str:
    return f"{device}:{port} gid {gid_index}"


def rdma_words(rails: Iterable[str] = ()) -> str:
    """`rails`: their words, or names of devices alone; none where nobody knows them."""
    return "/".join(filter(None, (PathName.RDMA.value, _RAILS.join(rails))))


def both_words(paths: Iterable[str]) -> str:
    """Of one operation whose items went by several."""
    return _TRANSPORTS.join(paths)


def transport_of(path: str) -> str:
    """rdma of `rdma/mlx5_0:1 gid 3`."""
    return path.partition("/")[0]


def transports_of(path: str) -> set[str]:
    return {transport_of(part) for part in path.split(_TRANSPORTS)}


def rails_of(path: str) -> list[str]:
    """Their words, of a path of one transport."""
    return [name for name in path.partition("/")[2].split(_RAILS) if name]
