"""What a node's user registers to be called by peers: the function, its name and how it is run.

Names are checked here; names with a leading underscore are orbit's own. How a handler is run is
dispatch's, what its messages look like on the wire is the messenger's.
"""

from __future__ import annotations

import asyncio
import inspect
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ...errors import UsageError
from ...events import DURATION_BOUNDS_S
from ...model import PeerIdentity
from ...protocol.messaging.call_header import pack_name
from ..live import Live

RESERVED_PREFIX: Final = "_"


@dataclass(slots=True, eq=False)  # frozen would triple the cost of making one
class Message(Live):
    """What a handler is called with. `payload` is read-only and the receiver's own memory; it may
    be kept. `node` is the node that received it: a handler may send and call through it.
    """

    _instead = "send bytes(message.payload)"

    name: str
    payload: memoryview
    headers: Mapping[str, str]
    sender: PeerIdentity
    node: Any  # an orbit.Node; in a plain handler of orbit.sync.Node that one


class Overflow(StrEnum):
    """What a full lane does with one more message."""

    WARN = "warn"  # takes it, and says so in the log
    REJECT = "reject"  # answers RequestFailed("overflow")


LaneKey = Callable[[Message], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedConfig:
    """Lanes: messages of one key are handled one after another, in the order of their arrival.

    A key function runs on arrival, when the payload of a large message is still with its sender:
    it sees an empty one. The key is best taken from the headers or the sender.
    """

    key: LaneKey | None = None  # None: the sender's worker id
    max_concurrent: int | None = None  # handlers that run at once, over all lanes
    max_queue_depth: int | None = None  # of one lane, with the message that is being handled
    overflow: Overflow | str = Overflow.WARN
    idle_lane_ttl_s: float = 30.0  # a lane without work is forgotten after this

    def __post_init__(self) -> None:
        for knob in ("max_concurrent", "max_queue_depth"):
            value = getattr(self, knob)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{knob}={value!r} is not a whole number above 0")
        if not 0 < self.idle_lane_ttl_s < float("inf"):
            raise UsageError(f"idle_lane_ttl_s={self.idle_lane_ttl_s!r} is not above 0 seconds")
        try:
            object.__setattr__(self, "overflow", Overflow(self.overflow))
        except ValueError:
            accepted = ", ".join(Overflow)
            raise UsageError(f"overflow={self.overflow!r} is none of {accepted}") from None
        if self.key is not None and not callable(self.key):
            raise UsageError(f"key={self.key!r} is not a function of the message")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How the messages of one handler are run."""

    lanes: OrderedConfig | None = None  # None: each on its own
    mode: str = "spawn"

    @classmethod
    def spawn(cls) -> Dispatch:
        """A task for each message, with no order among them. A plain function runs at once, in the
        order of arrival.
        """
        return cls()

    @classmethod
    def ordered(cls) -> Dispatch:
        """One after another for each sender, senders beside each other."""
        return cls(OrderedConfig(), "ordered")

    @classmethod
    def ordered_global(cls) -> Dispatch:
        """One after another, whoever sent them."""
        return cls(OrderedConfig(key=_one_lane), "ordered_global")

    @classmethod
    def ordered_with(cls, config: OrderedConfig) -> Dispatch:
        """Lanes by a key of the message, with bounds."""
        return cls(config, "ordered_with")


def _one_lane(message: Message) -> Hashable:
    return None


@dataclass(slots=True)
class HandlerCounts:
    """Kept by the dispatcher, for one handler name."""

    requests: int = 0
    failures: int = 0
    rejected: int = 0  # its lane was full
    in_flight: int = 0
    request_bytes: int = 0
    response_bytes: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))

    def finished(self, seconds: float) -> None:
        """One run of the handler is over."""
        self.seconds += seconds
        self.buckets[bisect_left(DURATION_BOUNDS_S, seconds)] += 1


class Handler:
    """One registered function. `typed`: it takes and gives values, not bytes."""

    __slots__ = ("counts", "dispatch", "function", "is_async", "name", "task_name", "typed")

    def __init__(
        self, name: str, function: Callable[..., object], dispatch: Dispatch, *, typed: bool
    ) -> None:
        self.name = name
        self.task_name = f"orbit handler {name}"
        self.function = function
        self.dispatch = dispatch
        self.typed = typed
        self.is_async = is_async_function(function)
        self.counts = HandlerCounts()


def is_async_function(function: Callable[..., object]) -> bool:
    """Whether calling it gives a coroutine: async functions, partials of them, and objects whose
    `__call__` is one.
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (its kind is asked, not its presence)
    )


class HandlerRegistry:
    """Handlers by name. Replacing one takes a removal first: no name is lost by accident."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self.find = self._handlers.get  # None: nobody has registered it
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._handlers.values()))

    def add(
        self,
        name: str,
        function: Callable[..., object],
        dispatch: Dispatch | None = None,
        *,
        typed: bool = False,
        reserved: bool = False,
    ) -> Handler:
        """Raises UsageError: a bad, reserved or taken name, or what cannot be called."""
        check_name(name, reserved=reserved)
        if not callable(function):
            raise UsageError(f"the handler of {name!r} cannot be called: {function!r}")
        if dispatch is not None and not isinstance(dispatch, Dispatch):
            raise UsageError(
                f"not a dispatch mode: {dispatch!r}", hint="for example Dispatch.ordered()"
            )
        if name in self._handlers:
            raise UsageError(
                f"a handler is registered under {name!r}", hint="remove_handler takes it away"
            )
        handler = Handler(name, function, dispatch or Dispatch.spawn(), typed=typed)
        self._handlers[name] = handler
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)
        return handler

    async def wait(self, name: str) -> None:
        """Until a handler of that name is registered."""
        if name in self._handlers:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(name, set()).add(waiter)
        try:
            await waiter
        finally:
            waiters = self._waiters.get(name, set())
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(name, None)

    def remove(self, name: str) -> Handler:
        """Raises UsageError for a name that is not registered, or is orbit's own."""
        check_name(name)
        handler = self._handlers.pop(name, None)
        if handler is None:
            raise UsageError(f"no handler is registered under {name!r}")
        return handler

    def names(self) -> list[str]:
        """Those of the user, sorted."""
        return sorted(n for n in self._handlers if not n.startswith(RESERVED_PREFIX))


def check_name(name: str, *, reserved: bool = False) -> None:
    """Raises UsageError. `reserved`: the name is one of orbit's own."""
    pack_name(name)
    if name.startswith(RESERVED_PREFIX) != reserved:
        raise UsageError(
            f"handler name {name!r}: a leading {RESERVED_PREFIX!r} marks orbit's own names"
        )
