"""Received answers: each finds its call, or is late, counted and forgotten.

A response whose payload travels by rendezvous is fetched first, within what is left of its call's
time. One that is larger than this node takes fails the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ...errors import OrbitError, PeerDraining, PeerProtocolError, RequestFailed
from ...events import LATE_REPLIES_TOTAL, REJECTIONS_TOTAL, Counters
from ...protocol.messaging.call_header import (
    STAGED_KEY,
    Outcome,
    Wants,
    parse_outcome,
    parse_request,
)
from ...protocol.messaging.packets import PacketKind
from .contract import CallerGone
from .large_payloads import LargePayloads
from .pending import PendingCalls
from .results import Sending
from .routes import Route

_RESPONSE = int(PacketKind.RESPONSE)
_DETAIL_CHARACTERS_MAX = 4096


class Replies:
    """Of one node."""

    def __init__(
        self,
        pending: PendingCalls,
        large: LargePayloads,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        counters: Counters,
    ) -> None:
        self._pending = pending
        self._large = large
        self._spawn = spawn
        self._counters = counters

    def on_outcome(self, route: Route, kind: int, header: bytes, payload: memoryview) -> None:
        """A response or an ack. Raises PeerProtocolError."""
        parsed = parse_outcome(header)
        staged = parsed.headers.get(STAGED_KEY) if parsed.headers else None
        sending = self._pending.answered(parsed.id, route)
        if sending is None:
            self._late(route, staged)
        elif (kind == _RESPONSE) != (sending.wants is Wants.RESPONSE):
            error = PeerProtocolError(f"an answer of kind {kind} to a call that wants another")
            sending.fail(error)
            raise error
        elif parsed.code == Outcome.FAILED:
            detail = bytes(payload[: 4 * _DETAIL_CHARACTERS_MAX]).decode(errors="replace")
            sending.fail(RequestFailed(parsed.text or "failed", detail[:_DETAIL_CHARACTERS_MAX]))
        elif staged is not None:
            self._spawn(self._fetch(route, sending, staged), "fetch a response")
        else:
            sending.succeed(None if sending.wants is Wants.ACK else payload)

    def on_draining(self, route: Route, header: bytes) -> None:
        """The peer shuts down and gave a request back. Raises PeerProtocolError."""
        parsed = parse_request(header)
        error = PeerDraining(str(route.peer))
        self._counters.add(REJECTIONS_TOTAL, reason="peer_draining")
        staged = parsed.headers.get(STAGED_KEY) if parsed.headers else None
        if parsed.id:
            sending = self._pending.answered(parsed.id, route)
            if sending is None:
                self._late(route, None)
            else:
                sending.fail(error)
        if staged is not None:
            self._large.take_back(staged, error)

    def _late(self, route: Route, staged: str | None) -> None:
        self._counters.add(LATE_REPLIES_TOTAL)
        if staged is not None:
            self._large.refuse(route, staged)

    async def _fetch(self, route: Route, sending: Sending, text: str) -> None:
        try:
            payload = await self._large.fetch(route, text, sending.deadline)
        except CallerGone:
            sending.owner.expire(sending)
        except OrbitError as error:
            sending.fail(error)
        else:
            sending.succeed(payload)
