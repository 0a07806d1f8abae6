"""The two objects of a stream that users hold. Each may be lost without a word: the other side
hears of it.

They check what callers pass, pack and unpack typed items, and wait; all else is decided by the ends
behind them, which the node keeps.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from ...errors import BusyError, DeadlineExceeded, InternalError, UsageError
from ...memory.buffer import BufferExport
from ...protocol.codec import encode
from ...protocol.streams.frames import NoteKind
from ...protocol.streams.handle import StreamHandle
from ..live import Live
from .contract import release_current_charge
from .stream_receiving import ReceivingStream
from .stream_sending import PendingItem, SendingStream

T = TypeVar("T")


class Sending:
    """What `send` returns: await it for room. Awaiting is optional where `send_nowait` would do."""

    __slots__ = ("_item", "_sender", "_stream", "_ticket", "_timeout")

    def __init__(
        self,
        sender: StreamSender,
        stream: SendingStream,
        ticket: int,
        item: PendingItem,
        timeout: float | None,
    ) -> None:
        self._sender = sender  # a send that waits keeps the stream from being dropped
        self._stream = stream
        self._ticket = ticket
        self._item = item
        self._timeout = timeout

    def __await__(self) -> Generator[object, None, None]:
        sent = self._item.sent
        if sent is None:
            return
        release_current_charge()
        try:
            if self._timeout is None:
                yield from sent
            else:
                yield from asyncio.wait_for(sent, self._timeout).__await__()
        except TimeoutError as error:
            assert self._timeout is not None
            self._stream.withdraw(self._ticket)
            raise DeadlineExceeded(f"a send to {self._stream.handle}", self._timeout) from error
        except asyncio.CancelledError:
            self._stream.withdraw(self._ticket)
            raise


class StreamSender(Live):
    """Feeds one stream. `async with` finalizes it at the end, or drops it after an exception; an
    object that is lost without an end drops it too, and the receiver hears of it.
    """

    _instead = "let the other process attach to the stream's handle"

    def __init__(self, stream: SendingStream, *, typed: bool) -> None:
        self._stream = stream
        self._typed = typed
        loop = asyncio.get_running_loop()
        finalizer = weakref.finalize(self, _drop_soon, loop, stream)
        finalizer.atexit = False

    @property
    def handle(self) -> StreamHandle:
        return self._stream.handle

    @property
    def cancelled(self) -> asyncio.Event:
        """Set when the stream is over: the receiver cancelled, the link is gone, or the end that
        this side gave it has reached the receiver.
        """
        return self._stream.over

    @property
    def items_sent(self) -> int:
        return self._stream.machine.items_sent

    def send(self, item: object, *, timeout: float | None = None) -> Sending:
        """Send an item behind all earlier ones; it is issued when this returns. Awaiting the result
        waits until it has left, for room at the receiver first of all; until then the item's memory
        must not change. A wait that times out (DeadlineExceeded) or is cancelled withdraws an item
        that has found no room: nothing of it was sent.

        Items are bytes-like, or values for msgpack where the receiver opened a typed stream. Raises
        UsageError, StreamError (the stream has ended), ClosedError (this side has ended it).
        """
        if timeout is not None and not 0 < timeout < float("inf"):
            raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0")
        self._stream.check_sendable()
        payload, nbytes = self._packed(item)
        return Sending(self, self._stream, *self._stream.submit(payload, nbytes), timeout)

    def send_nowait(self, item: object) -> None:
        """As `send`, where the item leaves at once. Raises BusyError where it would wait, and
        nothing was sent.
        """
        self._stream.check_sendable()
        payload, nbytes = self._packed(item)
        if not self._stream.has_room(nbytes):
            if isinstance(payload, BufferExport):
                payload.release()
            raise BusyError(f"{self.handle} has no room for an item of {nbytes} bytes")
        self._stream.submit(payload, nbytes)

    async def finalize(self, *, timeout: float | None = None) -> None:
        """The good end, behind all items that were issued. Returns when the receiver has every item
        and the end in its memory. Idempotent. Raises StreamError when the stream ended in another
        way, DeadlineExceeded while the end is still on its way.
        """
        self._stream.finalize()
        release_current_charge()
        try:
            async with asyncio.timeout(timeout):
                end = await asyncio.shield(self._stream.ended)
        except TimeoutError as error:
            assert timeout is not None
            raise DeadlineExceeded(f"finalizing {self.handle}", timeout) from error
        failure = end.error()
        if failure is not None:
            raise failure

    def fail(self, text: str) -> None:
        """The bad end: the receiver gets the items that were sent, then StreamError("failed") with
        `text`. Sends that wait for room are refused. Nothing happens when the stream has ended.
        """
        self._stream.abandon(NoteKind.FAILED, text)

    def drop(self) -> None:
        """End it without a word: StreamError("dropped") behind the items that were sent."""
        self._stream.abandon(NoteKind.DROPPED)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.drop()
        elif not self._stream.ended.done() or self._stream.ended.result().error() is None:
            await self.finalize()

    def _packed(self, item: object) -> tuple[bytes | BufferExport, int]:
        if self._typed:
            try:
                value = encode(item)
            except InternalError as error:
                raise UsageError(f"an item that msgpack cannot carry: {error}") from error
            return value, len(value)
        if type(item) is bytes:
            return item, len(item)
        export = BufferExport(item)
        return export, export.nbytes


def _drop_soon(loop: asyncio.AbstractEventLoop, stream: SendingStream) -> None:
    """The user's object is gone, in whatever thread that was noticed."""
    if not stream.ended.done() and not loop.is_closed():
        with suppress(RuntimeError):  # the loop was closed meanwhile, and every link with it
            loop.call_soon_threadsafe(stream.abandon, NoteKind.DROPPED)


class StreamInbox(Live, Generic[T]):
    """The receiving end of one stream: `async for item in inbox`. `handle` goes to the producer, by
    any road. Leaving its `async with`, or losing the object, cancels a stream that has not ended.
    """

    _instead = "send its handle"

    def __init__(self, stream: ReceivingStream) -> None:
        self._stream = stream
        loop = asyncio.get_running_loop()
        finalizer = weakref.finalize(self, _cancel_soon, loop, stream)
        finalizer.atexit = False

    @property
    def handle(self) -> StreamHandle:
        return self._stream.handle

    @property
    def attached(self) -> bool:
        """Whether a producer has attached, ever."""
        return self._stream.producer is not None

    @property
    def buffered(self) -> int:
        """Items that are here, or are being fetched."""
        return self._stream.machine.buffered

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        """The next item; a cancelled wait takes none. Untyped items are read-only memoryviews that
        may be kept. Raises StreamError at any end but the good one, each time; BusyError while
        another task waits for an item.
        """
        return await self._stream.next()  # type: ignore[return-value]

    def cancel(self) -> None:
        """No more items: what is buffered goes, the producer's sends fail. Idempotent."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


def _cancel_soon(loop: asyncio.AbstractEventLoop, stream: ReceivingStream) -> None:
    if not stream.ended and not loop.is_closed():
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(stream.cancel)
