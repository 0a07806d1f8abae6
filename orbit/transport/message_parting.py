"""How one message link ends by agreement: runs the farewell machine, and holds those who wait for
its outcome.

It is told what passes over the link, and asks whether the link is idle. It closes nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..protocol.messaging.credits import CreditBook
from ..protocol.messaging.farewell import Farewell, FarewellState
from ..protocol.messaging.packets import CONTROL_KINDS, PacketKind
from .message_outbox import Outbox

_FIRST_CONTROL = int(min(CONTROL_KINDS))
# A ping that was out already may have been answered before the last frame was: ask once more.
_PINGS_MAX = 2
_GOODBYE = PacketKind.GOODBYE
_GOODBYE_ACK = PacketKind.GOODBYE_ACK


class Parting:
    """`spare`: whether this side could do without the link, as far as it knows. `open`: no goodbye
    is about. `silent`: no packet may leave. `agreed`: over. They are asked for each packet, so
    they are plain attributes.
    """

    def __init__(self, book: CreditBook, outbox: Outbox, spare: Callable[[], bool]) -> None:
        self._book = book
        self._outbox = outbox
        self._spare = spare
        self._farewell = Farewell()
        self._outcome: asyncio.Future[bool] | None = None
        self.open = True
        self.silent = False
        self.agreed = False

    async def part(self, ping: Callable[[], Awaitable[float]]) -> bool:
        """Say goodbye if this side is idle, and wait for the outcome. The answer to `ping`
        brings home the credit that the peer owes.
        """
        if self.open:
            if not self._spare():
                return False
            for _ in range(_PINGS_MAX):
                if not self._may_ask() and self._farewell.open:
                    await ping()
            if self._farewell.open:  # else the peer was quicker, or another caller here
                if not self._may_ask():
                    return False
                self._outbox.say(_GOODBYE)
                self._farewell.ask()
                self._moved()
        if self._outcome is None:
            self._outcome = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._outcome)

    def on_frame_sent(self) -> None:
        """Called before the packet is stamped."""
        self._farewell.on_frame_sent()
        self._settle_if_open()

    def on_received(self, kind: int) -> None:
        """A packet arrived whose returns were booked already."""
        if self.open:
            return
        if kind < _FIRST_CONTROL:
            self._farewell.on_frame_received()
        elif kind != _GOODBYE_ACK and self._book.may_send(_GOODBYE):
            self._farewell.on_refused()
        self._settle_if_open()

    def on_goodbye(self) -> None:
        if self._book.may_send(_GOODBYE_ACK) and self._farewell.on_goodbye(self._idle()):
            self._moved()
            self._outbox.say(_GOODBYE_ACK)
        elif self._book.may_send(PacketKind.GRANT):
            # No answer is due, but any packet tells the peer at once that it was refused.
            self._outbox.want(PacketKind.GRANT)

    def on_answer(self) -> None:
        """Afterwards `agreed` says whether the link must be closed."""
        owed = self._farewell.on_answer()
        self._moved()
        if owed:
            self._outbox.say(_GOODBYE_ACK)

    def settle(self, agreed: bool) -> None:
        """Tell those who wait."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None and not outcome.done():
            outcome.set_result(agreed)

    def _moved(self) -> None:
        farewell = self._farewell
        self.open, self.silent = farewell.open, farewell.silent
        self.agreed = farewell.state is FarewellState.AGREED
        self._outbox.watched = not self.open

    def _settle_if_open(self) -> None:
        self._moved()
        if self.open:
            self.settle(agreed=False)

    def _idle(self) -> bool:
        """Nothing is on its way in either direction."""
        return self._outbox.empty and self._book.idle and self._spare()

    def _may_ask(self) -> bool:
        return self._idle() and self._book.may_send(_GOODBYE)
