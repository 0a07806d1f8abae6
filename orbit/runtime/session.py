"""One open epoch as a shell: runs the calls machine over a control link, and serves the peer's
calls.

It matches replies to the tasks that wait for them, keeps one timer for all deadlines, and turns
what handlers raise into faults. It knows neither handles nor paths; handlers are given by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import (
    BusyError,
    ClosedError,
    InternalError,
    OrbitError,
    PeerError,
    PeerLost,
    PeerProtocolError,
    PeerRefused,
    UsageError,
)
from ..model import PeerIdentity
from ..protocol.bootstrap import Epoch
from ..protocol.calls import (
    CallCompleted,
    CallFailed,
    CallId,
    CallTable,
    Effect,
    GoodbyeArrived,
    PongArrived,
    Serve,
    ServeNotification,
    goodbye_frame,
    notify_frame,
)
from ..protocol.framing import FrameKind, SendFrame
from ..protocol.messages import Hello, Message
from ..transport.interface import CallHandler, ControlLink, PacketRoute, Reply
from ..transport.timer import DeadlineTimer
from .heartbeat import Heartbeat

_log = logging.getLogger("orbit")
_PACKET = int(FrameKind.PACKET)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What every session of a node shares. `start` begins named background work at once, and makes
    a task of what is left of it; `on_closed` runs once. `packets` takes what rides beside the
    calls; None: this node takes no messages.
    """

    handlers: Mapping[str, CallHandler]
    start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None] | None]
    on_closed: Callable[[ControlSession], None]
    call_timeout_s: float
    packets: PacketRoute | None = None
    silence_s: float = 10.0  # of a peer that owes an answer, before it is asked
    ping_timeout_s: float = 2.0


