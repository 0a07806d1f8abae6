"""The serving half of a node's messaging, put together: handlers, health, idle links, the end.

`Serving` stands before there is a loop, so that handlers can be registered then; `attach` gives it
the messenger. What each part does is its own module's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

from ...errors import ClosedError, UsageError
from ...events import Counters
from .contract import Caller
from .directory import Directory
from .dispatch import Dispatcher, DispatchStatistics
from .draining import GracefulShutdown, ShutdownPolicy, Sweep
from .handlers import Dispatch
from .health import Health, HealthChecks, HealthKind
from .idle import IdleSweep
from .routes import Route

Function = TypeVar("Function", bound=Callable[..., Any])


class Serving:
    """`node` is what handlers find in `message.node`."""

    def __init__(self, node: object, counters: Counters) -> None:
        self.dispatcher = Dispatcher(node, counters)
        self._directory = Directory(self.dispatcher)
        self._caller: Caller | None = None
        self._health: HealthChecks | None = None
        self._idle: IdleSweep | None = None
        self._shutdown: GracefulShutdown | None = None

    def attach(
        self,
        caller: Caller,
        idle_close_s: float | None,
        streams_idle: Callable[[], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        sweep: Sweep | None = None,
    ) -> None:
        """The node is open. `streams_idle` waits until its streams end, `close` closes it, `sweep`
        gives its registered memory back before.
        """
        self._caller = caller
        self._health = HealthChecks(caller)
        self._idle = IdleSweep(caller, idle_close_s)
        dispatcher = self.dispatcher
        self._shutdown = GracefulShutdown(
            dispatcher.gate, streams_idle, dispatcher.drop, close, sweep
        )

    def link_opened(self, route: Route) -> None:
        """A message link is open, whoever opened it."""
        if self._health is not None and self._idle is not None and route.session is not None:
            self._health.link_opened(route.peer)
            self._idle.link_opened()

    # --- handlers ---------------------------------------------------------------------------------

    @overload
    def handler(
        self, name: str, function: None = None, *, mode: Dispatch | None = None, typed: bool = False
    ) -> Callable[[Function], Function]: ...

    @overload
    def handler(
        self, name: str, function: Function, *, mode: Dispatch | None = None, typed: bool = False
    ) -> Function: ...

    def handler(
        self,
        name: str,
        function: Function | None = None,
        *,
        mode: Dispatch | None = None,
        typed: bool = False,
    ) -> Function | Callable[[Function], Function]:
        """See Node.handler and Node.typed_handler."""

        def register(function: Function) -> Function:
            self.dispatcher.add(name, function, mode, typed=typed)
            return function

        return register if function is None else register(function)

    def remove_handler(self, name: str) -> None:
        """See Node.remove_handler."""
        self.dispatcher.remove(name)

    async def list_handlers(
        self, peer: object | None = None, timeout: float | None = None
    ) -> list[str]:
        """See Node.list_handlers."""
        if peer is None:
            return self.dispatcher.registry.names()
        return await self._directory.list_handlers(self._open(), peer, timeout)

    async def wait_for_handler(self, peer: object, name: str, timeout: float) -> None:
        """See Node.wait_for_handler."""
        await self._directory.wait_for_handler(self._open(), peer, name, _checked(timeout))

    # --- health and the end -----------------------------------------------------------------------

    async def check_health(self, peer: object, timeout: float) -> Health:
        """See Node.check_health."""
        _checked(timeout)
        if self._health is None:
            return Health(HealthKind.NOT_STARTED)
        return await self._health.check(peer, timeout)

    def begin_drain(self) -> None:
        """See Node.begin_drain."""
        self.dispatcher.gate.shut()

    async def graceful_shutdown(self, policy: ShutdownPolicy) -> None:
        """See Node.graceful_shutdown."""
        if not isinstance(policy, ShutdownPolicy):
            raise UsageError(
                f"not a shutdown policy: {policy!r}", hint="for example ShutdownPolicy.timeout(5)"
            )
        self.dispatcher.gate.shut()
        if self._shutdown is not None:
            await self._shutdown.run(policy)

    async def close(self, timeout_s: float) -> bool:
        """No new request; what is queued or runs is given up. False: a handler ignores that."""
        if self._idle is not None:
            self._idle.close()
        self._caller = self._health = None
        return await self.dispatcher.close(timeout_s)

    def statistics(self) -> DispatchStatistics:
        return self.dispatcher.statistics()

    def _open(self) -> Caller:
        if self._caller is None:
            raise ClosedError("the node")
        return self._caller


def _checked(timeout: float) -> float:
    if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0")
    return timeout
