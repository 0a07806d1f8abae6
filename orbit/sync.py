"""orbit without async: `orbit.sync.Node` and `orbit.sync.TransferEngine` have the names of
`orbit.Node` and `orbit.TransferEngine`, and their calls block.

The twin is made from the asynchronous classes, so that it cannot drift from them. Where those are
awaited these return when it is done; `Node.send` alone returns its result at once. A node runs its
own event loop in a thread of its own; any thread may call it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from .config import EngineConfig, NodeConfig
from .daemon_pool import DaemonPool
from .engine import TransferEngine as AsyncTransferEngine
from .errors import ClosedError, DeadlineExceeded, OrbitError, UsageError
from .events import EventSink
from .loop_thread import LoopThread
from .node import Node as AsyncNode
from .runtime.call_site import telling_site
from .runtime.engine.batch import Batch as AsyncBatch
from .runtime.engine.region import EngineRegion as AsyncEngineRegion
from .runtime.engine.requests import TransferResult
from .runtime.live import Live
from .runtime.messaging.handlers import Message, is_async_function
from .runtime.messaging.results import SendResult as AsyncSendResult
from .runtime.messaging.stream_objects import StreamInbox as AsyncStreamInbox
from .runtime.messaging.stream_objects import StreamSender as AsyncStreamSender
from .runtime.region_guards import RegionGuard as AsyncRegionGuard
from .runtime.region_guards import RegionWatch as AsyncRegionWatch
from .runtime.sinks import PinnedPayload as AsyncPinnedPayload
from .runtime.sinks import PinnedWriter as AsyncPinnedWriter

__all__ = [
    "Batch",
    "EngineRegion",
    "Node",
    "PinnedPayload",
    "PinnedWriter",
    "RegionGuard",
    "RegionWatch",
    "SendResult",
    "StreamInbox",
    "StreamSender",
    "TransferEngine",
]

_log = logging.getLogger("orbit")

HANDLER_THREADS: Final = 32

_open_nodes: set[Node] = set()
_first_open: Final = threading.Lock()


class _Twin(Live):
    """Holds one asynchronous object and the thread that it lives in. Subclasses get the object's
    public methods from `_twin_of`.
    """

    __slots__ = ("_inner", "_thread")

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __repr__(self) -> str:
        return f"<sync {self._inner!r}>"

    def _call(self, function: Callable[[], object]) -> Any:
        return _twin_for(self._thread.call(function), self._thread)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _twin_of(source: type[Live]) -> Callable[[type[Live]], type[Live]]:
    """Give the decorated class every public name of `source`: what it defines itself gets the
    signature and the text.
    """

    def complete(twin: type[Live]) -> type[Live]:
        for name, member in inspect.getmembers_static(source):
            if name.startswith("_"):
                continue
            own = vars(twin).get(name)
            if isinstance(own, property):
                continue
            if own is not None:
                own.__signature__ = inspect.signature(member)
                own.__doc__ = member.__doc__
            elif isinstance(member, property) or inspect.ismemberdescriptor(member):
                setattr(twin, name, _property(name, member.__doc__))
            elif inspect.isfunction(member):
                setattr(twin, name, _method(name, member))
        twin._instead = source._instead
        return twin

    return complete


def _property(name: str, text: str | None) -> property:
    def read(self: _Twin) -> object:
        return getattr(self._inner, name)

    return property(read, doc=text)


def _method(name: str, member: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(member)
    def call(self: _Twin, *arguments: Any, **named: Any) -> object:
        bound = getattr(self._inner, name)
        theirs = [_inner_of(argument) for argument in arguments]
        theirs_named = {key: _inner_of(value) for key, value in named.items()}
        return self._call(lambda: bound(*theirs, **theirs_named))

    return call


def _inner_of(argument: object) -> object:
    """What the asynchronous classes know: of a twin, and of twins in a list of buffers."""
    if isinstance(argument, _Twin):
        return argument._inner
    if isinstance(argument, list | tuple) and any(isinstance(one, _Twin) for one in argument):
        return [_inner_of(one) for one in argument]
    return argument


@_twin_of(AsyncSendResult)
class SendResult(_Twin):
    """What `Node.send` returns: the send is on its way or in its queue."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Any:
        """The outcome, as awaiting an orbit.SendResult gives it. Raises DeadlineExceeded when it is
        not there in time; the send goes on.
        """
        try:
            return self._thread.call(lambda: _waited(self._inner), timeout)
        except TimeoutError as error:
            if timeout is None or self._inner.done:
                raise
            raise DeadlineExceeded("waiting for a send", timeout) from error


