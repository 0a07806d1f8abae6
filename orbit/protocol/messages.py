"""What the two ends of a control connection say, as frozen dataclasses.

Fields are checked against their annotations on arrival. Unknown fields are ignored and missing
ones take their default, and every default means what the protocol did before the field existed,
so that old and new peers understand each other. A field without a default has been there from the
first version. This module knows no bytes: `codec` does.

Method names: `_rv_*` of rendezvous, with `_connect_bulk` of D3 beside them.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from ..errors import PeerProtocolError
from ..model import Direction, Handle, SlotId, WorkerId

U64_MAX = (1 << 64) - 1


class Message:
    """Base of every message: `to_wire` gives plain maps, `from_wire` checks and builds."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        wire = {}
        for name in _schema(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            wire[name] = value if type(value) in _SCALARS else _pack(value)
        return wire

    @classmethod
    def from_wire(cls, body: object) -> Self:
        """Raises PeerProtocolError naming the message and the field."""
        if not isinstance(body, dict):
            raise PeerProtocolError(f"{cls.__name__}: expected a map, got {type(body).__name__}")
        values = {}
        for name, (kind, required) in _schema(cls).items():  # type: ignore[arg-type]
            value = body.get(name, MISSING)
            if type(value) is kind and (kind in _PLAIN or (kind is int and 0 <= value <= U64_MAX)):
                values[name] = value  # most fields, so looked at first
            elif value is not MISSING:
                values[name] = _unpack(cls.__name__, name, kind, value)
            elif required:
                raise PeerProtocolError(f"{cls.__name__}: field {name!r} is missing")
        try:
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise PeerProtocolError(f"{cls.__name__}: {error}") from error


def _pack(value: object) -> object:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Handle):
        return {"hi": value.worker_id, "lo": value.slot_id}
    if isinstance(value, Message):
        return value.to_wire()
    if isinstance(value, tuple | list):
        return [_pack(item) for item in value]
    return value


def _unpack(owner: str, name: str, kind: Any, value: object) -> Any:
    if type(value) is kind and (kind in _PLAIN or (type(value) is int and 0 <= value <= U64_MAX)):
        return value
    if isinstance(kind, _Optional):
        return None if value is None else _unpack(owner, name, kind.kind, value)
    if isinstance(kind, _Many):
        if not isinstance(value, list):
            raise PeerProtocolError(f"{owner}: field {name!r} must be a list")
        return tuple(_unpack(owner, name, kind.kind, item) for item in value)
    if kind is Handle:
        return _handle(owner, name, value)
    if isinstance(kind, type) and issubclass(kind, Message):
        return kind.from_wire(value)
    if kind is float and type(value) is int:
        return float(value)
    outside = type(value) is int and not 0 <= value <= U64_MAX
    if type(value) is not kind or outside:
        raise PeerProtocolError(
            f"{owner}: field {name!r} must be {kind.__name__}, got {str(value)[:40]!r}"
        )
    return value


_SCALARS = frozenset({bytes, str, bool, int, float, type(None)})  # most fields, so looked at first
_PLAIN = (bytes, str, bool)  # nothing about them can be wrong beside the type


@dataclass(frozen=True, slots=True)
class _Optional:
    """The annotation `kind | None`."""

    kind: Any


@dataclass(frozen=True, slots=True)
class _Many:
    """The annotation `tuple[kind, ...]`."""

    kind: Any


def _handle(owner: str, name: str, value: object) -> Handle:
    if isinstance(value, dict):
        high, low = value.get("hi"), value.get("lo")
        if type(high) is int and type(low) is int and 0 < high <= U64_MAX and 0 < low <= U64_MAX:
            return Handle(WorkerId(high), SlotId(low))
    raise PeerProtocolError(f"{owner}: field {name!r} is not a handle")


