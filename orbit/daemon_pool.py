"""Threads for calls that block, which neither keep the process nor end before it does.

Those of `concurrent.futures` are joined when the main thread ends, so one busy call keeps the
process, and take nothing on from then on, so what is still open could not be closed in order.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Work = tuple["Future[Any]", Callable[[], Any]]


class DaemonPool(Executor):
    """At most `threads_max` threads, started when needed. It ends with `shutdown`, or when nobody
    refers to it any more.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max: Final = threads_max
        self._name = name
        self._lock = threading.Lock()
        self._works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that will take the next work at once
        self._threads: list[threading.Thread] = []
        self._closed = False
        # A None ends one thread, which hands it on to the next.
        weakref.finalize(self, self._works.put, None).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run it in a thread. Raises RuntimeError after `shutdown`."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: this pool is shut down")
            future: Future[T] = Future()
            self._works.put((future, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._threads_max:
                self._start()
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Idle threads end now, a busy one after its call and what was submitted before."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_waiting()
            self._works.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        arguments = self._works, self._idle
        thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _cancel_waiting(self) -> None:
        while True:
            try:
                work = self._works.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                work[0].cancel()


def _serve(works: queue.SimpleQueue[_Work | None], idle: threading.Semaphore) -> None:
    """Knows nothing of the pool, so that this can go while its threads wait."""
    while True:
        work = works.get()
        if work is None:
            works.put(None)
            return
        future, function = work
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        del work, future, function  # nothing of a call is kept by a thread that waits
        result = None
        idle.release()
