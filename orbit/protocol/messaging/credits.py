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

from .packets import PacketKind, Returned, Window

WINDOW_DEFAULT: Final = 64
CONTROL_SLABS: Final = 5
REFILL_MAX: Final = 16


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
    """One link's credits. `granted`: what this side grants; `allowed`: what the peer grants."""

    def __init__(self, granted: Windows, allowed: Windows, inbound_bytes_max: int) -> None:
        raise NotImplementedError

    # --- as the sender ---

    def may_send(self, kind: int) -> bool:
        """Whether `take(kind)` would succeed now."""
        raise NotImplementedError

    def take(self, kind: int) -> None:
        """Pay for one packet. InternalError when nothing is left: the caller must ask first."""
        raise NotImplementedError

    def on_returned(self, returned: Returned) -> None:
        """What a received packet's header gives back. Raises PeerProtocolError when it is more than
        was taken.
        """
        raise NotImplementedError

    # --- as the receiver ---

    def on_packet(self, kind: int, nbytes: int) -> None:
        """A packet arrived: `nbytes` of its body stay unconsumed (0 for all but messages). Raises
        PeerProtocolError when the peer had no credit for it.
        """
        raise NotImplementedError

    def on_consumed(self, nbytes: int) -> None:
        """The application is done with that many bytes of messages."""
        raise NotImplementedError

    def stamp(self) -> Returned:
        """What the next outgoing packet returns; it counts as returned from now on."""
        raise NotImplementedError

    def due(self, *, starving: bool = False) -> PacketKind | None:
        """Which control packet must carry returns that no other packet would carry soon: GRANT;
        PING when the grant's slab is not reported yet; None when nothing is due or both are out.
        Ask at the end of each drain pass and after `on_consumed`. Call `take` for it and stamp it.
        """
        raise NotImplementedError

    # --- observation ---

    @property
    def unconsumed_bytes(self) -> int:
        raise NotImplementedError

    @property
    def withholding(self) -> bool:
        """Message credit is withheld because of the inbound bound."""
        raise NotImplementedError

    def available(self, window: Window) -> int:
        """Credits that this side may still take of a window (0 or more)."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Every credit that this side took of messages and replies has come back, and nothing that
        arrived is unconsumed: what an idle close needs.
        """
        raise NotImplementedError


class SlabLedger:
    """How the slabs of one shared receive queue are promised to peers: `depth` >= the sum of all
    peers' windows and control slabs, and one refill batch.
    """

    def __init__(self, depth: int) -> None:
        raise NotImplementedError

    def promise(self, wanted: Windows) -> Windows | None:
        """The windows that can be granted: `wanted`, or smaller ones (halved until they fit, down
        to 1 and 1), or None: this peer gets no link.
        """
        raise NotImplementedError

    def take_back(self, windows: Windows) -> None:
        """That link is gone and its packets have been drained."""
        raise NotImplementedError

    @property
    def free(self) -> int:
        raise NotImplementedError