@cache
def _schema(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    return {
        f.name: (
            _plain(hints[f.name]),
            f.default is MISSING and f.default_factory is MISSING,
        )
        for f in fields(cls)
    }


def _plain(kind: Any) -> Any:
    """An annotation in the form that `_unpack` looks at."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _Optional(next(_plain(k) for k in options if k is not types.NoneType))
    if origin is tuple:
        return _Many(_plain(options[0]))
    return getattr(kind, "__supertype__", kind)  # NewType -> its base


# --- handshake (orbit/protocol/bootstrap/ runs it) ---


@dataclass(frozen=True, slots=True)
class RailHint(Message):
    """One rail that a node can use. No QPN, PSN or key ever stands here."""

    device: str
    port: int
    gid: str
    gid_index: int
    mtu: int
    link_layer: str = "ethernet"
    lid: int = 0
    pkey: int = 0xFFFF
    range_enforced: bool = True


@dataclass(frozen=True, slots=True)
class Limits(Message):
    """What a side grants and can take. `message_credits` 0: it takes no messages at all; then the
    three beside it mean nothing. A device's link may be granted less (`ConnectMessages`).
    """

    message_credits: int = 0
    reserve_credits: int = 0
    slab_bytes: int = 0
    eager_ceiling_bytes: int = 0
    rd_atomic: int = 0
    max_dest_rd_atomic: int = 0
    max_message_bytes: int = 0
    slices_max: int = 0
    grants_max: int = 0
    bulk_width: int = 0


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First frame of a control connection, in both directions. `attempt` names the epoch; `nonce`
    is 16 fresh bytes.

    `target` is the worker id that the dialer means to reach (0: whoever listens there); the
    listener echoes the dialer's id. `message_qpn` and `message_psn` are always 0: message queue
    pairs are exchanged after the proof, by `ConnectMessagesRequest`. `endpoints` are where this
    side can be dialed, as "host:port", so that the accepting end can open connections of its own.
    `dial_number` counts the dials of this life to that peer, from 1 (0: an older node, which uses
    only what it dialed), and `previous` is the attempt of the last epoch that the dialer held with
    it: so a late attempt is told from a new one (`protocol/connection/`).
    """

    version_min: int
    version_max: int
    worker_id: int
    incarnation: int
    target: int
    attempt: bytes
    nonce: bytes
    features: tuple[str, ...] = ()
    rails: tuple[RailHint, ...] = ()
    limits: Limits = field(default_factory=Limits)
    message_qpn: int = 0
    message_psn: int = 0
    endpoints: tuple[str, ...] = ()
    dial_number: int = 0
    previous: bytes = b""


@dataclass(frozen=True, slots=True)
class Proof(Message):
    """HMAC over both hellos with the shared secret (an empty secret when none is configured)."""

    mac: bytes


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Listener's last word: the epoch is open."""

    version: int


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """Either side's last word instead. `reason` is a stable code, `detail` for people."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BulkHello(Message):
    """First frame of a TCP bulk connection: joins the epoch `attempt` by a token keyed with its
    session key.
    """

    attempt: bytes
    nonce: bytes
    token: bytes


# --- rendezvous calls ---


@dataclass(frozen=True, slots=True)
class MetadataRequest(Message):
    METHOD: ClassVar[str] = "_rv_metadata"
    handle: Handle


@dataclass(frozen=True, slots=True)
class MetadataReply(Message):
    total_len: int
    refcount: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class SliceRun(Message):
    """`nbytes` bytes of a transfer, in payload order, that go through one array."""

    array: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RdmaOffer(Message):
    """The consumer can read (or write) by RDMA: these descriptor backends, through this array of
    bulk queue pairs. `pieces_max`: how many descriptors of one answer it can take; a payload of
    more pieces is refused with `no_offer`.

    `arrays`: it can do so through any of these at once, and the owner chooses how much through
    which. `runs`: it has chosen, and the runs cover what it asks for exactly. An owner from before
    them uses `array`.
    """

    backends: tuple[str, ...]
    array: int = 0
    pieces_max: int = 1
    arrays: tuple[int, ...] = ()
    runs: tuple[SliceRun, ...] = ()


@dataclass(frozen=True, slots=True)
class AcquireRequest(Message):
    """Take a read lock and let the owner choose the path. `rdma` None: no offer. `inline_max`
    bytes may ride on the answer. `skip_threshold`: the caller demanded RDMA, so rdma_min_bytes
    does not apply (D12). `lease_ms`: the consumer renews within that time also a lease of the TCP
    path, and wants it to end otherwise (0: no deadline, as before). `direction` 2: write `nbytes`
    bytes at `offset`; an owner from before it reads on, and its answer names no direction.
    """

    METHOD: ClassVar[str] = "_rv_acquire"
    handle: Handle
    rdma: RdmaOffer | None = None
    inline_max: int = 0
    skip_threshold: bool = False
    lease_ms: int = 0
    direction: int = int(Direction.READ)
    offset: int = 0
    nbytes: int = 0
    ranged: bool = False
    ranges: bytes = b""


@dataclass(frozen=True, slots=True)
class GrantPiece(Message):
    """One more piece of a payload that lies in several registrations or ranges."""

    descriptor: bytes
    grant: bytes


@dataclass(frozen=True, slots=True)
class RdmaAnswer(Message):
    """The 29-byte descriptor with its key, and the grant record beside it (D2), of the first piece;
    `rest` has those of the others, in payload order. `total_len` is the payload's size (the bytes
    to write), so that a consumer can check and allocate before it decodes anything.
    """

    lease_id: int
    descriptor: bytes
    grant: bytes
    lease_timeout_ms: int = 0
    total_len: int = 0
    rest: tuple[GrantPiece, ...] = ()
    direction: int = int(Direction.READ)


@dataclass(frozen=True, slots=True)
class ReadyAnswer(Message):
    """The TCP path. `inline` carries the whole payload if it fits the request's inline_max.
    `lease_timeout_ms` 0: the lease has no deadline.
    """

    lease_id: int
    transfer_id: int
    total_len: int
    reason: str = "no_offer"
    inline: bytes | None = None
    lease_timeout_ms: int = 0
    direction: int = int(Direction.READ)


@dataclass(frozen=True, slots=True)
class AcquireReply(Message):
    """Exactly one of the two is set."""

    rdma: RdmaAnswer | None = None
    ready: ReadyAnswer | None = None

    def __post_init__(self) -> None:
        if (self.rdma is None) == (self.ready is None):
            raise ValueError("exactly one of rdma and ready must be set")


@dataclass(frozen=True, slots=True)
class RefRequest(Message):
    METHOD: ClassVar[str] = "_rv_ref"
    handle: Handle


@dataclass(frozen=True, slots=True)
class DetachRequest(Message):
    """Drop the read lock. Names the grant: it is its DONE. `transferred` false: the READ failed,
    no receipt will come. `confirm`: of a lease to read too, answer only when nothing can reach the
    memory through it any more and all its receipts were matched (`in_place`): the ACK.
    """

    METHOD: ClassVar[str] = "_rv_detach"
    handle: Handle
    lease_id: int
    transferred: bool = True
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseRequest(Message):
    """Drop the read lock and one reference; otherwise as DetachRequest."""

    METHOD: ClassVar[str] = "_rv_release"
    handle: Handle
    lease_id: int
    transferred: bool = True


@dataclass(frozen=True, slots=True)
class EndReply(Message):
    """Answers a detach or release. `in_place`: it ended a lease to write (or to read, with
    `confirm`), the consumer said `transferred`, and every byte is where it should be. A lease that
    had ended before is no error, so for a write this is the only proof. An owner that knows READ
    only says nothing.
    """

    in_place: bool = False


@dataclass(frozen=True, slots=True)
class LeaseRenewRequest(Message):
    METHOD: ClassVar[str] = "_rv_lease_renew"
    handle: Handle
    lease_id: int


@dataclass(frozen=True, slots=True)
class EmptyReply(Message):
    pass


# --- bulk queue pairs (D3) ---


@dataclass(frozen=True, slots=True)
class BulkMember(Message):
    """One queue pair of an array, by its place in the array."""

    index: int
    qpn: int
    psn: int


@dataclass(frozen=True, slots=True)
class ConnectBulkRequest(Message):
    """(Re)connect members of one array of bulk queue pairs, requester to source. `rail` is the
    requester's, `source_gid` the rail of the source that the requester chose. `attempt` rises with
    each rebuild; an older one is refused. `direction`: what the requester will do. A reply that
    does not repeat it comes from a source that knows READ only.
    """

    METHOD: ClassVar[str] = "_connect_bulk"
    array: int
    attempt: int
    rail: RailHint
    source_gid: str
    members: tuple[BulkMember, ...]
    rd_atomic: int = 1
    connection: bytes = b""  # the requester's connection incarnation, 16 bytes, for the binding
    direction: int = int(Direction.READ)


@dataclass(frozen=True, slots=True)
class ConnectBulkReply(Message):
    rail: RailHint
    members: tuple[BulkMember, ...]
    rd_atomic: int = 1
    connection: bytes = b""  # the source's connection incarnation, 16 bytes, for the binding
    direction: int = int(Direction.READ)


@dataclass(frozen=True, slots=True)
class CloseBulkRequest(Message):
    """Requester to source: end that array. The answer, an EmptyReply, comes when its queue pairs
    are destroyed; the requester has drained its own before.
    """

    METHOD: ClassVar[str] = "_close_bulk"
    array: int


@dataclass(frozen=True, slots=True)
class BulkLostNotice(Message):
    """Notification, source to requester: these members of a READ array are gone on the source's
    side. It saves the requester the retries of its next READ; nothing depends on its arrival.
    `connection` names the source's incarnation of them, so that a late notice hits nothing newer.
    """

    METHOD: ClassVar[str] = "_bulk_lost"
    array: int
    connection: bytes
    indexes: tuple[int, ...]


# --- message links (D3, D7) ---


@dataclass(frozen=True, slots=True)
class ConnectMessagesRequest(Message):
    """Open the RC message link of this epoch, from the side that dialed. `attempt` rises with each
    link of the epoch; an older one is refused. `credits` and `replies` are what this side grants.
    """

    METHOD: ClassVar[str] = "_connect_messages"
    attempt: int
    rail: RailHint
    peer_gid: str  # the rail of the other side that this one chose
    qpn: int
    psn: int
    credits: int
    replies: int
    slab_bytes: int
    ceiling_bytes: int


@dataclass(frozen=True, slots=True)
class ConnectMessagesReply(Message):
    """The queue pair is connected and its receives are posted: the dialing side may send PING, the
    ready step.
    """

    rail: RailHint
    qpn: int
    psn: int
    credits: int
    replies: int
    slab_bytes: int
    ceiling_bytes: int


@dataclass(frozen=True, slots=True)
class OpenMessagesNotice(Message):
    """Notification, accepting side to dialing side: I want to send messages, open the RC link."""

    METHOD: ClassVar[str] = "_open_messages"


@dataclass(frozen=True, slots=True)
class MessagesLostNotice(Message):
    """Notification: link `attempt` is gone on this side, or never became ready; it saves the other
    side the retries of its next send.
    """

    METHOD: ClassVar[str] = "_messages_lost"
    attempt: int
    reason: str
    detail: str = ""
