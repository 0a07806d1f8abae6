"""The messaging half of one node, put together: messenger, handlers, streams, and their transports.

It rides on the sessions that the rendezvous half opens (sessions.SessionService), and owns the
order in which messaging ends. What each part does is its own module's business.
"""

from __future__ import annotations

import asyncio
import logging

from ...errors import ClosedError, OrbitError, PeerLost, Unquiesced
from ...events import MemoryRetained
from ...protocol.streams.frames import AttachRequest
from ...transport.interface import CallHandler, PacketRoute, Session
from ..retained import retain
from ..session import ControlSession
from .contract import Payload
from .handlers import Message
from .messenger import Messenger, Sinks, Surroundings
from .serving import Serving
from .stream_frames import ItemStore
from .streams import Streams

_log = logging.getLogger("orbit")

# For what is still on its way when the node closes. A peer that is there needs a round trip.
_FAREWELL_S = 0.5


class MessagingService:
    """Implements sessions.SessionService. `packets` routes what rides on the control connections;
    None: this node takes no messages by TCP.
    """

    def __init__(
        self, around: Surroundings, serving: Serving, items: ItemStore, packets: PacketRoute | None
    ) -> None:
        self.messenger = Messenger(around)
        self.streams = Streams(self.messenger, items, around.config.messaging)
        self.packets = packets
        self._serving = serving
        self._around = around
        serving.dispatcher.add(AttachRequest.METHOD, self._on_attach, reserved=True)
        self.messenger.attach(Sinks(serving.dispatcher, self.streams, serving.link_opened))

    # --- SessionService ---------------------------------------------------------------------------

    def handlers(self) -> dict[str, CallHandler]:
        """Control calls that the transports answer themselves."""
        merged: dict[str, CallHandler] = {}
        for transport in self._around.transports:
            merged.update(transport.handlers())
        return merged

    def session_closed(self, session: ControlSession) -> None:
        """The epoch is over: everything that went by it hears so now."""
        cause: OrbitError = session.cause or ClosedError(f"the session with {session.peer}")
        if not isinstance(cause, PeerLost):
            cause = PeerLost(str(session.peer), str(cause))
        self.messenger.session_closed(session, cause)

    async def end_session(self, session: Session) -> None:
        """Return when the epoch's links hold nothing any more."""
        for transport in self._around.transports:
            try:
                await transport.close_session(session)
            except Unquiesced as error:
                self._keep(transport, error)
            except OrbitError as error:
                _log.warning("ending messages by %s on %s: %s", transport.name, session.peer, error)

    async def close(self) -> None:
        """The transports, once every session has been cleaned up after."""
        for transport in self._around.transports:
            try:
                await transport.close()
            except Unquiesced as error:
                self._keep(transport, error)

    # --- the end ----------------------------------------------------------------------------------

    async def stop(self, timeout_s: float) -> None:
        """No more requests and no more sends; what is on its way to peers gets a moment."""
        await self._serving.close(timeout_s)
        self.streams.close()
        self.messenger.close()
        links = [r.link for r in self.messenger.routes() if r.session is not None]
        await asyncio.gather(*(link.goodbye(min(_FAREWELL_S, timeout_s)) for link in links))

    # --- within -----------------------------------------------------------------------------------

    def _on_attach(self, message: Message) -> Payload:
        return self.streams.attach_requested(message.sender, message.payload)

    def _keep(self, transport: object, error: Unquiesced) -> None:
        """It must outlive its node, with all that it holds."""
        retain(error, transport)
        self._around.recorder.record(MemoryRetained(error.what, error.retained_bytes, error.cause))
