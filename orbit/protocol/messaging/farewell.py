"""The agreed end of one message link, as a pure machine: no frame is lost on either side.

    A                                    B
    GOODBYE (A is idle)        ------>   idle too: answers, and is silent from now on
                               <------   GOODBYE_ACK
    nothing sent meanwhile:
    GOODBYE_ACK, closes        ------>   closes

A side closes once it has both said and heard GOODBYE_ACK. B, when it is not idle, goes on as if
nothing had been said. A holds nothing back: a frame that it sends after its GOODBYE revokes it, and
takes B out of its silence, since what B said before cannot close A any more. So A's waiting has a
deadline and B's ends with A's next packet. Goodbyes that cross answer each other.

GOODBYE_ACK must be the first packet after the GOODBYE that it answers. Then the report of the
GOODBYE's slab tells A, on any other packet, that the answer is no.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class FarewellState(StrEnum):
    OPEN = "open"
    ASKED = "asked"  # GOODBYE was said, and no frame since
    SILENT = "silent"  # GOODBYE_ACK was said: nothing may be sent
    AGREED = "agreed"  # over


# input -> what follows in each state where it means something
TRANSITIONS: Final[dict[str, dict[FarewellState, FarewellState]]] = {
    "asked": {FarewellState.OPEN: FarewellState.ASKED},
    "refused": {FarewellState.ASKED: FarewellState.OPEN},
    "sent": {FarewellState.ASKED: FarewellState.OPEN},
    "heard": {FarewellState.ASKED: FarewellState.OPEN, FarewellState.SILENT: FarewellState.OPEN},
    "answered": {
        FarewellState.OPEN: FarewellState.SILENT,
        FarewellState.ASKED: FarewellState.SILENT,
    },
    "agreed": {
        FarewellState.ASKED: FarewellState.AGREED,
        FarewellState.SILENT: FarewellState.AGREED,
    },
}


class Farewell:
    """Each method names what happened. Those that the state gives no meaning change nothing."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = FarewellState.OPEN

    @property
    def open(self) -> bool:
        return self.state is FarewellState.OPEN

    @property
    def silent(self) -> bool:
        """No packet may leave."""
        return self.state is FarewellState.SILENT or self.state is FarewellState.AGREED

    def ask(self) -> None:
        """This side said GOODBYE, being idle."""
        self._step("asked")

    def on_refused(self) -> None:
        """The slab of this side's GOODBYE was reported, and not by a GOODBYE_ACK."""
        self._step("refused")

    def on_frame_sent(self) -> None:
        self._step("sent")

    def on_frame_received(self) -> None:
        """The peer was not idle when it got this side's GOODBYE, or has revoked its own."""
        self._step("heard")

    def on_goodbye(self, idle: bool) -> bool:
        """The peer said GOODBYE: whether GOODBYE_ACK must be said, at once and as the last word."""
        if not idle or self.silent:
            return False
        self._step("answered")
        return True

    def on_answer(self) -> bool:
        """The peer said GOODBYE_ACK: whether this side owes one before it closes. A late one that
        was revoked meanwhile means nothing.
        """
        owed = self.state is FarewellState.ASKED
        self._step("agreed")
        return owed

    def _step(self, happened: str) -> None:
        self.state = TRANSITIONS[happened].get(self.state, self.state)
