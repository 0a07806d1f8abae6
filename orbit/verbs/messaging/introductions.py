"""What the two ends of a message link say to each other before there is one, and the choice of
rails.

Pure: it builds and checks the control calls' messages. It keeps no state and makes no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...errors import PeerRefused
from ...model import PathReason
from ...protocol.messages import (
    ConnectMessagesReply,
    ConnectMessagesRequest,
    MessagesLostNotice,
    RailHint,
)
from ...protocol.messaging.credits import Windows
from ...transport.interface import Session
from ...transport.messages import LinkLimits
from ..rail_pairs import choose_pair, is_gid
from .link_end import LinkEnd, TheirEnd
from .rail import MessageRail

# Reasons in a notice, beside those of PathReason: the link was closed in good order; it broke.
CLOSED: Final = "closed"
FAILED: Final = "failed"
DETAIL_MAX: Final = 200  # characters of a peer's words that are repeated

_QPN_MAX = 0xFF_FFFF
_SLAB_BYTES_MIN = 512
_WINDOW_MAX = 1 << 14


def request_of(end: LinkEnd, remote: RailHint, limits: LinkLimits) -> ConnectMessagesRequest:
    return ConnectMessagesRequest(
        attempt=end.attempt,
        rail=end.rail.device.rail,
        peer_gid=remote.gid,
        qpn=end.qpn,
        psn=end.psn,
        credits=end.windows.messages,
        replies=end.windows.replies,
        slab_bytes=limits.slab_bytes,
        ceiling_bytes=limits.ceiling_bytes,
    )


def reply_of(end: LinkEnd, limits: LinkLimits) -> ConnectMessagesReply:
    return ConnectMessagesReply(
        rail=end.rail.device.rail,
        qpn=end.qpn,
        psn=end.psn,
        credits=end.windows.messages,
        replies=end.windows.replies,
        slab_bytes=limits.slab_bytes,
        ceiling_bytes=limits.ceiling_bytes,
    )


def their_end(said: ConnectMessagesRequest | ConnectMessagesReply) -> TheirEnd:
    """Checked before anything is made for it. Raises PeerRefused: both sides may say it."""
    if not is_gid(said.rail.gid) or said.qpn > _QPN_MAX or said.psn > _QPN_MAX:
        raise PeerRefused("bad_request", "rail or queue-pair number")
    if said.slab_bytes < _SLAB_BYTES_MIN:
        raise PeerRefused("bad_request", f"slabs of {said.slab_bytes} bytes")
    try:
        windows = Windows(said.credits, said.replies)
    except ValueError as error:
        raise PeerRefused("bad_request", str(error)) from error
    return TheirEnd(said.rail, said.qpn, said.psn, windows, said.slab_bytes, said.ceiling_bytes)


def announced_windows(session: Session) -> Windows:
    """What the peer's hello grants: a link may be granted less, hardly more."""
    limits = session.peer_hello.limits
    messages = min(max(1, limits.message_credits), _WINDOW_MAX)
    return Windows(messages, max(-(-messages // 4), min(limits.reserve_credits, _WINDOW_MAX)))


def notify_lost(session: Session, attempt: int, reason: str, detail: str) -> None:
    if not session.closed:
        session.notify(MessagesLostNotice(attempt, reason, detail[:DETAIL_MAX]))


def usable_rails(rails: Sequence[MessageRail]) -> tuple[list[MessageRail], PathReason]:
    """Rails that can be used now; when there are none, why."""
    usable, reason = [], PathReason.NO_DEVICE
    for rail in rails:
        found = rail.availability()
        if found is PathReason.OK:
            usable.append(rail)
        else:
            reason = found
    return usable, reason


def choose_rail(
    usable: Sequence[MessageRail], session: Session
) -> tuple[MessageRail, RailHint] | None:
    """The local rail and the peer's that fit best: one of each serves the whole epoch (D3)."""
    remote = session.peer_hello.rails
    chosen = choose_pair([rail.device.rail for rail in usable], remote)
    return None if chosen is None else (usable[chosen[0]], remote[chosen[1]])


def reason_of(refusal: PeerRefused) -> PathReason:
    if refusal.reason == "unknown_method":  # an older node, or one without messages on RDMA
        return PathReason.PEER_WITHOUT
    return known_reason(refusal.reason)


def known_reason(reason: str) -> PathReason:
    try:
        return PathReason(reason)
    except ValueError:
        return PathReason.CONNECT_FAILED
