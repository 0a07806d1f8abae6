"""This node's end of one RC message link, from its queue pair to its last slab.

Owns the queue pair, what the rail reserved for it, the wire and the link above, and gives all of it
back in order. It makes no call and does not decide when a link is opened.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import ClosedError, OrbitError
from ...model import PathName
from ...protocol.messages import RailHint
from ...protocol.messaging.credits import Windows
from ...transport.message_link import LinkTerms, PacketLink
from ...transport.messages import LinkClient, LinkLimits
from ..outcomes import take_exception
from ..queue_pair import RemoteEnd
from ..rail_pairs import path_mtu
from .rail import MessageRail, Reservation
from .rc_wire import RcWire, WireHooks
from .settings import RdmaMessagesConfig


@dataclass(frozen=True, slots=True)
class TheirEnd:
    """What the other side said of its end."""

    rail: RailHint
    qpn: int
    psn: int
    windows: Windows  # what it grants
    slab_bytes: int
    ceiling_bytes: int


class LinkEnd:
    """Made by `open`; ended by `abort`, or by its link. `attempt` names the link on both sides."""

    def __init__(
        self,
        rail: MessageRail,
        reservation: Reservation,
        attempt: int,
        peer: str,
        config: RdmaMessagesConfig,
    ) -> None:
        self._rail = rail
        self._reservation = reservation
        self._peer = peer
        self._config = config
        self._wire: RcWire | None = None
        self._ending: asyncio.Task[None] | None = None
        self._queue_pair = rail.create_queue_pair(reservation)
        self.attempt = attempt
        self.psn = secrets.randbelow(1 << 24)
        self.link: PacketLink | None = None
        self.ready = False  # a first packet has come from the peer
        self.told = False  # the peer knows of the end, or said it
        self.closed_by_peer = False  # in good order
        self.timer: asyncio.TimerHandle | None = None  # to its end, unless something comes
        self.closed = asyncio.Event()

    @classmethod
    def open(
        cls,
        rail: MessageRail,
        allowed: Windows,
        attempt: int,
        peer: str,
        config: RdmaMessagesConfig,
    ) -> LinkEnd:
        """On an open rail. Raises PathUnavailable (no_slabs), DeviceError."""
        reservation = rail.reserve(allowed)
        try:
            return cls(rail, reservation, attempt, peer, config)
        except BaseException:
            rail.release(reservation)
            raise

    @property
    def rail(self) -> MessageRail:
        return self._rail

    @property
    def qpn(self) -> int:
        return self._queue_pair.qp_num

    @property
    def windows(self) -> Windows:
        """What this end grants."""
        return self._reservation.windows

    @property
    def ended(self) -> bool:
        """Nothing new goes by it; its resources may be there still."""
        if self._wire is not None:
            return self._wire.ended or not self._queue_pair.ready
        return self._ending is not None

    async def connect(self, theirs: TheirEnd) -> None:
        """Raises DeviceError, DeadlineExceeded, ClosedError; `abort` it then."""
        device = self._rail.device
        remote = RemoteEnd(
            gid=theirs.rail.gid,
            lid=theirs.rail.lid,
            qpn=theirs.qpn,
            psn=theirs.psn,
            path_mtu=path_mtu(device.rail.mtu, theirs.rail.mtu),
            rd_atomic=1,  # nobody reads by it; 0 makes some devices hang
            link_layer=device.rail.link_layer,
        )
        local = device.local_end(self.psn, remote_read=False)
        await self._queue_pair.connect(local, remote, self._config.connect_timeout_s)

    def start(
        self,
        theirs: TheirEnd,
        client: LinkClient,
        on_ready: Callable[[LinkEnd], None],
        on_lost: Callable[[LinkEnd, OrbitError | None], None],
    ) -> PacketLink:
        """The link over the connected queue pair. Packets are delivered from now on."""
        limits = self._config.limits

        def first() -> None:
            self.ready = True
            on_ready(self)

        wire = self._wire = RcWire(
            self._queue_pair,
            self._rail.send_slabs,
            self._reservation.send_slabs,
            min(limits.slab_bytes, theirs.slab_bytes),
            self._peer,
            self._config.close_timeout_s,
            WireHooks(first, lambda error: on_lost(self, error), self._gone),
        )
        other = LinkLimits(
            windows=theirs.windows,
            slab_bytes=theirs.slab_bytes,
            ceiling_bytes=theirs.ceiling_bytes,
        )
        own = replace(limits, windows=self.windows)
        rail = self._rail.device.name
        terms = LinkTerms.between(PathName.RDMA, self._peer, own, other, rail)
        self.link = PacketLink(wire, client, terms)
        return self.link

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def abort(self, error: OrbitError) -> None:
        """Idempotent."""
        if self.link is not None:
            self.link.abort(error)
        elif self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._close())
            self._ending.add_done_callback(take_exception)

    async def wait_closed(self) -> None:
        """After `abort`: until everything is given back. Raises Unquiesced."""
        if self._wire is not None:
            await self._wire.wait_closed()
        elif self._ending is not None:
            await asyncio.wait([self._ending])
            if self._ending.exception() is not None:
                await self._close()

    async def _close(self) -> None:
        await self._queue_pair.close(ClosedError("the message link"))
        self._gone()

    def _gone(self) -> None:
        self._rail.release(self._reservation)
        self.closed.set()
