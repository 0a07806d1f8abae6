"""Credits of one message link, both directions, as a pure machine (D6).

Each side says what it *grants*: a window of slabs for messages and one for replies; each control
kind has one slab more. The sender takes a credit per packet before it posts; the receiver returns
it when the slab is its own again, for messages only while the peer's unconsumed inbound bytes are
under their bound. Nothing is granted for a grant: what a control packet's slab needs is a report
bit on any later packet. It knows no queue, no wire and no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from ...errors import InternalError, PeerProtocolError
from .packets import (
    CONTROL_KINDS,
    CREDITS_PER_PACKET_MAX,
    NOTHING_RETURNED,
    REPORT_BIT,
    PacketKind,
    Returned,
    Window,
)

WINDOW_DEFAULT: Final = 64
CONTROL_SLABS: Final = len(CONTROL_KINDS)
REFILL_MAX: Final = 16

# Plain integers: the kinds are compared for each packet, and an enum member costs more than that.
_MESSAGE = int(PacketKind.MESSAGE)
_FIRST_CONTROL = int(min(CONTROL_KINDS))
_PING = int(PacketKind.PING)
_PONG = int(PacketKind.PONG)
_GRANT_BIT = REPORT_BIT[PacketKind.GRANT]


@dataclass(frozen=True, slots=True)
class Windows:
    """What one side grants to the other. `replies` >= ceil(messages / 4)."""

    messages: int = WINDOW_DEFAULT
    replies: int = WINDOW_DEFAULT // 4

    def __post_init__(self) -> None:
        if self.messages < 1 or self.replies < ceil(self.messages / 4):
            raise ValueError(f"windows {self.messages}/{self.replies}")

    @property
    def slabs(self) -> int:
        """What the receive queue must hold for this peer, without the refill batch."""
        return self.messages + self.replies + CONTROL_SLABS

    @property
    def refill(self) -> int:
        return min(REFILL_MAX, ceil(self.messages / 4))


class CreditBook:
    """One link's credits. `granted`: what this side grants; `allowed`: what the peer grants.

    For each received packet call `on_returned` with its header, then `on_packet`.
    """

    __slots__ = (
        "_allowed",
        "_controls_out",
        "_granted",
        "_inbound_bytes_max",
        "_messages",
        "_messages_owed",
        "_pinging",
        "_pong_owed",
        "_refill",
        "_replies",
        "_replies_owed",
        "_replies_refill",
        "_reports_owed",
        "_unconsumed",
    )

    def __init__(self, granted: Windows, allowed: Windows, inbound_bytes_max: int) -> None:
        self._granted = granted
        self._allowed = allowed
        self._inbound_bytes_max = inbound_bytes_max
        self._refill = granted.refill
        # Replies mostly flow against messages, which carry their credit back for nothing, so a
        # packet of its own waits longer: until the peer holds no more than a quarter.
        self._replies_refill = granted.replies - granted.replies // 4
        # As the sender: credits at hand, control kinds whose slab at the peer is not free again.
        self._messages = allowed.messages
        self._replies = allowed.replies
        self._controls_out = 0
        self._pinging = False
        # As the receiver: what arrived and was not returned yet.
        self._messages_owed = 0
        self._replies_owed = 0
        self._reports_owed = 0
        self._pong_owed = False
        self._unconsumed = 0

    # --- as the sender ---

    def may_send(self, kind: int) -> bool:
        """Whether `take(kind)` would succeed now."""
        if kind == _MESSAGE:
            return self._messages > 0
        if kind < _FIRST_CONTROL:
            return self._replies > 0
        if self._controls_out & REPORT_BIT[kind]:
            return False
        if kind == _PING:
            # The slab may be reported before its pong comes; a second ping would want a second
            # pong, and there is one slab for pongs.
            return not self._pinging
        return kind != _PONG or self._pong_owed

    def take(self, kind: int) -> None:
        """Pay for one packet. InternalError when nothing is left: the caller must ask first."""
        if kind == _MESSAGE and self._messages > 0:
            self._messages -= 1
        elif not self.may_send(kind):
            raise InternalError(f"a packet of kind {kind} without credit")
        elif kind < _FIRST_CONTROL:
            self._replies -= 1
        else:
            self._controls_out |= REPORT_BIT[kind]
            if kind == _PING:
                self._pinging = True
            elif kind == _PONG:
                self._pong_owed = False

    def try_take(self, kind: int) -> bool:
        """`may_send` and `take` in one, for frames. False: nothing is left."""
        if kind == _MESSAGE:
            if self._messages > 0:
                self._messages -= 1
                return True
        elif self._replies > 0:
            self._replies -= 1
            return True
        return False

    def on_returned(self, returned: Returned) -> None:
        """What a received packet's header gives back. Raises PeerProtocolError when it is more than
        was taken.
        """
        credits, replies, reports = returned
        if credits:
            self._messages += credits
            if self._messages > self._allowed.messages:
                raise PeerProtocolError("more message credits returned than taken")
        if replies:
            self._replies += replies
            if self._replies > self._allowed.replies:
                raise PeerProtocolError("more reply credits returned than taken")
        if reports:
            if reports & ~self._controls_out:
                raise PeerProtocolError(f"slabs {reports:#04x} reported that were not taken")
            self._controls_out &= ~reports

    # --- as the receiver ---

    def on_packet(self, kind: int, nbytes: int) -> None:
        """A packet arrived: `nbytes` of its body stay unconsumed (0 for all but messages). Raises
        PeerProtocolError when the peer had no credit for it.

        A segmented message counts as a whole, with the packet that completes it: if its first
        segments counted, a message could withhold the credit of its own last one for ever.
        """
        if kind == _MESSAGE:
            if self._messages_owed >= self._granted.messages:
                raise PeerProtocolError("a message without credit")
            self._messages_owed += 1
            self._unconsumed += nbytes
        elif kind < _FIRST_CONTROL:
            if self._replies_owed >= self._granted.replies:
                raise PeerProtocolError("a reply without credit")
            self._replies_owed += 1
        else:
            self._on_control(kind)

    def _on_control(self, kind: int) -> None:
        bit = REPORT_BIT[kind]
        if self._reports_owed & bit:
            raise PeerProtocolError(f"control packet {kind} before its slab was reported")
        self._reports_owed |= bit
        if kind == _PING:
            if self._pong_owed:
                raise PeerProtocolError("a ping before the last one was answered")
            self._pong_owed = True
        elif kind == _PONG:
            if not self._pinging:
                raise PeerProtocolError("a pong without a ping")
            self._pinging = False

    def on_consumed(self, nbytes: int) -> None:
        """The application is done with that many bytes of messages."""
        if nbytes > self._unconsumed:
            raise InternalError(f"{nbytes} bytes consumed of {self._unconsumed}")
        self._unconsumed -= nbytes

    def on_renewed(self, nbytes: int) -> None:
        """Bytes that were consumed before their message was answered are held again, by the answer
        on its way out. They may pass the bound: what was credited stays credited.
        """
        self._unconsumed += nbytes

    def stamp(self) -> Returned:
        """What the next outgoing packet returns; it counts as returned from now on."""
        credits = self._messages_owed
        if credits and self._unconsumed >= self._inbound_bytes_max:
            credits = 0
        replies, reports = self._replies_owed, self._reports_owed
        if not (credits or replies or reports):
            return NOTHING_RETURNED
        if credits > CREDITS_PER_PACKET_MAX or replies > CREDITS_PER_PACKET_MAX:
            credits = min(credits, CREDITS_PER_PACKET_MAX)
            replies = min(replies, CREDITS_PER_PACKET_MAX)
        self._messages_owed -= credits
        self._replies_owed -= replies
        self._reports_owed = 0
        return Returned(credits, replies, reports)

    def due(self, *, starving: bool = False) -> PacketKind | None:
        """Which control packet must carry returns that no other packet would carry soon: GRANT;
        PING when the grant's slab is not reported yet; None when nothing is due or both are out.
        Ask at the end of each drain pass and after `on_consumed`. Call `take` for it and stamp it.

        `starving`: any return at all is due, be it one credit. Reports alone never are: a grant
        that reported a grant would be answered by the next one, without end.
        """
        credits = self._messages_owed
        if self._unconsumed >= self._inbound_bytes_max:
            credits = 0
        replies = self._replies_owed
        if starving:
            if not (credits or replies):
                return None
        elif credits < self._refill and replies < self._replies_refill:
            return None
        if not self._controls_out & _GRANT_BIT:
            return PacketKind.GRANT
        return PacketKind.PING if self.may_send(_PING) else None

    # --- observation ---

    @property
    def unconsumed_bytes(self) -> int:
        return self._unconsumed

    @property
    def withholding(self) -> bool:
        """Message credit is withheld because of the inbound bound."""
        return self._messages_owed > 0 and self._unconsumed >= self._inbound_bytes_max

    def available(self, window: Window) -> int:
        """Credits that this side may still take of a window (0 or more)."""
        if window is Window.MESSAGES:
            return self._messages
        if window is Window.REPLIES:
            return self._replies
        return CONTROL_SLABS - self._controls_out.bit_count()

    def owed(self, window: Window) -> int:
        """Credits of what arrived here and was not returned to the peer yet."""
        if window is Window.MESSAGES:
            return self._messages_owed
        if window is Window.REPLIES:
            return self._replies_owed
        return self._reports_owed.bit_count()

    @property
    def idle(self) -> bool:
        """Every credit that this side took of messages and replies has come back, and nothing that
        arrived is unconsumed: what an idle close needs. A ping and its pong bring both sides'
        small debts home, since every packet returns all that it can.
        """
        return (
            self._messages == self._allowed.messages
            and self._replies == self._allowed.replies
            and not self._unconsumed
        )


class SlabLedger:
    """How the slabs of one shared receive queue are promised to peers: `depth` >= the sum of all
    peers' windows and control slabs, and one refill batch.
    """

    __slots__ = ("_capacity", "_promised")

    def __init__(self, depth: int) -> None:
        self._capacity = max(depth - REFILL_MAX, 0)
        self._promised = 0

    def promise(self, wanted: Windows) -> Windows | None:
        """The windows that can be granted: `wanted`, or smaller ones (halved until they fit, down
        to 1 and 1), or None: this peer gets no link.
        """
        windows = wanted
        while windows.slabs > self.free:
            if windows.messages == windows.replies == 1:
                return None
            messages = max(windows.messages // 2, 1)
            windows = Windows(messages, max(windows.replies // 2, ceil(messages / 4)))
        self._promised += windows.slabs
        return windows

    def take_back(self, windows: Windows) -> None:
        """That link is gone and its packets have been drained."""
        if windows.slabs > self._promised:
            raise InternalError(f"{windows} taken back, {self._promised} slabs promised")
        self._promised -= windows.slabs

    @property
    def free(self) -> int:
        return self._capacity - self._promised
