"""What becomes of one send: the frame that travels, and the face of it that the caller holds.

A send is issued before its result exists; the result only looks. Cancelling whoever awaits it
changes nothing, and everybody who awaits it gets the same outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from ...errors import NotAdmitted, OrbitError
from ...model import PathName
from ...protocol.messaging.call_header import Wants
from ...transport.messages import OutgoingFrame
from ..live import Live
from .contract import release_current_charge

if TYPE_CHECKING:
    from .routes import Route

T = TypeVar("T")

OnError = Callable[[OrbitError], None]


class SendState(StrEnum):
    """Where a send stands. Of a call, DONE means that it was answered; of a plain send, that the
    wire confirmed it: by RDMA the peer's memory has it, by TCP this host's kernel.
    """

    PENDING = "pending"
    ADMITTED = "admitted"  # handed to the wire
    DONE = "done"
    FAILED = "failed"


class SendingOwner(Protocol):
    """The outbound side of one peer, as the frame's verdicts concern it."""

    def on_posted(self, sending: Sending) -> None:
        """It left the queue."""

    def on_failed(self, sending: Sending, error: OrbitError) -> None:
        """The link gave it up."""

    def on_given_back(self, sending: Sending) -> None:
        """The link was closed by agreement before it left."""

    def expire(self, sending: Sending) -> None:
        """Its time is up."""

    def withdraw(self, sending: Sending) -> bool:
        """Take it back; True if no byte of it left."""


class Sending(OutgoingFrame):
    """One request on its way. `charged` are the bytes that it holds of its peer's admission; None:
    none (any more). What most sends leave alone stands in the class, not in each of them.
    """

    wants: Wants = Wants.NOTHING
    wanted: PathName | None = None  # the transport that the caller demands
    id: int = 0  # what its answer names; 0: nothing is waited for
    state: SendState = SendState.PENDING
    admitted: bool = False
    settled: bool = False
    staged: bool = False  # its payload waits at this node for the peer to fetch it
    charged: int | None = None
    timeout_s: float = 0.0
    deadline: float | None = None  # by the loop's clock; of a plain send only once it is watched
    route: Route | None = None
    value: object = None
    error: OrbitError | None = None
    decode: Callable[[memoryview], object] | None = None
    on_error: OnError | None = None
    waiters: list[asyncio.Future[None]] | None = None
    admission_waiters: list[asyncio.Future[None]] | None = None

    def __init__(
        self, owner: SendingOwner, kind: int, header: bytes, payload: memoryview | bytes
    ) -> None:
        self.kind = kind
        self.header = header
        self.payload = payload
        self.owner = owner

    # --- verdicts of the link ---

    def posted(self) -> None:
        self.owner.on_posted(self)
        if self.state is SendState.PENDING:
            self.state = SendState.ADMITTED
            self.admitted = True
            if self.admission_waiters:
                _wake(self.admission_waiters)
            if self.wants is Wants.NOTHING and not self.staged:
                self.settled = True
                if self.waiters:
                    _wake(self.waiters)

    def done(self) -> None:
        if self.wants is Wants.NOTHING and not self.staged and self.state is SendState.ADMITTED:
            self.state = SendState.DONE

    def failed(self, error: OrbitError) -> None:
        self.owner.on_failed(self, error)

    def given_back(self, error: NotAdmitted) -> None:
        self.owner.on_given_back(self)

    # --- its outcome ---

    def succeed(self, value: object) -> None:
        """Once; later ones change nothing."""
        if self.state in (SendState.DONE, SendState.FAILED):
            return
        if self.decode is not None:
            try:
                value = self.decode(cast(memoryview, value))
            except OrbitError as error:
                self.fail(error)
                return
        self.state = SendState.DONE
        self.admitted = True
        self.value = value
        self._settle()

    def fail(self, error: OrbitError, *, tell: bool = True) -> bool:
        """Once; `tell` false spares `on_error`. A plain send that was admitted keeps its outcome,
        and only its state and `on_error` tell. False when it has ended before.
        """
        if self.state in (SendState.DONE, SendState.FAILED):
            return False
        self.state = SendState.FAILED
        if not self.settled:
            self.error = error
        if tell and self.on_error is not None:
            # Never from within a link's verdict: the callback may send.
            asyncio.get_running_loop().call_soon(self.on_error, error)
        self._settle()
        return True

    def _settle(self) -> None:
        self.settled = True
        if self.admission_waiters:
            _wake(self.admission_waiters)
        if self.waiters:
            _wake(self.waiters)


class SendResult(Live, Generic[T]):
    """Await it for the outcome: a plain send's is its admission (of a payload that travels by
    rendezvous, that the peer has fetched it), a call's is its answer.
    """

    _instead = "await it here, and send its outcome"

    __slots__ = ("_sending",)

    def __init__(self, sending: Sending) -> None:
        self._sending = sending

    def __await__(self) -> Generator[Any, None, T]:
        sending = self._sending
        if not sending.settled:
            release_current_charge()
            while not sending.settled:
                waiter = asyncio.get_running_loop().create_future()
                if sending.waiters is None:
                    sending.waiters = [waiter]
                else:
                    sending.waiters.append(waiter)
                try:
                    yield from waiter
                finally:
                    sending.waiters.remove(waiter)
        if sending.error is not None:
            raise sending.error.with_traceback(None)
        return cast(T, sending.value)

    async def admitted(self) -> None:
        """Wait until the frame was handed to the wire. Raises what kept it from that. Admission is
        not delivery.
        """
        sending = self._sending
        if sending.state is SendState.PENDING:
            release_current_charge()
        while sending.state is SendState.PENDING:
            waiter = asyncio.get_running_loop().create_future()
            if sending.admission_waiters is None:
                sending.admission_waiters = [waiter]
            else:
                sending.admission_waiters.append(waiter)
            try:
                await waiter
            finally:
                sending.admission_waiters.remove(waiter)
        if not sending.admitted and sending.error is not None:
            raise sending.error.with_traceback(None)

    def withdraw(self) -> bool:
        """Take the send back. True: no byte of it left, and its outcome is NotAdmitted (without
        `on_error`). False: it is on its way, or over.
        """
        return self._sending.owner.withdraw(self._sending)

    @property
    def state(self) -> SendState:
        return self._sending.state

    @property
    def done(self) -> bool:
        """Whether awaiting it would return or raise at once."""
        return self._sending.settled

    @property
    def route(self) -> Route | None:
        """What carries it; None before it was handed to a link."""
        return self._sending.route

    def __repr__(self) -> str:
        return f"<send {self._sending.state}>"


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
