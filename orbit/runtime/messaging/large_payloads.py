"""Payloads above a link's ceiling: the sender serves them by rendezvous and sends the handle, the
receiver fetches them before the handler runs.

The sender's memory is its own again when the receiver says that it needs the payload no more, or
when the route ends. What a handle is and how its bytes travel is the rendezvous' business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from ...errors import ClosedError, NotAdmitted, OrbitError, RequestFailed, UnknownHandle, UsageError
from ...events import STAGED_TOTAL, Counters
from ...model import Handle, Lease, SlotId, Transport, WorkerId
from ...protocol.messaging.call_header import (
    STAGED_KEY,
    EventCode,
    Wants,
    pack_call,
    pack_headers,
    parse_request,
)
from ...protocol.messaging.packets import PacketKind
from ...transport.messages import OutgoingFrame
from .results import Sending
from .routes import Route

_log = logging.getLogger("orbit")

OnDone = Callable[[OrbitError | None], None]


class PayloadStore(Protocol):
    """The rendezvous of this node, as far as large payloads need it."""

    def register_held(self, buffer: object) -> Handle:
        """Serve the caller's memory as it is. Raises UsageError, ClosedError."""

    async def withdraw(self, handle: Handle) -> None:
        """Take it back, whoever still reads it."""

    async def get(
        self, handle: Handle, *, transport: Transport | str | None, timeout: float | None
    ) -> tuple[memoryview, Lease]:
        """The payload in fresh memory."""

    async def detach(self, handle: Handle, lease: Lease) -> None:
        """Give the lease back."""


class LargePayloads:
    """Both roles of one node."""

    def __init__(
        self,
        own: WorkerId,
        store: PayloadStore,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        counters: Counters,
    ) -> None:
        self._own = own
        self._store = store
        self._spawn = spawn
        self._counters = counters
        # Route None: its frame was given back, and the next route has not taken it yet.
        self._served: dict[SlotId, tuple[Route | None, Handle, OnDone]] = {}

    def __len__(self) -> int:
        return len(self._served)

    # --- the sender's side ------------------------------------------------------------------------

    def serve(self, route: Route, payload: object, on_done: OnDone) -> dict[str, str]:
        """Serve `payload` to the other end of `route`, and give the headers that say so. `on_done`
        runs once: with None when the receiver needs it no more, else with what ended it. Raises
        UsageError, ClosedError.
        """
        handle = self._store.register_held(payload)
        self._served[handle.slot_id] = (route, handle, on_done)
        route.staged += 1
        self._counters.add(STAGED_TOTAL)
        return {STAGED_KEY: str(handle)}

    def stage(self, route: Route, sending: Sending) -> None:
        """Take the payload out of a frame that is too long for `route`; its header names the handle
        instead. Raises UsageError, ClosedError: the frame is as it was. One that another route gave
        back stays staged, and belongs to this one.
        """
        if sending.staged:
            self._lead(sending, route)
            return
        parsed = parse_request(sending.header)
        headers = self.serve(route, sending.payload, partial(_over, sending))
        try:
            packed = pack_headers({**parsed.headers, **headers})
        except UsageError as error:
            self.take_back(headers[STAGED_KEY], error)
            raise
        sending.header = pack_call(parsed.code, parsed.id, parsed.text.encode(), packed)
        sending.payload = b""
        sending.staged = True

    def keep(self, sending: Sending) -> None:
        """A staged frame was given back: its payload must outlive the route."""
        self._lead(sending, None)

    def unstage(self, sending: Sending) -> None:
        """A staged frame was given up before it left."""
        text = parse_request(sending.header).headers.get(STAGED_KEY, "")
        self.take_back(text, NotAdmitted("the peer", "the message was given up"))

    def on_done(self, route: Route, slot_id: int) -> None:
        """The receiver needs it no more. A peer speaks for what it was given, and nothing else."""
        entry = self._served.get(SlotId(slot_id))
        if entry is not None and entry[0] is route:
            self._finish(SlotId(slot_id), None)

    def take_back(self, text: str, error: OrbitError) -> None:
        """Nobody heard of it, or it was turned away. `text` is what the header says."""
        handle = _parse(text)
        if handle is not None and handle.slot_id in self._served:
            self._finish(handle.slot_id, error)

    def route_lost(self, route: Route, error: OrbitError) -> None:
        """Nobody at its other end can say anything any more."""
        if route.staged:
            for slot_id in [n for n, entry in self._served.items() if entry[0] is route]:
                self._finish(slot_id, error)

    # --- the receiver's side ----------------------------------------------------------------------

    async def fetch(self, route: Route, text: str) -> memoryview:
        """The payload that a header names. Raises RequestFailed."""
        handle = _parse(text)
        if handle is None or handle.worker_id != route.peer.worker_id:
            raise RequestFailed("decode", "the payload's handle is not the sender's")
        try:
            payload, lease = await self._store.get(handle, transport=None, timeout=None)
        except OrbitError as error:
            self.refuse(route, text)
            raise RequestFailed("failed", f"the payload cannot be fetched: {error}") from error
        self._spawn(self._give_back(route, handle, lease), f"give back {handle}")
        return payload

    def refuse(self, route: Route, text: str) -> None:
        """The payload that a header names is not wanted."""
        handle = _parse(text)
        if handle is not None and handle.worker_id == route.peer.worker_id:
            _tell_done(route, handle)

    # --- within -----------------------------------------------------------------------------------

    def _lead(self, sending: Sending, route: Route | None) -> None:
        text = parse_request(sending.header).headers[STAGED_KEY]
        slot_id = Handle.parse(text).slot_id
        before, handle, on_done = self._served[slot_id]
        self._served[slot_id] = (route, handle, on_done)
        if before is not None:
            before.staged -= 1
        if route is not None:
            route.staged += 1

    def _finish(self, slot_id: SlotId, error: OrbitError | None) -> None:
        route, handle, on_done = self._served.pop(slot_id)
        if route is not None:
            route.staged -= 1
        self._spawn(self._withdraw(handle), f"withdraw {handle}")
        on_done(error)

    async def _withdraw(self, handle: Handle) -> None:
        try:
            await self._store.withdraw(handle)
        except (UnknownHandle, ClosedError):
            pass  # gone already, or the node closes, which takes back whatever it serves
        except OrbitError as error:
            _log.warning("a staged payload: %s", error)

    async def _give_back(self, route: Route, handle: Handle, lease: Lease) -> None:
        try:
            await self._store.detach(handle, lease)
        except OrbitError as error:
            _log.debug("the lease of a staged payload: %s", error)
        _tell_done(route, handle)


def _tell_done(route: Route, handle: Handle) -> None:
    if not route.link.closed:
        header = pack_call(EventCode.STAGED_DONE, handle.slot_id)
        route.link.send(OutgoingFrame(PacketKind.EVENT, header))


def _parse(text: str) -> Handle | None:
    try:
        return Handle.parse(text)
    except OrbitError:
        return None


def _over(sending: Sending, error: OrbitError | None) -> None:
    """A plain send's outcome: the peer has its payload, or refused it. A call has its answer."""
    if sending.wants is not Wants.NOTHING or not sending.staged:
        return
    if error is None:
        sending.succeed(None)
    else:
        sending.fail(error)