async def _waited(result: AsyncSendResult[Any]) -> object:
    return await result


@_twin_of(AsyncStreamSender)
class StreamSender(_Twin):
    """`with` finalizes the stream at the end, or drops it after an exception."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(lambda: self._inner.__aexit__(kind, error, trace))


@_twin_of(AsyncStreamInbox)
class StreamInbox(_Twin):
    """`for item in inbox`, within `with`."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._thread.call(lambda: _next_of(self._inner))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(lambda: self._inner.__aexit__(kind, error, trace))


async def _next_of(inbox: AsyncStreamInbox[Any]) -> object:
    return await inbox.__anext__()


@_twin_of(AsyncPinnedPayload)
class PinnedPayload(_Twin):
    """`with` frees it at the end."""

    __slots__ = ()

    def free(self) -> None:
        """See orbit.PinnedPayload.free."""
        _free(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        _free(self)


@_twin_of(AsyncPinnedWriter)
class PinnedWriter(_Twin):
    """`with` frees it at the end."""

    __slots__ = ()

    def free(self) -> None:
        """See orbit.PinnedWriter.free."""
        _free(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        _free(self)


def _free(piece: _Twin) -> None:
    try:
        piece._call(piece._inner.free)
    except ClosedError:  # the node's thread is gone, so nobody else is at its memory
        piece._inner.free()


@_twin_of(AsyncRegionWatch)
class RegionWatch(_Twin):
    """Sees what a guard sees."""

    __slots__ = ()


@_twin_of(AsyncRegionGuard)
class RegionGuard(_Twin):
    """`with` unregisters at the end, which waits for what uses the region. A guard that is dropped
    starts that in the background, with a warning.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._call(self._inner.unregister)


@_twin_of(AsyncNode)
class Node(Live):
    """As orbit.Node, with `with` in place of `async with`, for any thread.

    Plain handlers run in a pool of `handler_threads` threads, so that they may call the node they
    serve; more nested calls into one node than threads wait for each other. Async handlers, and
    callbacks (`on_event`, `on_error`, `progress`), run in the node's own thread and must not block;
    to a blocking call they get a UsageError. An async handler's `message.node` is the orbit.Node.
    After a fork the child's copy is closed. A node that is still open at exit is closed then.
    """

    def __init__(
        self,
        config: NodeConfig | None = None,
        *,
        on_event: EventSink | None = None,
        handler_threads: int = HANDLER_THREADS,
    ) -> None:
        if type(handler_threads) is not int or handler_threads < 1:
            raise UsageError(f"handler_threads={handler_threads!r} is not a number above 0")
        self._inner = AsyncNode(config, on_event=on_event)
        self._handler_threads = handler_threads
        self._thread: LoopThread | None = None
        self._pool: DaemonPool | None = None
        self._changing = threading.RLock()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """See orbit.Node.open."""
        with self._changing:
            thread = self._thread or LoopThread("node")
            try:
                thread.call(self._inner.open)
            except BaseException:
                if self._thread is None:
                    thread.stop()
                raise
            self._thread = thread
            self._pool = DaemonPool(self._handler_threads, "orbit handler")
            _remember(self)

    def close(self) -> None:
        """See orbit.Node.close. Handlers in the pool are not waited for."""
        with self._changing:
            thread, pool = self._thread, self._pool
            if thread is None:
                return
            if not thread.forked:
                thread.check_caller()  # before anything ends: the node stays as it was then
            try:
                if not thread.forked:
                    thread.call(self._inner.close)
            finally:
                self._thread = self._pool = None
                _open_nodes.discard(self)
                thread.stop()
                if pool is not None and not thread.forked:
                    pool.shutdown(wait=False, cancel_futures=True)

    def graceful_shutdown(self, *arguments: Any, **named: Any) -> None:
        """See orbit.Node.graceful_shutdown."""
        self._call(lambda: self._inner.graceful_shutdown(*arguments, **named))
        self.close()

    def send(self, *arguments: Any, **named: Any) -> SendResult:
        """See orbit.Node.send."""
        thread = self._opened()
        kept = thread.call(lambda: [self._inner.send(*arguments, **named)])
        assert isinstance(kept, list)
        return SendResult(kept[0], thread)

    def register_owned(self, *arguments: Any, **named: Any) -> RegionGuard:
        """See orbit.Node.register_owned."""
        return self._region(self._inner.register_owned, arguments, named)

    def register_external_memory(self, *arguments: Any, **named: Any) -> RegionGuard:
        """See orbit.Node.register_external_memory."""
        return self._region(self._inner.register_external_memory, arguments, named)

    def handler(self, name: str, function: Any = None, **named: Any) -> Any:
        """See orbit.Node.handler."""
        return self._register(self._inner.handler, name, function, named)

    def typed_handler(self, name: str, function: Any = None, **named: Any) -> Any:
        """See orbit.Node.typed_handler."""
        return self._register(self._inner.typed_handler, name, function, named)

    def statistics(self) -> Any:
        """See orbit.Node.statistics."""
        with self._changing:
            return self._call(self._inner.statistics)

    # --- within -----------------------------------------------------------------------------------

    def _opened(self) -> LoopThread:
        thread = self._thread
        if thread is None:
            raise ClosedError("the node")
        return thread

    def _call(self, function: Callable[[], object]) -> Any:
        thread = self._thread
        if thread is None:
            # No loop, no other thread in it: what only looks or registers is done here, and the
            # node itself says no to the rest.
            result = function()
            if inspect.iscoroutine(result):
                result.close()
                raise ClosedError("the node")
            return result
        return _twin_for(thread.call(function), thread)

    def _region(
        self, register: Callable[..., object], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> RegionGuard:
        with telling_site():  # of which the node's thread sees nothing
            guard = self._call(lambda: register(*arguments, **named))
        assert isinstance(guard, RegionGuard)
        return guard

    def _register(
        self, register: Callable[..., object], name: str, function: Any, named: dict[str, Any]
    ) -> Any:
        def add(function: Any) -> Any:
            self._call(lambda: register(name, self._adapted(function), **named))
            return function

        return add if function is None else add(function)

    def _adapted(self, function: Any) -> Any:
        """An async function that runs a plain one in the pool, with the message of this twin."""
        if not callable(function) or is_async_function(function):
            return function
        loop_side = self

        async def run(*arguments: Any) -> object:
            pool, message = loop_side._pool, arguments[-1]
            assert isinstance(message, Message)
            mine = (*arguments[:-1], replace(message, node=loop_side))
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, context.run, function, *mine)

        return run

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class EngineRegion(AsyncEngineRegion):
    """As orbit.EngineRegion, for any thread, with `with`. Requests take it as it is."""

    def __init__(self, inner: AsyncEngineRegion, thread: LoopThread) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner = inner
        self._thread = thread

    @contextlib.contextmanager
    def cpu(
        self, offset: int = 0, nbytes: int | None = None, *, write: bool = False
    ) -> Iterator[memoryview]:
        """See orbit.EngineRegion.cpu."""
        access = self._inner.cpu(offset, nbytes, write=write)
        view = self._thread.call(access.__enter__)
        assert isinstance(view, memoryview)
        try:
            yield view
        finally:
            view.release()
            self._thread.call(lambda: access.__exit__(None, None, None))

    def unregister(self, timeout: float | None = None) -> None:  # type: ignore[override]  # blocks
        """See orbit.EngineRegion.unregister."""
        self._thread.call(lambda: self._inner.unregister(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.unregister()


@_twin_of(AsyncBatch)
class Batch(_Twin):
    """What `TransferEngine.submit` returns. `result` is what awaiting an orbit.Batch is."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> list[TransferResult]:
        """The results in the order of the requests; the first failure is raised, when all are over.
        Raises DeadlineExceeded when they are not in time; the requests go on.
        """
        if not self.wait(timeout):
            raise DeadlineExceeded("waiting for a batch", timeout or 0.0)
        found = self._thread.call(lambda: _awaited(self._inner))
        assert isinstance(found, list)
        return found


async def _awaited(batch: AsyncBatch) -> object:
    return await batch


@_twin_of(AsyncTransferEngine)
class TransferEngine(Live):
    """As orbit.TransferEngine, with `with` in place of `async with`, for any thread. `node` is an
    open orbit.sync.Node; without one it opens its own.
    """

    def __init__(self, config: EngineConfig | None = None, *, node: Node | None = None) -> None:
        config = config or EngineConfig()
        self._given = node is not None
        self._node = Node(config.node_config()) if node is None else node
        self._inner = AsyncTransferEngine(config, node=self._node._inner)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(lambda: self._inner.__aexit__(kind, error, trace))
        self._close_node()

    def open(self) -> None:
        """See orbit.TransferEngine.open."""
        if not self._given:
            self._node.open()
        try:
            self._call(self._inner.open)
        except BaseException:
            self._close_node()
            raise

    def close(self, timeout: float | None = None) -> None:
        """See orbit.TransferEngine.close."""
        if self._node._thread is not None:
            self._call(lambda: self._inner.close(timeout))
            self._close_node()

    @property
    def node(self) -> Node:
        """The node that it rides on."""
        return self._node

    def register(self, *arguments: Any, **named: Any) -> Any:
        """See orbit.TransferEngine.register."""
        thread = self._node._opened()
        with telling_site():
            found = thread.call(lambda: self._inner.register(*arguments, **named))
        if isinstance(found, list):
            return [EngineRegion(region, thread) for region in found]
        assert isinstance(found, AsyncEngineRegion)
        return EngineRegion(found, thread)

    def submit(self, *arguments: Any, **named: Any) -> Batch:
        """See orbit.TransferEngine.submit."""
        thread = self._node._opened()
        kept = thread.call(lambda: [self._inner.submit(*arguments, **named)])
        assert isinstance(kept, list)
        return Batch(kept[0], thread)

    def _call(self, function: Callable[[], object]) -> Any:
        return self._node._opened().call(function)

    def _close_node(self) -> None:
        if not self._given:
            self._node.close()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


_TWINS: Final[dict[type, type[_Twin]]] = {
    AsyncPinnedPayload: PinnedPayload,
    AsyncPinnedWriter: PinnedWriter,
    AsyncRegionGuard: RegionGuard,
    AsyncRegionWatch: RegionWatch,
    AsyncSendResult: SendResult,
    AsyncStreamInbox: StreamInbox,
    AsyncStreamSender: StreamSender,
}


def _twin_for(result: object, thread: LoopThread) -> object:
    if type(result) is tuple:
        return tuple(_twin_for(one, thread) for one in result)
    twin = _TWINS.get(type(result))
    return result if twin is None else twin(result, thread)


def _remember(node: Node) -> None:
    with _first_open:
        if not _open_nodes:
            atexit.unregister(_close_all)  # at most once, whatever opened and closed before
            atexit.register(_close_all)
        _open_nodes.add(node)


def _close_all() -> None:
    """At exit. One node's trouble does not keep the others open."""
    for node in list(_open_nodes):
        if node._thread is not None and not node._thread.forked:
            try:
                node.close()
            except OrbitError as error:
                _log.error("a node could not be closed at exit: %s", error)
