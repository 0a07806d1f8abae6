"""One received request: what the dispatcher works on, and the reply that settles it.

It knows how replies look and that each request gets at most one; which handler runs, and when, is
the dispatcher's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ...errors import OrbitError, PeerProtocolError, RequestFailed
from ...events import REJECTIONS_TOTAL, REPLIES_DROPPED_TOTAL, Counters
from ...model import PeerIdentity
from ...protocol.messaging.call_header import (
    BUDGET_KEY,
    NAME_BYTES_MAX,
    STAGED_KEY,
    CallHeader,
    Outcome,
    Wants,
    pack_call,
    pack_headers,
    parse_budget,
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
_SHUTTING_DOWN = int(PacketKind.SHUTTING_DOWN)
# Plain integers, since a header's code is one: comparing it with a member costs more.
_WANTS_RESPONSE = int(Wants.RESPONSE)
_WANTS_ACK = int(Wants.ACK)
_OK = int(Outcome.OK)
_WANTS = tuple(Wants)  # by code: calling the enum costs more than the rest of the property


class ReplyFrame(OutgoingFrame):
    """A reply on its way out. It holds the charge of its request until it has left: a peer that
    takes no replies gets no credit for further requests.
    """

    __slots__ = ("_charge",)

    def __init__(
        self, kind: int, header: bytes, payload: memoryview | bytes, charge: Charge
    ) -> None:
        self.kind = kind
        self.header = header
        self.payload = payload
        self._charge = charge

    def posted(self) -> None:
        self._charge.release()

    def failed(self, error: OrbitError) -> None:
        self._charge.release()


class ReceivedRequest:
    """Implements contract.Request. `header` is kept verbatim for a drain echo."""

    __slots__ = (
        "_counters",
        "_header",
        "_large",
        "_parsed",
        "_staged",
        "_until",
        "charge",
        "headers",
        "name",
        "payload",
        "route",
        "sender",
        "settled",
        "staged",
        "wants",
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
        self.sender: PeerIdentity = route.peer
        self.name = parsed.text
        self.payload = payload
        self.charge = charge
        self.settled = False
        self._header = header
        self._parsed = parsed
        self._large = large
        self._counters = counters
        self._staged: str | None = None
        self._until: float | None = None  # when its call's time is over, known of staged ones
        self.staged = False
        self.wants = _WANTS[parsed.code]
        self.headers: Mapping[str, str] = parsed.headers
        if parsed.headers:
            self._staged = parsed.headers.get(STAGED_KEY)
            self.staged = self._staged is not None
            self.headers = {k: v for k, v in parsed.headers.items() if not k.startswith("_")}
        route.serving += 1

    async def load(self) -> None:
        text, self._staged = self._staged, None
        self.staged = False
        if text is None:
            return
        budget = self._parsed.headers.get(BUDGET_KEY)
        if budget is not None:
            try:
                budget_s = parse_budget(budget)
            except PeerProtocolError as error:
                self._large.refuse(self.route, text)
                raise RequestFailed("decode", str(error)) from error
            self._until = asyncio.get_running_loop().time() + budget_s
        self.payload = await self._large.fetch(self.route, text, self._until)

    def answer(self, payload: Payload | None = None) -> None:
        if self.settled:
            return
        wants = self._parsed.code
        if wants == _WANTS_RESPONSE:
            self._respond(b"" if payload is None else payload)
        elif wants == _WANTS_ACK:
            self._reply(_ACK, pack_call(_OK, self._parsed.id))
        else:
            self.charge.release()
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
        self._reply(_SHUTTING_DOWN, self._header)
        self._staged = None  # the echo says it
        self._settle()

    def drop(self) -> None:
        if not self.settled:
            self.charge.release()
            self._settle()

    # --- within -----------------------------------------------------------------------------------

    def _respond(self, payload: Payload) -> None:
        route = self.route
        headers = b""
        if len(payload) > route.link.ceiling_bytes and not route.link.closed:
            ttl_s = None
            if self._until is not None:
                ttl_s = self._until - asyncio.get_running_loop().time()
                if ttl_s <= 0:
                    self._counters.add(REPLIES_DROPPED_TOTAL, reason="caller_gone")
                    self.charge.release()
                    return
            try:
                text = self._large.serve(route, payload, _nothing, ttl_s)
                headers = pack_headers({STAGED_KEY: text})
            except OrbitError as error:
                _log.warning("a response to %s cannot be staged: %s", route.peer, error)
                self._reply_error("too_large", str(error))
                return
            payload = b""
        call_id = self._parsed.id
        header = pack_call(_OK, call_id, b"", headers) if headers else pack_call(_OK, call_id)
        self._reply(_RESPONSE, header, payload)

    def _reply_error(self, reason: str, detail: str) -> None:
        wants = self._parsed.code
        if wants == Wants.NOTHING:
            self.charge.release()
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
            self.charge.release()
            return
        body = payload if type(payload) is bytes else memoryview(payload)
        charge = self.charge
        charge.renew()
        link.send(ReplyFrame(kind, header, body, charge))

    def _settle(self) -> None:
        self.settled = True
        self.route.serving -= 1
        if self._staged is not None:
            self._large.refuse(self.route, self._staged)
            self._staged = None


def _nothing(error: OrbitError | None) -> None:
    pass
