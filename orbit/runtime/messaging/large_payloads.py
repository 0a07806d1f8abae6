"""Payloads above a link's ceiling: the sender serves them by rendezvous and sends the handle, the
receiver fetches them before the handler runs.

The payload is for that receiver alone and goes with its release. The sender's memory is its own
again when the receiver says that it needs the payload no more, when the time of its call is up, or
when the route ends. What a handle is and how its bytes travel is the rendezvous' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...config import RendezvousConfig
from ...errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    NotAdmitted,
    OrbitError,
    RequestFailed,
    UnknownHandle,
    UsageError,
)
from ...events import STAGED_REFUSALS_TOTAL, STAGED_TIMEOUTS_TOTAL, STAGED_TOTAL, Counters
from ...model import Handle, Lease, SlotId
from ...protocol.messaging.call_header import (
    BUDGET_KEY,
    STAGED_KEY,
    EventCode,
    Wants,
    pack_budget,
    pack_call,
    pack_headers,
    parse_request,
)
from ...protocol.messaging.packets import PacketKind
from ...transport.messages import OutgoingFrame
from .contract import CallerGone
from .results import Sending
from .routes import Route

_log = logging.getLogger("orbit")

OnDone = Callable[[OrbitError | None], None]


class PayloadStore(Protocol):
    """The rendezvous of this node, as far as large payloads need it."""

    def stage(self, buffer: object, ttl_s: float | None = None) -> Handle:
        """Serve a payload, at once; the memory stays in use. It goes after `ttl_s`, whoever still
        reads it. Raises UsageError, ClosedError.
        """

    async def withdraw(self, handle: Handle) -> None:
        """Take it back, whoever still reads it."""

    async def fetch(self, handle: Handle, timeout_s: float | None) -> tuple[memoryview, Lease]:
        """The payload in fresh memory. BudgetExceeded: it is larger than this node takes, and the
        refusal has released it.
        """

    async def release(self, handle: Handle, lease: Lease) -> None:
        """Give the lease back, and the payload with it."""


@dataclass(slots=True, eq=False)
class _Served:
    """`route` None: its frame was given back, and the next route has not taken it yet."""

    handle: Handle
    route: Route | None
    on_done: OnDone
    expiry: asyncio.TimerHandle | None = None


class LargePayloads:
    """Both roles of one node."""

    def __init__(
        self,
        store: PayloadStore,
        config: RendezvousConfig,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        counters: Counters,
    ) -> None:
        self._store = store
        self._config = config
        self._spawn = spawn
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._served: dict[SlotId, _Served] = {}

    def __len__(self) -> int:
        return len(self._served)

    # --- the sender's side ------------------------------------------------------------------------

    def serve(
        self, route: Route, payload: object, on_done: OnDone, ttl_s: float | None = None
    ) -> str:
        """Serve `payload` to the other end of `route`, and give the header's value that says so.
        `on_done` runs once: with None when the receiver needs it no more, else with what ended it.
        After `ttl_s` nobody waits for it any more. Raises UsageError, ClosedError.
        """
        handle = self._store.stage(payload, ttl_s)
        served = self._served[handle.slot_id] = _Served(handle, route, on_done)
        if ttl_s is not None:
            error = DeadlineExceeded("the fetch of a staged payload", ttl_s)
            served.expiry = self._loop.call_later(ttl_s, self._finish, handle.slot_id, error)
        route.staged += 1
        self._counters.add(STAGED_TOTAL)
        return str(handle)

    def stage(self, route: Route, sending: Sending) -> None:
        """Take the payload out of a frame that is too long for `route`; its header names the handle
        instead, and of a call for how long it still waits. Raises UsageError, ClosedError: the
        frame is as it was. One that another route gave back stays staged, and belongs to this one:
        NotAdmitted when it is served no more. DeadlineExceeded: the call's time is up.
        """
        remaining_s = None
        if sending.wants is not Wants.NOTHING and sending.deadline is not None:
            remaining_s = sending.deadline - self._loop.time()
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlineExceeded(f"a message to {route.peer}", sending.timeout_s)
        if sending.staged:
            text = self._lead(sending, route)
            if text is None:
                raise NotAdmitted(str(route.peer), "its payload is served no more")
        else:
            text = self.serve(route, sending.payload, partial(_over, sending), remaining_s)
        parsed = parse_request(sending.header)
        headers = {**parsed.headers, STAGED_KEY: text}
        if remaining_s is not None:
            headers[BUDGET_KEY] = pack_budget(remaining_s)
        try:
            packed = pack_headers(headers)
        except UsageError as error:
            self.take_back(text, error)
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
        served = self._served.get(SlotId(slot_id))
        if served is not None and served.route is route:
            self._finish(SlotId(slot_id), None)

    def take_back(self, text: str, error: OrbitError) -> None:
        """Nobody heard of it, or it was turned away. `text` is what the header says."""
        handle = _parse(text)
        if handle is not None and handle.slot_id in self._served:
            self._finish(handle.slot_id, error)

    def route_lost(self, route: Route, error: OrbitError) -> None:
        """Nobody at its other end can say anything any more."""
        if route.staged:
            for slot_id in [n for n, served in self._served.items() if served.route is route]:
                self._finish(slot_id, error)

    # --- the receiver's side ----------------------------------------------------------------------

    async def fetch(self, route: Route, text: str, until: float | None) -> memoryview:
        """The payload that a header names. `until`: the loop time at which the call's own budget is
        over; `rendezvous.staged_fetch_timeout` from now bounds it as well. Raises RequestFailed;
        CallerGone when the budget was the shorter one, and was not enough.
        """
        handle = _parse(text)
        if handle is None or handle.worker_id != route.peer.worker_id:
            raise RequestFailed("decode", "the payload's handle is not the sender's")
        now, own_s = self._loop.time(), self._config.staged_fetch_timeout
        own = None if own_s is None else now + own_s
        deadline = min((bound for bound in (until, own) if bound is not None), default=None)
        try:
            if deadline is not None and deadline <= now:
                raise DeadlineExceeded("the fetch of a payload", 0.0)
            timeout_s = None if deadline is None else deadline - now
            payload, lease = await self._store.fetch(handle, timeout_s)
        except OrbitError as error:
            self.refuse(route, text)
            # The rendezvous has bounds of its own, which may end it sooner.
            ran_out = deadline is not None and self._loop.time() >= deadline
            if ran_out and isinstance(error, DeadlineExceeded):
                raise self._timed_out(callers=deadline == until) from error
            raise self._failure(error) from error
        self._spawn(self._give_back(route, handle, lease), f"give back {handle}")
        return payload

    def refuse(self, route: Route, text: str) -> None:
        """The payload that a header names is not wanted."""
        handle = _parse(text)
        if handle is not None and handle.worker_id == route.peer.worker_id:
            _tell_done(route, handle)

    # --- within -----------------------------------------------------------------------------------

    def _failure(self, error: OrbitError) -> RequestFailed:
        if isinstance(error, BudgetExceeded):
            self._counters.add(STAGED_REFUSALS_TOTAL, what="message")
            return RequestFailed("too_large", str(error))
        return RequestFailed("failed", f"the payload cannot be fetched: {error}")

    def _timed_out(self, *, callers: bool) -> RequestFailed | CallerGone:
        self._counters.add(STAGED_TIMEOUTS_TOTAL, bound="caller" if callers else "receiver")
        if callers:
            return CallerGone("the time of the call is up")
        limit = f"{self._config.staged_fetch_timeout:g} s"
        return RequestFailed("fetch_timeout", f"the payload was not fetched within {limit}")

    def _lead(self, sending: Sending, route: Route | None) -> str | None:
        """The route that the payload belongs to from now on. None: it is served no more."""
        text = parse_request(sending.header).headers[STAGED_KEY]
        served = self._served.get(Handle.parse(text).slot_id)
        if served is None:
            return None
        if served.route is not None:
            served.route.staged -= 1
        served.route = route
        if route is not None:
            route.staged += 1
        return text

    def _finish(self, slot_id: SlotId, error: OrbitError | None) -> None:
        served = self._served.pop(slot_id)
        if served.expiry is not None:
            served.expiry.cancel()
        if served.route is not None:
            served.route.staged -= 1
        self._spawn(self._withdraw(served.handle), f"withdraw {served.handle}")
        served.on_done(error)

    async def _withdraw(self, handle: Handle) -> None:
        try:
            await self._store.withdraw(handle)
        except (UnknownHandle, ClosedError):
            pass  # released or expired, or the node closes, which takes back whatever it serves
        except OrbitError as error:
            _log.warning("a staged payload: %s", error)

    async def _give_back(self, route: Route, handle: Handle, lease: Lease) -> None:
        try:
            await self._store.release(handle, lease)
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
