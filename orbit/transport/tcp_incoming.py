"""A dialer that has proven itself and waits for its welcome: admitted, refused, or parked until the
node knows.

While it waits its connection is watched: a dialer that leaves, or speaks out of turn, is gone. It
decides nothing; the connection machine above does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import ClosedError, OrbitError, PeerProtocolError, PeerUnreachable
from ..protocol.bootstrap import Admit, Disconnected, Epoch, Listener, Refuse, Refused
from ..protocol.framing import SendFrame
from .tcp_handshake import EstablishedLink, HandshakeStream
from .tcp_link import TcpLink
from .tcp_wire import Endpoint


class IncomingLink:
    """Decide once: `admit` or `refuse`. `endpoint`: where the peer dialed from."""

    def __init__(
        self, machine: Listener, stream: HandshakeStream, epoch: Epoch, endpoint: Endpoint
    ) -> None:
        self.epoch = epoch
        self.endpoint = endpoint
        self._machine = machine
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._refusal: list[bytes] = []
        self._outcome: asyncio.Future[OrbitError | None] = self._loop.create_future()
        self._on_gone: Callable[[], None] | None = None

    def admit(self) -> TcpLink:
        """Say welcome. The link is the caller's, who starts it. Raises ClosedError when the dialer
        is gone, or its handshake has run out of time.
        """
        if self._outcome.done():
            raise ClosedError(f"the connection from {self._stream.wire.endpoint}")
        self._stream.wire.unwatch_readable()
        effects = self._machine.step(Admit(), self._loop.time())
        for effect in effects:
            if isinstance(effect, Refused):
                self._settle(effect.error)
                raise ClosedError(f"the connection from {self._stream.wire.endpoint}")
        link = TcpLink(self._stream.wire, self._stream.parser)
        for effect in effects:
            if isinstance(effect, SendFrame):
                link.send_nowait(effect.frame)
        self._settle(None)
        return link

    def refuse(self, reason: str, detail: str = "") -> None:
        """Say no. Nothing when the dialer is gone."""
        if not self._outcome.done():
            self._refuse(Refuse(reason, detail))

    def watch(self, on_gone: Callable[[], None]) -> None:
        """It has to wait. `on_gone` is called once if it leaves before the decision."""
        if self._outcome.done():
            self._loop.call_soon(on_gone)
            return
        self._on_gone = on_gone
        self._stream.wire.watch_readable(self._on_readable)

    async def wait_decided(self) -> None:
        """For the greeting: raises what it ended with, when it was not admitted. Says the refusal.
        Cancelling it, or its timeout, is the end of the wait as well.
        """
        try:
            error = await asyncio.shield(self._outcome)
        except asyncio.CancelledError:
            self._leave(PeerUnreachable(self._stream.wire.endpoint, "closed", "not decided"))
            if self._outcome.result() is not None:
                raise
            return  # admitted in this very moment: the connection is not the greeting's any more
        if error is not None:
            for frame in self._refusal:
                await self._stream.send(frame)
            raise error

    def _on_readable(self) -> None:
        wire = self._stream.wire
        try:
            count = wire.recv_into(memoryview(bytearray(1)))
        except OSError as error:
            self._leave_with(Disconnected(error.strerror or str(error)))
            return
        if count == 0:
            self._leave_with(Disconnected("it left before its welcome"))
        elif count is not None:
            self._leave(PeerProtocolError(f"{wire.endpoint}: spoke before its welcome"))

    def _leave_with(self, event: Disconnected) -> None:
        for effect in self._machine.step(event, self._loop.time()):
            if isinstance(effect, Refused):
                self._leave(effect.error)

    def _refuse(self, event: Refuse) -> None:
        effects = self._machine.step(event, self._loop.time())
        self._refusal = [effect.frame for effect in effects if isinstance(effect, SendFrame)]
        for effect in effects:
            if isinstance(effect, Refused):
                self._settle(effect.error)

    def _leave(self, error: OrbitError) -> None:
        on_gone = self._on_gone
        if not self._outcome.done():
            self._settle(error)
            if on_gone is not None:
                on_gone()

    def _settle(self, error: OrbitError | None) -> None:
        self._on_gone = None
        self._stream.wire.unwatch_readable()
        self._outcome.set_result(error)


def admit_all(
    on_control: Callable[[EstablishedLink], None],
) -> Callable[[IncomingLink], None]:
    """For an end that keeps no account of its connections."""

    def admit(incoming: IncomingLink) -> None:
        on_control(EstablishedLink(incoming.epoch, incoming.admit(), incoming.endpoint))

    return admit
