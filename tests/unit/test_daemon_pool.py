"""Threads that neither keep the process nor end before it does."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import CancelledError, Future

import pytest

from orbit.daemon_pool import DaemonPool

NAME = "pool of this test"
HANG_S = 20.0


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def end_of(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()


def blocked(pool: DaemonPool, count: int) -> tuple[threading.Event, list[Future[object]]]:
    """As many threads are in a call, until the event."""
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def wait() -> bool:
        begun.release()
        return go_on.wait(HANG_S)

    futures: list[Future[object]] = [pool.submit(wait) for _ in range(count)]
    for _ in range(count):
        assert begun.acquire(timeout=HANG_S)
    return go_on, futures


def test_results_errors_and_names() -> None:
    pool = DaemonPool(2, NAME)
    assert pool.submit(divmod, 7, 3).result(HANG_S) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(HANG_S)
    with pytest.raises(SystemExit):
        pool.submit(lambda: (_ for _ in ()).throw(SystemExit(1))).result(HANG_S)
    assert all(thread.daemon for thread in running())
    pool.shutdown()
    assert not running()


def test_threads_start_when_they_are_needed_and_no_more_than_allowed() -> None:
    pool = DaemonPool(3, NAME)
    for _ in range(5):
        pool.submit(int).result(HANG_S)
    assert 1 <= len(running()) <= 3
    go_on, futures = blocked(pool, 3)
    late = pool.submit(int)
    assert len(running()) == 3
    assert not late.done()
    go_on.set()
    assert [future.result(HANG_S) for future in (*futures, late)] == [True, True, True, 0]
    pool.shutdown()


def test_a_shutdown_lets_finish_what_was_submitted_or_cancels_it() -> None:
    for cancel in (False, True):
        pool = DaemonPool(1, NAME)
        go_on, (future,) = blocked(pool, 1)
        late = pool.submit(int)
        pool.shutdown(wait=False, cancel_futures=cancel)
        with pytest.raises(RuntimeError, match="shut down"):
            pool.submit(int)
        go_on.set()
        assert future.result(HANG_S) is True
        if cancel:
            with pytest.raises(CancelledError):
                late.result(HANG_S)
        else:
            assert late.result(HANG_S) == 0
        end_of(running())


def test_a_pool_that_nobody_refers_to_ends() -> None:
    pool = DaemonPool(2, NAME)
    go_on, _ = blocked(pool, 2)
    threads = running()
    del pool
    gc.collect()
    go_on.set()
    end_of(threads)
