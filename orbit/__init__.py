"""orbit moves large payloads between the memories of machines, by handle.

Public names only. Importing it touches no device, library or event loop; what needs more than the
plain values is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import NodeConfig, RdmaConfig, RendezvousConfig, TimeoutConfig
from .errors import (
    BudgetExceeded,
    BusyError,
    ClosedError,
    CompletionError,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    InternalError,
    LabError,
    LeaseError,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerError,
    PeerLost,
    PeerProtocolError,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    TransferFailed,
    UnknownHandle,
    UnknownPeer,
    Unquiesced,
    UsageError,
)
from .model import Handle, Lease, Metadata, PathName, PathReason, PeerIdentity, Transport

if TYPE_CHECKING:
    from .availability import Availability, available
    from .node import Node, NodeStatistics, PinnedPayload, RegisterOptions

__version__ = "0.1.0"

__all__ = [
    "Availability",
    "BudgetExceeded",
    "BusyError",
    "ClosedError",
    "CompletionError",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "Handle",
    "InternalError",
    "LabError",
    "Lease",
    "LeaseError",
    "Metadata",
    "Node",
    "NodeConfig",
    "NodeStatistics",
    "OrbitError",
    "PathFailed",
    "PathName",
    "PathReason",
    "PathUnavailable",
    "PeerError",
    "PeerIdentity",
    "PeerLost",
    "PeerProtocolError",
    "PeerRefused",
    "PeerRestarted",
    "PeerUnreachable",
    "PinnedPayload",
    "RdmaConfig",
    "RegisterOptions",
    "RendezvousConfig",
    "TimeoutConfig",
    "TransferFailed",
    "Transport",
    "UnknownHandle",
    "UnknownPeer",
    "Unquiesced",
    "UsageError",
    "__version__",
    "available",
]

_LAZY = {
    "Availability": "availability",
    "available": "availability",
    "Node": "node",
    "NodeStatistics": "node",
    "PinnedPayload": "node",
    "RegisterOptions": "node",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'orbit' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
