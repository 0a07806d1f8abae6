"""One open epoch as a shell: runs the calls machine over a control link, and serves the peer's
calls.

It matches replies to the tasks that wait for them, keeps one timer for all deadlines, and turns
what handlers raise into faults. It knows neither handles nor paths; handlers are given by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
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
from ..protocol.framing import SendFrame
from ..protocol.messages import Hello, Message
from ..transport.interface import CallHandler, ControlLink, Reply
from .timer import DeadlineTimer

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What every session of a node shares. `spawn` starts a named background task; `on_closed` runs
    once.
    """

    handlers: Mapping[str, CallHandler]
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    on_closed: Callable[[ControlSession], None]
    call_timeout_s: float


class ControlSession:
    """Implements transport.interface.Session. `dialed`: this node opened it and makes its calls
    over it.
    """

    def __init__(
        self,
        epoch: Epoch,
        link: ControlLink,
        peer_endpoint: tuple[str, int],
        settings: SessionSettings,
        *,
        dialed: bool,
    ) -> None:
        self.epoch = epoch
        self.dialed = dialed
        self.peer_endpoint = peer_endpoint
        self.cause: OrbitError | None = (
            None  # why it ended; None while open and after a local close
        )
        self._link = link
        self._settings = settings
        self._calls = CallTable()
        self._waiters: dict[CallId, asyncio.Future[object]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._on_deadline)
        self._closed = False
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
    def local_hello(self) -> Hello:
        return self.epoch.local_hello

    @property
    def peer_hello(self) -> Hello:
        return self.epoch.peer_hello

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self) -> None:
        """Begin to read frames. Handlers may run from the next turn of the loop on."""
        self._link.start(self._on_frame, self._on_link_closed)

    async def call(
        self, request: Message, reply: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        """Cancelling the caller gives the call up: its answer, if one still comes, is dropped and
        counted.
        """
        if self._closed:
            raise self._lost()
        now = self._loop.time()
        timeout = self._settings.call_timeout_s if timeout_s is None else timeout_s
        call_id, send = self._calls.start(_method(request), request.to_wire(), now, now + timeout)
        waiter: asyncio.Future[object] = self._loop.create_future()
        self._waiters[call_id] = waiter
        try:
            self._link.send_nowait(send.frame)
            self._timer.arm(self._calls.deadline)
            body = await waiter
        except ClosedError:
            raise self._lost() from None
        finally:
            self._waiters.pop(call_id, None)
            self._calls.cancel(call_id)  # nothing when it has ended
            self._timer.arm(self._calls.deadline)
        try:
            return reply.from_wire(body)
        except PeerProtocolError as error:
            self.abort(error)
            raise

    def notify(self, request: Message) -> None:
        if self._closed:
            return
        self._send([SendFrame(notify_frame(_method(request), request.to_wire()))])

    def close(self) -> None:
        """Say goodbye and end the epoch in order. Idempotent."""
        if self._closed:
            return
        # When it cannot be said, the end of the connection says it as well.
        with contextlib.suppress(ClosedError, BusyError):
            self._link.send_nowait(goodbye_frame())
        self._link.close()

    def abort(self, cause: OrbitError) -> None:
        """End the epoch at once because of `cause`. Idempotent."""
        if self._closed:
            return
        self.cause = cause
        self._link.abort()

    async def wait_served(self) -> None:
        """Until no handler of this session runs any more."""
        while self._serving:
            await asyncio.wait(set(self._serving))

    async def wait_closed(self) -> None:
        """Until the link's resources are gone."""
        await self._link.wait_closed()

    def _on_frame(self, frame: memoryview) -> None:
        # Raises PeerProtocolError into the link, which then closes and reports it.
        self._carry_out(self._calls.on_frame(frame, self._loop.time()))
        self._timer.arm(self._calls.deadline)

    def _on_deadline(self) -> None:
        # A loop timer may come a clock tick early; the machine's clock must not.
        due = self._calls.deadline
        now = self._loop.time()
        self._carry_out(self._calls.on_deadline(now if due is None else max(now, due)))
        self._timer.arm(self._calls.deadline)

    def _on_link_closed(self, error: BaseException | None) -> None:
        if isinstance(error, OrbitError):
            self.cause = self.cause or error
        if self._goodbye and isinstance(self.cause, PeerLost):
            self.cause = PeerLost(str(self.peer), "it said goodbye")
        self._closed = True
        self._timer.arm(None)
        self._carry_out(self._calls.close(self._lost()))
        self._settings.on_closed(self)

    def _lost(self) -> OrbitError:
        """What a call over this session ends with once it is closed."""
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
                    self._spawn(self._serve(call_id, method, body), method)
                case ServeNotification(method, body):
                    self._spawn(self._serve(None, method, body), method)
                case GoodbyeArrived():
                    self._goodbye = True
                case PongArrived():
                    pass  # nothing pings yet; TCP's own keepalive watches the connection

    def _send(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, SendFrame):
                continue
            try:
                self._link.send_nowait(effect.frame)
            except ClosedError:
                return
            except BusyError as error:
                # Dropping one frame would leave the peer waiting for it; a peer that reads nothing
                # is gone.
                self.abort(PeerLost(str(self.peer), str(error)))
                return

    def _spawn(self, work: Coroutine[Any, Any, None], method: str) -> None:
        task = self._settings.spawn(work, f"serve {method}")
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
