"""The shape that all workloads have, and what they stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import PeerProtocolError
from ...model import PeerIdentity
from ..endings import Mismatch, Moved
from ..ends import End
from ..usage import Usage


class Asking(Protocol):
    """How a client reaches its server, beside what is measured."""

    async def __call__(self, kind: str, request: Mapping[str, Any], /) -> Mapping[str, Any]:
        """Raises PeerError, UsageError (the server refuses)."""


@dataclass(frozen=True, slots=True)
class Bench:
    """`offer`: what the server has prepared for this size."""

    end: End
    server: PeerIdentity
    ask: Asking
    size: int
    offer: Mapping[str, Any]

    def offered(self, name: str, kind: type) -> Any:
        """Raises PeerProtocolError."""
        value = self.offer.get(name)
        if not isinstance(value, kind):
            raise PeerProtocolError(f"the server offers no {name}")
        return value

    async def checked_there(self, worker: int, turn: int) -> Mismatch | None:
        """What the server finds of that operation in its memory."""
        answer = await self.ask("check", {"worker": worker, "turn": turn})
        differs = answer.get("differs")
        return None if differs is None else Mismatch(*map(int, differs))


class Workload(Protocol):
    """Operations are named by their worker and its turn. One worker runs one at a time."""

    checks_here: bool  # the bytes arrive at this end; else the server compares them

    async def open(self) -> None:
        """Take the memory of all workers, and register it where there is RDMA."""

    def ready(self, worker: int, turn: int) -> None:
        """Before the clock: payloads that this end sends are those of this turn."""

    async def operate(self, worker: int, turn: int) -> Sequence[Moved]:
        """On the clock: move every item of the operation, and give back what that took."""

    def differs(self, worker: int, turn: int) -> Mismatch | None:
        """After the clock, where `checks_here`: a byte that is not what it must be."""

    def went_by(self, here: Usage, there: Usage) -> str | None:
        """By which path the payloads went, where operations cannot say it; else None. What both
        ends spent on all of them tells it.
        """

    async def close(self) -> None:
        """Give all of it back."""
