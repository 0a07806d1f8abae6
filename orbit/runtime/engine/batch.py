"""Several requests that were submitted together: waiting for them, giving them up, their results.

They run whether or not somebody waits. What one of them does is jobs.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence

from ...errors import OrbitError
from ..live import Live
from ..runner import TaskRunner
from .jobs import RequestJob
from .requests import TransferResult, TransferState
from .story import RequestExplanation


class Batch(Live):
    """Await it for the results in the order of the requests; the first failure is raised, when all
    are over. Cancelling who awaits it gives nothing up: `cancel` does.
    """

    _instead = "send its results"

    def __init__(
        self, jobs: Sequence[RequestJob], runner: TaskRunner, ended: Callable[[Batch], None]
    ) -> None:
        self._jobs = tuple(jobs)
        self._cancelled = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._running = {runner.spawn(job.run(), "transfer") for job in self._jobs}
        for task in self._running:
            task.add_done_callback(self._one_ended)
        if not self._running:
            self._over.set_result(None)
            ended(self)

    @property
    def done(self) -> bool:
        """Whether every request has its result."""
        return self._over.done()

    @property
    def running(self) -> int:
        """Requests that are not over."""
        return len(self._running)

    @property
    def nbytes(self) -> int:
        """Of the requests that have succeeded so far."""
        return sum(result.nbytes for result in self.results())

    def results(self) -> list[TransferResult]:
        """Of the requests that are over, in their order."""
        return [job.result for job in self._jobs if job.result is not None]

    def cancel(self) -> None:
        """Give up what is not over: nothing more is posted, and what is posted is drained. The
        results say which had succeeded before. Idempotent.
        """
        if not self._cancelled:
            self._cancelled = True
            for task in self._running:
                task.cancel()

    async def wait(self, timeout: float | None = None) -> bool:
        """Whether all are over, after at most `timeout` seconds. Raises nothing of theirs."""
        await asyncio.wait([self._over], timeout=timeout)
        return self.done

    def __await__(self) -> Generator[object, None, list[TransferResult]]:
        return self._all().__await__()

    def explanation(self) -> tuple[RequestExplanation, ...]:
        """How each request goes or went."""
        return tuple(job.explanation() for job in self._jobs)

    def explain(self) -> str:
        """The same, for people."""
        shown = [f"{n}. {story}" for n, story in enumerate(self.explanation(), 1)]
        return "\n".join(shown)

    def __repr__(self) -> str:
        return f"<Batch of {len(self._jobs)} requests, {len(self._running)} running>"

    # --- within -----------------------------------------------------------------------------------

    async def _all(self) -> list[TransferResult]:
        await asyncio.shield(self._over)
        results = self.results()
        for result in results:
            if result.state is not TransferState.SUCCEEDED and result.error is not None:
                raise _fresh(result.error)
        return results

    def _one_ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running and not self._over.done():
            self._over.set_result(None)
            self._ended(self)


def _fresh(error: OrbitError) -> OrbitError:
    """The same error, without the frames of those who raised it before."""
    return error.with_traceback(None)
