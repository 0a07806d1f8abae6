"""Several pieces of work at a time, all or nothing. It knows nothing of handles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def gather_all(
    count: int,
    concurrency: int,
    work: Callable[[int], Awaitable[T]],
    undo: Callable[[T], None],
) -> list[T]:
    """`work(0)` to `work(count - 1)`, at most `concurrency` at a time; results in that order.

    On the first error, or when the caller is cancelled, the others are cancelled and waited for,
    `undo` is called with each result that there is, and the error is raised.
    """
    results: dict[int, T] = {}
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            results[number] = await work(number)

    loop = asyncio.get_running_loop()
    workers = [loop.create_task(worker()) for _ in range(min(concurrency, count))]
    try:
        if workers:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    except BaseException as error:
        raise await _given_up(workers, error) from None
    else:
        return [results[number] for number in range(count)]
    finally:
        if len(results) < count:
            for result in results.values():
                undo(result)


async def _given_up(workers: list[asyncio.Task[None]], error: BaseException) -> BaseException:
    """Returns what to raise when every worker has ended, however often the caller is cancelled."""
    for task in workers:
        task.cancel()
    while pending := [task for task in workers if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as cancelled:
            error = cancelled
    for task in workers:
        if not task.cancelled():
            task.exception()  # one of them is told; nobody has to hear of the others
    return error
