"""One received request while it is worked on: its handler runs, and it is answered exactly once.

Whatever a handler does (returns, raises, is cancelled, gives back what cannot travel) ends in one
answer. When it runs, and beside what, is the dispatcher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable
from typing import Final, Protocol, cast

from ...errors import InternalError, OrbitError, PeerProtocolError, RequestFailed, UsageError
from ...memory.buffer import BufferExport
from ...protocol.codec import decode, encode
from ...protocol.messaging.call_header import Wants
from .contract import CURRENT_CHARGE, CallerGone, Payload, Request
from .handlers import Handler, Message
from .payloads import is_plain

_DETAIL_CHARACTERS_MAX: Final = 500  # of what a handler raised, as its caller is told

_log = logging.getLogger("orbit")


class JobOwner(Protocol):
    """The dispatcher."""

    def failed(self, stage: str, reason: str) -> None:
        """Count a request that no handler answered well."""

    def closed(self, job: Job) -> None:
        """The job's request was settled."""


class Job:
    """One request with its handler. Every way out of it settles the request and tells the owner,
    once. Implements lanes.Job.
    """

    __slots__ = ("_open", "_owner", "began", "handler", "message", "plain", "request")

    def __init__(
        self, owner: JobOwner, request: Request, handler: Handler, message: Message
    ) -> None:
        self._owner = owner
        self._open = True
        self.request = request
        self.handler = handler
        self.message = message
        self.plain = not handler.is_async and not request.staged
        self.began = False

    def run_now(self) -> None:
        """A plain function, to its end."""
        arguments = self._arguments()
        if arguments is None:
            return
        self.began = True
        begin = time.perf_counter()
        try:
            self._finish(self.handler.function(*arguments), begin)
        except (Exception, asyncio.CancelledError) as error:  # nobody cancelled: it did that itself
            self.raised(error, begin)
        except BaseException as error:
            self.raised(error, begin)
            raise

    async def run(self) -> None:
        """Any function, in a task, whose payload may still be with the sender."""
        if not self._open:
            return
        self.began = True
        token = CURRENT_CHARGE.set(self.request.charge)
        begin = time.perf_counter()
        try:
            if self.request.staged:
                await self._load()
            arguments = self._arguments()
            if arguments is None:
                return
            result = self.handler.function(*arguments)
            if self.handler.is_async:
                result = await cast("Awaitable[object]", result)
            self._finish(result, begin)
        except asyncio.CancelledError as error:
            self.raised(error, begin)
            if _cancelled_from_outside():
                raise
        except Exception as error:
            self.raised(error, begin)
        except BaseException as error:
            self.raised(error, begin)
            raise
        finally:
            with contextlib.suppress(ValueError):  # a loop that is thrown away ends it elsewhere
                CURRENT_CHARGE.reset(token)

    def refuse(self, reason: str, detail: str, level: int = logging.INFO) -> None:
        """The handler does not run."""
        if not self._open:
            return
        _log.log(level, "%s from %s is refused: %s", self.handler.name, self.request.sender, detail)
        self._owner.failed("dispatch", reason)
        self.request.fail(reason, detail)
        self._close()

    def drop(self) -> None:
        """It never begins: a shutdown ran out of time. The sender may ask somebody else."""
        if self._open:
            self.request.reject_draining()
            self._close()

    def _abandon(self) -> None:
        """Its sender waits no more, so the handler does not run and nobody is answered."""
        if self._open:
            self._owner.failed("dispatch", "caller_gone")
            self.request.drop()
            self._close()

    def raised(self, error: BaseException, begin: float | None = None) -> None:
        """By the handler, whatever it is: the sender is told, and the log has it in full."""
        if not self._open:
            return
        counts = self.handler.counts
        if begin is not None:
            counts.finished(time.perf_counter() - begin)
        counts.failures += 1
        self._owner.failed("handler", "failed")
        if isinstance(error, asyncio.CancelledError):  # by a shutdown, most of the time
            _log.warning("handler %s was cancelled", self.handler.name)
        else:
            _log.error("handler %s failed", self.handler.name, exc_info=error)
        self.request.fail("failed", _detail_of(error))
        self._close()

    async def _load(self) -> None:
        try:
            await self.request.load()
        except RequestFailed as error:
            # Nobody but the log hears that a plain send was lost.
            lost = self.request.wants is Wants.NOTHING
            self.refuse(error.reason, error.detail, logging.WARNING if lost else logging.INFO)
            return
        except CallerGone:
            self._abandon()
            return
        old, payload = self.message, self.request.payload
        self.message = Message(old.name, payload, old.headers, old.sender, old.node)
        self.handler.counts.request_bytes += len(payload)

    def _arguments(self) -> tuple[object, ...] | None:
        """What the function is called with; None: the request is settled already."""
        if not self._open:
            return None
        if not self.handler.typed:
            return (self.message,)
        payload = self.message.payload
        try:
            value = decode(payload) if len(payload) else None  # an empty payload means None
        except PeerProtocolError as error:
            self.refuse("decode", str(error))
            return None
        return (value, self.message)

    def _finish(self, result: object, begin: float) -> None:
        if not self._open:
            return  # it ignored its cancellation; its sender has an answer
        counts = self.handler.counts
        payload: Payload | None = None
        if self.handler.typed:
            payload = _encoded(result)
        elif result is not None:
            payload = result if type(result) is bytes else _bytes_of(result)
        counts.finished(time.perf_counter() - begin)
        if payload is not None and self.request.wants is Wants.RESPONSE:
            counts.response_bytes += len(payload)
        self.request.answer(payload)
        self._close()

    def _close(self) -> None:
        self._open = False
        self.handler.counts.in_flight -= 1
        self._owner.closed(self)


def _cancelled_from_outside() -> bool:
    """Or the handler awaited something that was cancelled, which is no reason to end a lane."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _encoded(result: object) -> bytes:
    try:
        return encode(result)
    except InternalError as error:
        raise UsageError(f"a handler's result {error}") from error


def _bytes_of(result: object) -> memoryview:
    if type(result) is memoryview and is_plain(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError("a plain function returned a coroutine: register the async one itself")
    return BufferExport(result).view


def _detail_of(error: BaseException) -> str:
    """One line. The reason of a peer that the handler itself called is no reason of ours."""
    if isinstance(error, asyncio.CancelledError):
        return "the handler was cancelled"
    text = str(error) if isinstance(error, OrbitError) else f"{type(error).__name__}: {error}"
    return text[:_DETAIL_CHARACTERS_MAX]
