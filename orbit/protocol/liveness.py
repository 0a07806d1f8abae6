"""Whether the other end of a connection is still there, asked only while something is owed by it.

After a silence a ping, after a second one the verdict. Nothing outstanding costs nothing. It knows
no frames and no clock.
"""

from __future__ import annotations

from enum import Enum


class Suspicion(Enum):
    """What a passed deadline calls for."""

    NONE = "none"
    PING = "ping"  # ask
    LOST = "lost"  # it was asked and did not answer


class Liveness:
    """`silence_s`: how long a peer that owes something may say nothing before it is asked;
    `answer_s`: how long it has to answer. Any frame is an answer.
    """

    __slots__ = ("_answer_s", "_asked", "_heard", "_silence_s", "deadline")

    def __init__(self, silence_s: float, answer_s: float) -> None:
        self._silence_s = silence_s
        self._answer_s = answer_s
        self._heard = 0.0
        self._asked = False
        self.deadline: float | None = None

    def on_frame(self, now: float) -> None:
        """The peer said something. Leaves the deadline, which looks at it when it comes."""
        self._heard = now
        self._asked = False

    def watch(self, owed: bool, now: float) -> None:
        """Whether the peer owes an answer, after each change."""
        if not owed:
            self.deadline = None
            self._asked = False
        elif self.deadline is None:
            self._heard = now
            self.deadline = now + self._silence_s

    def on_deadline(self, now: float) -> Suspicion:
        """Call it when `deadline` has come. Earlier it does nothing."""
        if self.deadline is None or now < self.deadline:
            return Suspicion.NONE
        if self._asked:
            self.deadline = None
            return Suspicion.LOST
        if now < self._heard + self._silence_s:
            self.deadline = self._heard + self._silence_s
            return Suspicion.NONE
        self._asked = True
        self.deadline = now + self._answer_s
        return Suspicion.PING
