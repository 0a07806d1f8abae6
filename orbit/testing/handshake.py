"""A simulated handshake: the real machines, their frames handed over at once, up to the listener's
decision; the welcome or the refusal comes a delay later.

It implements `runtime.peer.IncomingLink` over one end of a simulated connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import ClosedError, OrbitError
from ..model import PeerIdentity
from ..protocol.bootstrap import (
    Admit,
    Dialer,
    Effect,
    Epoch,
    Established,
    Listener,
    Opened,
    Proven,
    Refuse,
    Refused,
)
from ..protocol.framing import SendFrame
from ..protocol.messages import Hello
from .network import SimLink

HANDSHAKE_S = 3.0


class SimHandshake:
    """Both ends of one. `far` is the link that the listener gets; `secrets` the dialer's and the
    listener's.
    """

    def __init__(
        self,
        dialer: Hello,
        listener: Hello,
        secrets: tuple[bytes | None, bytes | None],
        expected: PeerIdentity,
        far: SimLink,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        name = far.endpoint
        self.near = Dialer(
            dialer, secrets[0], expected=expected, endpoint=name, now=now, timeout_s=HANDSHAKE_S
        )
        self.far = Listener(listener, secrets[1], endpoint=name, now=now, timeout_s=HANDSHAKE_S)
        self._link = far
        self.on_gone: Callable[[], None] = lambda: None  # set by who lets the dialer wait
        self._decided: asyncio.Future[list[Effect]] = self._loop.create_future()
        self._epochs: dict[Dialer | Listener, Epoch] = {}
        self._errors: dict[Dialer | Listener, OrbitError] = {}

    def prove(self) -> SimIncoming:
        """Everything before the decision. Raises what the dialer raises."""
        now = self._loop.time()
        self._exchange(self.near, self.near.step(Opened(), now))
        if (error := self._errors.get(self.near)) is not None:
            self._link.abort()
            raise error
        return SimIncoming(self._epochs[self.far], self)

    async def wait_welcome(self, delay_s: float) -> Epoch:
        """The dialer's wait. Raises what it raises."""
        try:
            async with asyncio.timeout_at(self.near.deadline):
                effects = await asyncio.shield(self._decided)
                await asyncio.sleep(delay_s)
        except TimeoutError:
            effects = []
            self._exchange(self.near, self.near.on_deadline(self._loop.time()))
        except asyncio.CancelledError:
            self._leave()
            raise
        self._exchange(self.far, effects)
        if (error := self._errors.get(self.near)) is not None:
            self._leave()
            raise error
        return self._epochs[self.near]

    def decide(self, effects: list[Effect]) -> SimLink:
        """The listener's word is on its way."""
        self._decided.set_result(effects)
        return self._link

    @property
    def decided(self) -> bool:
        return self._decided.done()

    def _leave(self) -> None:
        if not self._decided.done():
            self._decided.set_result([])
            self.on_gone()
        self._link.lose("the dialer gave up")

    def _exchange(self, machine: Dialer | Listener, effects: list[Effect]) -> None:
        now = self._loop.time()
        for effect in effects:
            match effect:
                case SendFrame(frame):
                    other = self.far if machine is self.near else self.near
                    if not other.finished:
                        self._exchange(other, other.on_frame(frame, now))
                case Proven(epoch) | Established(epoch):
                    self._epochs[machine] = epoch
                case Refused(error):
                    self._errors[machine] = error


class SimIncoming:
    """The listener's side of it, between proof and decision."""

    def __init__(self, epoch: Epoch, handshake: SimHandshake) -> None:
        self.epoch = epoch
        self._handshake = handshake

    def admit(self) -> SimLink:
        """Say welcome."""
        if self._handshake.decided:
            raise ClosedError("the simulated connection")
        return self._handshake.decide(self._handshake.far.step(Admit(), self._now()))

    def refuse(self, reason: str, detail: str = "") -> None:
        """Say no."""
        if not self._handshake.decided:
            effects = self._handshake.far.step(Refuse(reason, detail), self._now())
            self._handshake.decide(effects).abort()

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Tell when the dialer leaves."""
        self._handshake.on_gone = on_gone

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
