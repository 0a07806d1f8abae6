"""An event loop in a thread of its own, and blocking calls into it from other threads.

Whoever waits comes back to Python at least every 100 ms, so that signals are served. It knows
nothing about what runs in the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Final

from .errors import ClosedError, UsageError

_log = logging.getLogger("orbit")

LOOK_UP_S: Final = 0.1  # a waiting thread returns to Python that often
_CANCELLED_S: Final = 1.0  # for what still runs when the loop is stopped


class LoopThread:
    """Runs until `stop`. `name` is what its callers think they talk to."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Future[object], asyncio.Task[object]] = {}
        self._leaving: dict[Future[object], BaseException] = {}  # what interrupts whom
        self._stopped = False
        # A daemon, so that a forgotten node does not keep the process; see orbit.sync for the end.
        self._thread = threading.Thread(target=self._run, name=f"orbit {name}", daemon=True)
        self._thread.start()

    @property
    def forked(self) -> bool:
        """This process is a fork of the one that the thread runs in: there is no thread here."""
        return os.getpid() != self._process

    def call(self, function: Callable[[], object], timeout_s: float | None = None) -> object:
        """Run `function` on the loop and wait for its result, or for what it awaits to. The context
        of the caller (contextvars) goes with it.

        An interrupt cancels what was begun and waits for it to end, as its buffers are in use until
        then; a second one does not wait. Raises ClosedError, and TimeoutError after `timeout_s`:
        what was begun goes on. What a callback in the loop raises to end the program (sys.exit)
        interrupts whoever waits, and is raised here.
        """
        self.check_caller()
        future: Future[object] = Future()
        context = contextvars.copy_context()
        try:
            self._post(self._begin, future, function, context)
            return self._wait(future, timeout_s)
        except KeyboardInterrupt:
            if not future.done():
                self._post(self._cancel, future)
                self._wait_ended(future)
            raise

    def check_caller(self) -> None:
        """Whether this thread may call. Raises ClosedError, UsageError."""
        if self.forked:
            raise ClosedError(f"the {self._name} (this process is a fork of the one it is in)")
        if threading.current_thread() is self._thread:
            raise UsageError(
                f"the {self._name}'s own thread would wait for itself",
                hint="async handlers and callbacks run there: await the node in message.node",
            )

    def stop(self) -> None:
        """End the loop and its thread; what still runs is cancelled. Idempotent."""
        if self.forked or not self._thread.is_alive():
            return
        self._stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed
            raise ClosedError(f"the {self._name}") from None

    # --- waiting ----------------------------------------------------------------------------------

    def _wait(self, future: Future[object], timeout_s: float | None) -> object:
        waited_s = 0.0
        while True:
            step_s = LOOK_UP_S if timeout_s is None else min(LOOK_UP_S, timeout_s - waited_s)
            try:
                return future.result(max(step_s, 0))
            except TimeoutError:
                if future.done():  # its own error is a timeout, or it came just now
                    return future.result()
            except CancelledError:
                raise ClosedError(f"the {self._name}") from None
            if not self._thread.is_alive():
                raise ClosedError(f"the {self._name}")
            waited_s += step_s
            if timeout_s is not None and waited_s >= timeout_s:
                raise TimeoutError

    def _wait_ended(self, future: Future[object]) -> None:
        while not future.done() and self._thread.is_alive():
            try:
                future.exception(LOOK_UP_S)
            except (TimeoutError, CancelledError):
                continue

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not (self._ran_to_its_end() or self._stopped):
                pass
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:  # one that ignores its cancellation dies with the loop
                self._loop.run_until_complete(asyncio.wait(left, timeout=_CANCELLED_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _ran_to_its_end(self) -> bool:
        """False: what a callback raised has to reach those who wait; the loop is needed on, since
        what they began, and what is still open, can only end in it.
        """
        try:
            self._loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            if not self._tasks:
                _log.error("%r in the %s's own thread: nobody waits", error, self._name)
            self._leaving.update(dict.fromkeys(self._tasks, error))
            for task in self._tasks.values():
                task.cancel()
            return False
        return True

    def _begin(
        self, future: Future[object], function: Callable[[], object], context: contextvars.Context
    ) -> None:
        if future.cancelled():
            return
        try:
            result = context.run(function)
        except BaseException as error:
            future.set_exception(error)
            return
        if not inspect.isawaitable(result):
            future.set_result(result)
            return
        task = self._loop.create_task(_outcome(result), context=context)
        self._tasks[future] = task
        task.add_done_callback(functools.partial(self._ended, future))

    def _cancel(self, future: Future[object]) -> None:
        task = self._tasks.get(future)
        if task is not None:
            task.cancel()
        else:  # interrupted before it was posted
            future.cancel()

    def _ended(self, future: Future[object], task: asyncio.Task[object]) -> None:
        del self._tasks[future]
        leaving = self._leaving.pop(future, None)
        if task.cancelled() and leaving is not None:
            future.set_exception(leaving)
        elif task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())


async def _outcome(awaitable: Awaitable[object]) -> object:
    return await awaitable
