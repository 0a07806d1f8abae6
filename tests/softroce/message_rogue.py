"""What a peer does that follows no rule: posts on the queue pair of its own message link, below
everything that would keep it from that.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from orbit.model import PathName
from orbit.transport.message_link import PacketLink
from orbit.verbs import completion_source, records
from orbit.verbs.messaging import message_lane
from orbit.verbs.messaging.rc_wire import RcWire
from orbit.verbs.messaging.wr_ids import send_id
from orbit.verbs.records import pack_send

if TYPE_CHECKING:
    from tests.softroce.message_worker import Worker

_UNKNOWN_KIND = bytes([1, 99, 0, 0, 0, 0, 0, 0])
_UNKNOWN_FLAG = bytes([1, 0, 0x80, 0, 0, 0, 0, 0])
_UNKNOWN_VERSION = bytes([9, 0, 0, 0, 0, 0, 0, 0])


class Rogue:
    """`peer` is a worker id to which the node has an RDMA link."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def too_long(self, peer: int) -> None:
        """One byte more than the peer's receive takes."""
        wire = self._wire(peer)
        queue_pair, slabs = wire._queue_pair, wire._slabs
        address = slabs.addresses[min(wire._slots)]  # the next slab is registered as well
        wr_id = send_id(queue_pair.serial, queue_pair.posted)
        nbytes = wire.slab_bytes + 1
        queue_pair.post([pack_send(wr_id, address, slabs.lkey, nbytes, records.SIGNALED)])

    def unknown_kind(self, peer: int) -> None:
        self._send(peer, _UNKNOWN_KIND)

    def reserved_flag(self, peer: int) -> None:
        self._send(peer, _UNKNOWN_FLAG)

    def unknown_version(self, peer: int) -> None:
        self._send(peer, _UNKNOWN_VERSION)

    def runt(self, peer: int) -> None:
        """Shorter than a packet's fixed part."""
        self._send(peer, _UNKNOWN_KIND[:3])

    def poll_one_by_one(self, peer: int) -> None:
        """Completions are fetched in an array of one, so that every burst exceeds it."""
        for module in (completion_source, message_lane):
            assert "BATCH" in vars(module)
            vars(module)["BATCH"] = 1

    def die_with_an_event(self, peer: int) -> None:
        """The next event of the device is read, and what read it ends before it does more."""
        source = self._link_wire(peer)._queue_pair.lane.source
        look = source.look_for_event

        def interrupted() -> bool:
            source.look_for_event = look  # type: ignore[method-assign]
            look()
            raise asyncio.CancelledError

        source.look_for_event = interrupted  # type: ignore[method-assign]

    def _send(self, peer: int, packet: bytes) -> None:
        wire = self._wire(peer)
        wire.push(packet, memoryview(b""))
        wire.flush()

    def _wire(self, peer: int) -> RcWire:
        """From now on the link above hears of no send, since it knows nothing of the rogue's."""
        wire = self._link_wire(peer)
        wire.on_sent = lambda count: None  # type: ignore[method-assign]
        return wire

    def _link_wire(self, peer: int) -> RcWire:
        for route in self._worker.opened._messages().messenger.routes():
            if route.peer.worker_id == peer and route.transport is PathName.RDMA:
                return cast(RcWire, cast(PacketLink, route.link)._wire)
        raise AssertionError("no RDMA link")
