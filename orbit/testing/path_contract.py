"""The contract of DataPath as a suite that every implementation passes, run by `check_data_path`.

The cases are in path_pull_cases, path_push_cases, path_piece_cases and path_drain_cases; what they
work with is in path_rig. Memory is looked at again after each transfer: nothing may use it any
more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..model import Direction, PathReason
from .leftovers import nothing_left
from .path_drain_cases import DRAIN_CASES
from .path_piece_cases import PIECE_CASES
from .path_pull_cases import PULL_CASES
from .path_push_cases import PUSH_CASES
from .path_rig import DataPathPair, PathCase, PathPairFactory

__all__ = ["PATH_CASES", "DataPathPair", "PathPairFactory", "check_data_path"]

PATH_CASES: Final[Mapping[str, PathCase]] = {
    case.__name__: case for case in (*PULL_CASES, *PUSH_CASES, *PIECE_CASES, *DRAIN_CASES)
}


async def check_data_path(case: str, open_pair: PathPairFactory) -> None:
    """Run one of PATH_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left(), open_pair() as pair:
        for direction in Direction:
            assert pair.consumer.availability(pair.consumer_session, direction) is PathReason.OK
            assert await pair.consumer.prepare(pair.consumer_session, direction) is PathReason.OK
        await PATH_CASES[case](pair)
