"""The contracts of ControlLink, DataPath and RailedPath as suites that every implementation passes.

An implementation gives a factory that opens a pair of ends; each case is one coroutine function, so
that a test can be made of each. Runs on any event loop, the one with virtual time included. The
cases are in link_contract, path_contract and path_rail_cases.
"""

from __future__ import annotations

from .link_contract import LINK_CASES, LinkPairFactory, check_control_link
from .path_contract import PATH_CASES, DataPathPair, PathPairFactory, check_data_path
from .path_rail_cases import RAIL_CASES, RailedPairFactory, RailedPathPair, check_railed_path

__all__ = [
    "LINK_CASES",
    "PATH_CASES",
    "RAIL_CASES",
    "DataPathPair",
    "LinkPairFactory",
    "PathPairFactory",
    "RailedPairFactory",
    "RailedPathPair",
    "check_control_link",
    "check_data_path",
    "check_railed_path",
]
