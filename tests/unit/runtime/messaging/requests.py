"""A request without a messenger: it writes down how it was settled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from orbit.errors import RequestFailed
from orbit.model import Incarnation, PeerIdentity, WorkerId
from orbit.protocol.messaging.call_header import Wants
from orbit.runtime.messaging.contract import CallerGone, Charge, Payload
from orbit.runtime.messaging.routes import Route
from orbit.transport.messages import MessageLink


class ChargedLink:
    """As much of a link as a charge needs."""

    closed = False

    def __init__(self) -> None:
        self.returned = 0

    def consumed(self, charge: int) -> None:
        self.returned += charge


class FakeRequest:
    """Implements contract.Request."""

    route = cast(Route, None)

    def __init__(
        self,
        name: str,
        payload: bytes = b"",
        *,
        sender: int = 1,
        wants: Wants = Wants.RESPONSE,
        headers: Mapping[str, str] | None = None,
        staged: bytes | RequestFailed | CallerGone | None = None,
    ) -> None:
        self.name = name
        self.sender = PeerIdentity(WorkerId(sender), Incarnation(7))
        self.wants = wants
        self.headers = headers or {}
        self.payload = memoryview(payload)
        self.link = ChargedLink()
        self.charge = Charge(cast(MessageLink, self.link), len(payload) + 512)
        self.outcomes: list[tuple[str, object]] = []
        self._staged = staged

    @property
    def staged(self) -> bool:
        return self._staged is not None

    @property
    def settled(self) -> bool:
        return bool(self.outcomes)

    @property
    def outcome(self) -> tuple[str, object]:
        """The one that there must be."""
        (only,) = self.outcomes
        return only

    async def load(self) -> None:
        staged, self._staged = self._staged, None
        if isinstance(staged, RequestFailed | CallerGone):
            raise staged
        if staged is not None:
            self.payload = memoryview(staged)

    def answer(self, payload: Payload | None = None) -> None:
        self._settle("answer", None if payload is None else bytes(payload))

    def fail(self, reason: str, detail: str = "") -> None:
        self._settle("fail", f"{reason}: {detail}")

    def reject_draining(self) -> None:
        self._settle("draining", None)

    def drop(self) -> None:
        self._settle("drop", None)

    def _settle(self, how: str, what: object) -> None:
        self.outcomes.append((how, what))
        self.charge.release()
