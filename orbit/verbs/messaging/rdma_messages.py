"""MessageTransport over RC queue pairs: the links of every epoch, and the devices below (D3, D7).

The side that dialed the session opens the link by a control call; the other side asks for it by a
notification. A link is ready when a packet has crossed it in both directions, and nothing else is
sent before. One that never gets ready leaves its epoch to TCP; one that dies later is replaced by
the next `open`. What a packet says is the link's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ...errors import OrbitError, PathUnavailable, PeerLost, PeerRefused, Unquiesced
from ...memory.budget import Budget
from ...model import PathName, PathReason
from ...protocol.messages import (
    ConnectMessagesRequest,
    Message,
    MessagesLostNotice,
    OpenMessagesNotice,
)
from ...transport.interface import CallHandler, Session
from ...transport.messages import LinkClient, LinkOpened, MessageLink
from ..device import DeviceContext
from .epoch_links import EpochLinks
from .rail import MessageRail
from .settings import RdmaMessagesConfig
from .statistics import MessagesCounters, MessagesStatistics, collect


class RdmaMessages:
    """Made by `opening.open_rdma_messages`. All methods belong to one event loop."""

    name = PathName.RDMA

    def __init__(
        self, devices: Sequence[DeviceContext], config: RdmaMessagesConfig, budget: Budget
    ) -> None:
        self._config = config
        self._rails = tuple(MessageRail(device, config, budget) for device in devices)
        self._counters = MessagesCounters()
        self._epochs: dict[bytes, EpochLinks] = {}  # by session attempt
        self._client: LinkClient | None = None
        self._on_opened: LinkOpened = _nobody
        self._closing: asyncio.Task[None] | None = None

    @property
    def rails(self) -> tuple[MessageRail, ...]:
        return self._rails

    def availability(self, session: Session) -> PathReason:
        if self._closing is not None or session.closed:
            return PathReason.DRAINING
        return self._epoch(session).availability()

    async def open(self, session: Session, client: LinkClient) -> MessageLink:
        if self._closing is not None or session.closed:
            raise PathUnavailable(PathName.RDMA, PathReason.DRAINING)
        return await self._epoch(session).open(client)

    def watch(self, client: LinkClient, on_opened: LinkOpened) -> None:
        self._client, self._on_opened = client, on_opened

    def handlers(self) -> Mapping[str, CallHandler]:
        return {
            ConnectMessagesRequest.METHOD: self._on_connect,
            OpenMessagesNotice.METHOD: self._on_asked,
            MessagesLostNotice.METHOD: self._on_lost,
        }

    async def close_session(self, session: Session) -> None:
        epoch = self._epochs.get(session.attempt)
        if epoch is None:
            return
        try:
            await epoch.close(PeerLost(str(session.peer), "its connection is over"))
        finally:
            self._epochs.pop(session.attempt, None)

    async def close(self) -> None:
        """Links, then what the rails hold. Idempotent. Raises Unquiesced: then the rest is left to
        the end of the process.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    def statistics(self) -> MessagesStatistics:
        return collect(self._counters, self._rails)

    def counts(self) -> Mapping[str, int]:
        """See transport.messages.Counting."""
        return asdict(self.statistics())

    # --- within -----------------------------------------------------------------------------------

    def _epoch(self, session: Session) -> EpochLinks:
        epoch = self._epochs.get(session.attempt)
        if epoch is None:
            epoch = EpochLinks(
                session, self._rails, self._config, self._counters, self._client, self._opened
            )
            if not session.closed:  # else nobody would close it
                self._epochs[session.attempt] = epoch
        return epoch

    def _opened(self, session: Session, link: MessageLink) -> None:
        self._on_opened(session, link)

    async def _on_connect(self, session: Session, body: object) -> Message:
        request = ConnectMessagesRequest.from_wire(body)
        if self._closing is not None or session.closed:
            raise PeerRefused("closing")
        return await self._epoch(session).accept(request)

    async def _on_asked(self, session: Session, body: object) -> None:
        OpenMessagesNotice.from_wire(body)
        if self._closing is None and not session.closed:
            self._epoch(session).asked()

    async def _on_lost(self, session: Session, body: object) -> None:
        notice = MessagesLostNotice.from_wire(body)
        epoch = self._epochs.get(session.attempt)
        if epoch is not None:
            epoch.lost_at_peer(notice)

    async def _close(self) -> None:
        epochs, self._epochs = list(self._epochs.values()), {}
        cause = OrbitError("this node closes")
        results = await asyncio.gather(
            *(epoch.close(cause) for epoch in epochs), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]
        try:
            for rail in self._rails:
                await rail.close()
        except (OrbitError, TimeoutError) as error:
            held = sum(rail.registered_bytes for rail in self._rails)
            raise Unquiesced("RDMA messages", held, str(error)) from error


def _nobody(session: Session, link: MessageLink) -> None:
    """Nobody watches."""