class ControlSession:
    """Implements transport.interface.Session. Calls go both ways over it, whichever side dialed."""

    def __init__(
        self,
        epoch: Epoch,
        link: ControlLink,
        peer_endpoints: Sequence[tuple[str, int]],
        settings: SessionSettings,
        *,
        dialed: bool,
    ) -> None:
        self.epoch = epoch
        self.dialed = dialed
        self.peer_endpoints = peer_endpoints
        self.cause: OrbitError | None = (
            None  # why it ended; None while open and after a local close
        )
        self.link = link
        self._settings = settings
        self._calls = CallTable()
        self._waiters: dict[CallId, asyncio.Future[object]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            lambda frame: self._send([SendFrame(frame)]),
            settings.silence_s,
            settings.ping_timeout_s,
        )
        self._timer = DeadlineTimer(self._on_deadline)
        self.closed = False
        self._closing = False  # by this side
        self._goodbye = False

    @property
    def peer(self) -> PeerIdentity:
        return self.epoch.peer

    @property
    def attempt(self) -> bytes:
        return self.epoch.attempt

    @property
    def key(self) -> bytes:
        return self.epoch.key

    @property
    def backlog_bytes(self) -> int:
        return self.link.accepted_bytes - self.link.taken_bytes

    @property
    def local_hello(self) -> Hello:
        return self.epoch.local_hello

    @property
    def peer_hello(self) -> Hello:
        return self.epoch.peer_hello

    def start(self) -> None:
        """Begin to read frames. Handlers may run from the next turn of the loop on."""
        packets = self._settings.packets
        if packets is None:
            self.link.start(self._on_frame, self._on_link_closed)
            return
        self.link.watch_taken(lambda: packets.on_taken(self))
        self.link.start(self._on_frame, self._on_link_closed, lambda: packets.on_pass_end(self))

    async def call(
        self, request: Message, reply: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        """Cancelling the caller gives the call up: its answer, if one still comes, is dropped and
        counted.
        """
        if self.closed:
            raise self._lost()
        now = self._loop.time()
        timeout = self._settings.call_timeout_s if timeout_s is None else timeout_s
        call_id, send = self._calls.start(_method(request), request.to_wire(), now, now + timeout)
        waiter: asyncio.Future[object] = self._loop.create_future()
        self._waiters[call_id] = waiter
        try:
            self.link.send_nowait(send.frame)
            self._arm()
            body = await waiter
        except ClosedError:
            raise self._lost() from None
        finally:
            self._waiters.pop(call_id, None)
            if waiter.cancelled() or not waiter.done():  # else the table has ended it
                self._calls.cancel(call_id)
                self._arm()
        try:
            return reply.from_wire(body)
        except PeerProtocolError as error:
            self.abort(error)
            raise

    def notify(self, request: Message) -> None:
        if self.closed:
            return
        self._send([SendFrame(notify_frame(_method(request), request.to_wire()))])

    async def ping(self, timeout_s: float) -> float:
        """Seconds until the peer answered. Raises DeadlineExceeded, PeerError, ClosedError."""
        if self.closed:
            raise self._lost()
        return await self._heartbeat.ping(timeout_s)

    def close(self) -> None:
        """Say goodbye and end the epoch in order. Idempotent."""
        if self.closed:
            return
        self._closing = True
        # When it cannot be said, the end of the connection says it as well.
        with contextlib.suppress(ClosedError, BusyError):
            self.link.send_nowait(goodbye_frame())
        self.link.close()

    def abort(self, cause: OrbitError) -> None:
        """End the epoch at once because of `cause`. Idempotent."""
        if self.closed:
            return
        self.cause = cause
        self.link.abort()

    async def wait_served(self) -> None:
        """Until no handler of this session runs any more."""
        while self._serving:
            await asyncio.wait(set(self._serving))

    async def wait_closed(self) -> None:
        """Until the link's resources are gone."""
        await self.link.wait_closed()

    def _on_frame(self, frame: memoryview) -> None:
        # Raises PeerProtocolError into the link, which then closes and reports it.
        if self._heartbeat.deadline is not None:
            self._heartbeat.on_frame()
        if frame[0] == _PACKET:
            packets = self._settings.packets
            if packets is None:
                raise PeerProtocolError("a message packet, though this side takes no messages")
            packets.on_packet(self, frame[1:])
            return
        self._carry_out(self._calls.on_frame(frame, self._loop.time()))
        if self._timer.armed or self._calls.outstanding:
            self._arm()

    def _on_deadline(self) -> None:
        # A loop timer may come a clock tick early; the machine's clock must not.
        due = _earliest(self._calls.deadline, self._heartbeat.deadline)
        now = self._loop.time() if due is None else max(self._loop.time(), due)
        self._carry_out(self._calls.on_deadline(now))
        if (lost := self._heartbeat.on_deadline(now, str(self.peer))) is not None:
            self.abort(lost)
        self._arm()

    def _arm(self) -> None:
        self._heartbeat.watch(owed=self._calls.outstanding > 0)
        self._timer.arm(_earliest(self._calls.deadline, self._heartbeat.deadline))

    def _on_link_closed(self, error: BaseException | None) -> None:
        if isinstance(error, OrbitError):
            self.cause = self.cause or error
        if self._goodbye and isinstance(self.cause, PeerLost):
            self.cause = PeerLost(str(self.peer), "it said goodbye")
        self.closed = True
        self._timer.arm(None)
        self._carry_out(self._calls.close(self._lost()))
        self._heartbeat.close(self._lost())
        if self._settings.packets is not None:
            self._settings.packets.on_closed(self, self.cause)
        self._settings.on_closed(self)

    def _lost(self) -> OrbitError:
        """What a call over this session ends with once it is closed."""
        if self.cause is None and not self.closed and not self._closing:
            return PeerLost(str(self.peer), "a send failed")  # the report is on its way
        if self.cause is None:
            return ClosedError(f"the session with {self.peer}")
        if isinstance(self.cause, PeerError) and not isinstance(self.cause, PeerProtocolError):
            return self.cause.with_traceback(None)
        return PeerLost(str(self.peer), str(self.cause))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendFrame():
                    self._send([effect])
                case CallCompleted(call_id, body):
                    waiter = self._waiters.get(call_id)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(body)
                case CallFailed(call_id, error):
                    waiter = self._waiters.get(call_id)
                    if waiter is not None and not waiter.done():
                        waiter.set_exception(error)
                case Serve(call_id, method, body):
                    self._start(self._serve(call_id, method, body), method)
                case ServeNotification(method, body):
                    self._start(self._serve(None, method, body), method)
                case GoodbyeArrived():
                    self._goodbye = True
                case PongArrived(number):
                    self._heartbeat.on_pong(number)

    def _send(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, SendFrame):
                continue
            try:
                self.link.send_nowait(effect.frame)
            except ClosedError:
                return
            except BusyError as error:
                # Dropping one frame would leave the peer waiting for it; a peer that reads nothing
                # is gone.
                self.abort(PeerLost(str(self.peer), str(error)))
                return

    def _start(self, work: Coroutine[Any, Any, None], method: str) -> None:
        task = self._settings.start(work, f"serve {method}")
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, call_id: CallId | None, method: str, body: object) -> None:
        handler = self._settings.handlers.get(method)
        try:
            if handler is None:
                raise PeerRefused("unknown_method", method)
            answer = await _guarded(handler(self, body))
        except PeerProtocolError as error:
            self.abort(error)
            return
        except OrbitError as error:
            if call_id is None:
                _log.debug("notification %s from %s: %s", method, self.peer, error)
            else:
                code = error.reason if isinstance(error, PeerRefused) else error.code
                self._send(self._calls.fault(call_id, code, str(error)))
            return
        if call_id is not None:
            self._answer(call_id, answer)

    def _answer(self, call_id: CallId, answer: Message | None) -> None:
        try:
            self._send(self._calls.reply(call_id, {} if answer is None else answer.to_wire()))
        except (InternalError, UsageError) as error:
            # A bug (unencodable, or over the frame limit). The peer must not wait for ever because
            # of it.
            _log.error("an answer to %s cannot be sent: %s", self.peer, error)
            self.abort(InternalError(str(error)))


def _earliest(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


async def _guarded(work: Awaitable[Message | None]) -> Message | None:
    """A handler's mistake is said here, in full, and to the peer as `internal` only."""
    try:
        return await work
    except OrbitError:
        raise
    except Exception as error:
        _log.exception("a handler failed")
        raise InternalError("the handler failed") from error


def _method(request: Message) -> str:
    method = getattr(request, "METHOD", None)
    if not isinstance(method, str):
        raise InternalError(f"{type(request).__name__} is not a call")
    return method
