"""One received request: what the dispatcher works on, and the reply that settles it.

It knows how replies look and that each request gets at most one; which handler runs, and when, is
the dispatcher's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...errors import OrbitError
from ...events import REJECTIONS_TOTAL, REPLIES_DROPPED_TOTAL, Counters
from ...model import PeerIdentity
from ...protocol.messaging.call_header import (
    NAME_BYTES_MAX,
    STAGED_KEY,
    CallHeader,
    Outcome,
    Wants,
    pack_call,
    pack_headers,
)
from ...protocol.messaging.packets import PacketKind
from ...transport.messages import OutgoingFrame
from .contract import Charge, Payload
from .large_payloads import LargePayloads
from .routes import Route

_log = logging.getLogger("orbit")
_DETAIL_CHARACTERS_MAX = 4096  # of an error's text; a person reads it
_RESPONSE = int(PacketKind.RESPONSE)
_ACK = int(PacketKind.ACK)
_WANTS = tuple(Wants)  # by code: calling the enum costs more than the rest of the property


class ReceivedRequest:
    """Implements contract.Request. `header` is kept verbatim for a drain echo."""

    __slots__ = (
        "_counters",
        "_header",
        "_large",
        "_parsed",
        "_staged",
        "charge",
        "headers",
        "payload",
        "route",
        "settled",
    )

    def __init__(
        self,
        route: Route,
        header: bytes,
        parsed: CallHeader,
        payload: memoryview,
        charge: Charge,
        large: LargePayloads,
        counters: Counters,
    ) -> None:
        self.route = route
        self.payload = payload
        self.charge = charge
        self.settled = False
        self._header = header
        self._parsed = parsed
        self._large = large
        self._counters = counters
        self._staged: str | None = None
        self.headers: Mapping[str, str] = parsed.headers
        if parsed.headers:
            self._staged = parsed.headers.get(STAGED_KEY)
            self.headers = {k: v for k, v in parsed.headers.items() if not k.startswith("_")}
        route.serving += 1

    @property
    def sender(self) -> PeerIdentity:
        return self.route.peer

    @property
    def name(self) -> str:
        return self._parsed.text

    @property
    def wants(self) -> Wants:
        return _WANTS[self._parsed.code]

    @property
    def staged(self) -> bool:
        return self._staged is not None

    async def load(self) -> None:
        text, self._staged = self._staged, None
        if text is not None:
            self.payload = await self._large.fetch(self.route, text)

    def answer(self, payload: Payload | None = None) -> None:
        if self.settled:
            return
        wants = self._parsed.code
        if wants == Wants.RESPONSE:
            self._respond(b"" if payload is None else payload)
        elif wants == Wants.ACK:
            self._reply(_ACK, pack_call(Outcome.OK, self._parsed.id))
        self._settle()

    def fail(self, reason: str, detail: str = "") -> None:
        if self.settled:
            return
        self._reply_error(reason, detail)
        self._settle()

    def reject_draining(self) -> None:
        if self.settled:
            return
        self._counters.add(REJECTIONS_TOTAL, reason="drain_rejected")
        self._reply(PacketKind.SHUTTING_DOWN, self._header)
        self._staged = None  # the echo says it
        self._settle()

    def drop(self) -> None:
        if not self.settled:
            self._settle()

    # --- within -----------------------------------------------------------------------------------

    def _respond(self, payload: Payload) -> None:
        route = self.route
        headers = b""
        if len(payload) > route.link.ceiling_bytes and not route.link.closed:
            try:
                headers = pack_headers(self._large.serve(route, payload, _nothing))
            except OrbitError as error:
                _log.warning("a response to %s cannot be staged: %s", route.peer, error)
                self._reply_error("too_large", str(error))
                return
            payload = b""
        call_id = self._parsed.id
        header = pack_call(Outcome.OK, call_id, b"", headers) if headers else pack_call(0, call_id)
        self._reply(_RESPONSE, header, payload)

    def _reply_error(self, reason: str, detail: str) -> None:
        wants = self._parsed.code
        if wants == Wants.NOTHING:
            return
        kind = _RESPONSE if wants == Wants.RESPONSE else _ACK
        text = reason.encode()[:NAME_BYTES_MAX]
        # Cut by characters: a link's slab takes any length, a person does not.
        body = detail[:_DETAIL_CHARACTERS_MAX].encode(errors="replace")
        self._reply(kind, pack_call(Outcome.FAILED, self._parsed.id, text), body)

    def _reply(self, kind: int, header: bytes, payload: Payload = b"") -> None:
        link = self.route.link
        if link.closed:
            self._counters.add(REPLIES_DROPPED_TOTAL, reason="link_closed")
            return
        body = payload if isinstance(payload, bytes) else memoryview(payload)
        link.send(OutgoingFrame(kind, header, body))

    def _settle(self) -> None:
        self.settled = True
        self.route.serving -= 1
        if self._staged is not None:
            self._large.refuse(self.route, self._staged)
            self._staged = None
        self.charge.release()


def _nothing(error: OrbitError | None) -> None:
    pass
