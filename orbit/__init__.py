"""orbit moves large payloads between the memories of machines by handle, and messages beside them.

Public names only. Importing it touches no device, library or event loop; what needs more than the
plain values is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import (
    EngineConfig,
    MessagingConfig,
    NodeConfig,
    RdmaConfig,
    RdmaPoolConfig,
    RendezvousConfig,
    TimeoutConfig,
)
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
    NotAdmitted,
    OrbitError,
    OutcomeUnknown,
    OutOfRange,
    PathFailed,
    PathUnavailable,
    PeerDraining,
    PeerError,
    PeerLost,
    PeerProtocolError,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    RegisterOwnedError,
    RequestFailed,
    StreamError,
    TransferFailed,
    UnknownHandle,
    UnknownPeer,
    Unquiesced,
    UsageError,
    WrongDirection,
)
from .model import (
    Deregistered,
    Direction,
    Handle,
    Lease,
    Metadata,
    PathName,
    PathReason,
    PeerIdentity,
    Transport,
)

if TYPE_CHECKING:
    from .availability import Availability, available
    from .node import (
        Dispatch,
        Health,
        HealthKind,
        Message,
        Node,
        NodeStatistics,
        OrderedConfig,
        Overflow,
        PinnedPayload,
        PinnedWriter,
        Put,
        RegionGuard,
        RegionSlice,
        RegionWatch,
        RegisterOptions,
        SendResult,
        SendState,
        ShutdownPolicy,
        StreamHandle,
        StreamInbox,
        StreamSender,
    )

__version__ = "0.1.0"

__all__ = [
    "Availability",
    "BudgetExceeded",
    "BusyError",
    "ClosedError",
    "CompletionError",
    "ConfigError",
    "DeadlineExceeded",
    "Deregistered",
    "DeviceError",
    "Direction",
    "Dispatch",
    "EngineConfig",
    "Handle",
    "Health",
    "HealthKind",
    "InternalError",
    "LabError",
    "Lease",
    "LeaseError",
    "Message",
    "MessagingConfig",
    "Metadata",
    "Node",
    "NodeConfig",
    "NodeStatistics",
    "NotAdmitted",
    "OrbitError",
    "OrderedConfig",
    "OutOfRange",
    "OutcomeUnknown",
    "Overflow",
    "PathFailed",
    "PathName",
    "PathReason",
    "PathUnavailable",
    "PeerDraining",
    "PeerError",
    "PeerIdentity",
    "PeerLost",
    "PeerProtocolError",
    "PeerRefused",
    "PeerRestarted",
    "PeerUnreachable",
    "PinnedPayload",
    "PinnedWriter",
    "Put",
    "RdmaConfig",
    "RdmaPoolConfig",
    "RegionGuard",
    "RegionSlice",
    "RegionWatch",
    "RegisterOptions",
    "RegisterOwnedError",
    "RendezvousConfig",
    "RequestFailed",
    "SendResult",
    "SendState",
    "ShutdownPolicy",
    "StreamError",
    "StreamHandle",
    "StreamInbox",
    "StreamSender",
    "TimeoutConfig",
    "TransferFailed",
    "Transport",
    "UnknownHandle",
    "UnknownPeer",
    "Unquiesced",
    "UsageError",
    "WrongDirection",
    "__version__",
    "available",
]

_LAZY = {
    "Availability": "availability",
    "available": "availability",
    "Dispatch": "node",
    "Health": "node",
    "HealthKind": "node",
    "Message": "node",
    "Node": "node",
    "NodeStatistics": "node",
    "OrderedConfig": "node",
    "Overflow": "node",
    "PinnedPayload": "node",
    "PinnedWriter": "node",
    "Put": "node",
    "RegionGuard": "node",
    "RegionSlice": "node",
    "RegionWatch": "node",
    "RegisterOptions": "node",
    "SendResult": "node",
    "SendState": "node",
    "ShutdownPolicy": "node",
    "StreamHandle": "node",
    "StreamInbox": "node",
    "StreamSender": "node",
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
