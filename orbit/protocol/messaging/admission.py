"""How much of one peer's traffic may wait to leave: frames and bytes, and a FIFO beyond.

A plain send at the bound is refused; one that may wait takes a ticket, and nothing that comes later
passes it, so the order of issue is the order of leaving. It knows no frame, link or clock: tickets
are whatever the caller passes, and deadlines are the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from ...errors import BudgetExceeded, InternalError

TicketT = TypeVar("TicketT", bound=Hashable)

# Waiters hold their senders' memory, not the queue's; but a sender that never awaits would pile
# them up without an end.
WAITERS_MAX: Final = 65_536
_LOOK: Final = -1


class Admission(Generic[TicketT]):
    """One peer's bound. A frame that is longer than the whole byte bound passes when nothing else
    is there: the link limits it.
    """

    __slots__ = ("_waiting", "bytes_max", "frames", "frames_max", "nbytes")

    def __init__(self, frames_max: int, bytes_max: int) -> None:
        self.frames_max = frames_max
        self.bytes_max = bytes_max
        self.frames = 0
        self.nbytes = 0
        self._waiting: OrderedDict[TicketT, int] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Tickets that stand in line."""
        return len(self._waiting)

    def admit(self, nbytes: int) -> bool:
        """Charge one frame; False, and nothing is charged, at the bound or when others wait."""
        frames, total = self.frames, self.nbytes + nbytes
        if self._waiting or (frames and (frames >= self.frames_max or total > self.bytes_max)):
            return False
        self.frames = frames + 1
        self.nbytes = total
        return True

    def refusal(self, peer: str, nbytes: int) -> BudgetExceeded:
        """The error for a frame that was not admitted: which of the two bounds is in the way."""
        budget = f"admission of {peer}"
        if self.frames < self.frames_max and self.nbytes + nbytes > self.bytes_max:
            return BudgetExceeded(
                budget, nbytes, self.bytes_max, self.nbytes, "messaging.queue_bytes"
            )
        charged = self.frames + len(self._waiting)
        return BudgetExceeded(budget, 1, self.frames_max, charged, "messaging.queue_frames")

    def wait(self, ticket: TicketT, nbytes: int) -> None:
        """Stand in line. Raises BudgetExceeded when even the line is full."""
        self._join(ticket, nbytes)

    def look(self, ticket: TicketT) -> None:
        """Stand in line for the room of one frame, without taking it."""
        self._join(ticket, _LOOK)

    def withdraw(self, ticket: TicketT) -> bool:
        """Leave the line. False when the ticket is not in it (any more)."""
        return self._waiting.pop(ticket, None) is not None

    def release(self, nbytes: int) -> bool:
        """A charged frame has left, or was given up. Whether somebody waits: ask `next_ready`."""
        self.frames -= 1
        self.nbytes -= nbytes
        if self.frames < 0 or self.nbytes < 0:
            raise InternalError(f"admission released twice: {self.frames} frames")
        return bool(self._waiting)

    def next_ready(self) -> TicketT | None:
        """The first ticket in line when there is room for it: charged now (unless it only looks),
        and out of the line.
        """
        if not self._waiting:
            return None
        ticket, nbytes = next(iter(self._waiting.items()))
        if not self._fits(max(nbytes, 0)):
            return None
        self._waiting.popitem(last=False)
        if nbytes != _LOOK:
            self.frames += 1
            self.nbytes += nbytes
        return ticket

    def tickets(self) -> list[TicketT]:
        """Everybody in line, oldest first."""
        return list(self._waiting)

    def fail_all(self) -> list[TicketT]:
        """Everybody in line, oldest first; the line is empty then. What is charged stays so."""
        tickets = self.tickets()
        self._waiting.clear()
        return tickets

    def _fits(self, nbytes: int) -> bool:
        return self.frames == 0 or (
            self.frames < self.frames_max and self.nbytes + nbytes <= self.bytes_max
        )

    def _join(self, ticket: TicketT, nbytes: int) -> None:
        if len(self._waiting) >= WAITERS_MAX:
            raise BudgetExceeded(
                "senders in line", 1, WAITERS_MAX, len(self._waiting), "messaging.queue_frames"
            )
        self._waiting[ticket] = nbytes
