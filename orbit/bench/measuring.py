"""The operations of one size, on the clock: warm-up, workers, the end, and the row that it gives.

Bytes are compared and payloads made between a worker's operations. With one operation at a time
neither latencies nor rates contain that. With several, all workers share one event loop, and one
that compares or makes much holds up the others: the price of `--verify full`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..errors import OrbitError
from .aside import Aside
from .endings import Mismatch, Tally
from .plan import Plan, Verify
from .report import Source
from .workloads.shape import Bench, Workload

_TELL_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one size is: `done` from 0 to 1."""

    size: int
    source: Source
    done: float
    bytes_per_s: float


ProgressSink = Callable[[Progress], None]


class Measuring:
    """`plan`'s operations of one size. `warm_up`, then `run`."""

    def __init__(
        self,
        plan: Plan,
        bench: Bench,
        workload: Workload,
        tell: ProgressSink,
    ) -> None:
        self._path_text = bench.end.path_text
        self._plan = plan
        self._bench = bench
        self._size = bench.size
        self._workload = workload
        self._tell = tell
        self._told_at = 0.0
        self.aside = Aside()
        self._turns = [itertools.count(1) for _ in range(plan.inflight)]

    async def warm_up(self) -> Tally:
        """Operations that are not counted, of every worker where there are any: what is set up by
        a first one is then there. Raises the error of one that failed.
        """
        tally = Tally(self._path_text)
        limit = max(self._plan.warmup, self._plan.inflight) if self._plan.warmup else 0
        await self._operations(tally, limit, math.inf, patient=False)
        return tally

    async def run(self) -> Tally:
        """Raises what means that no operation can succeed any more, Unquiesced apart."""
        tally = Tally(self._path_text)
        until = time.perf_counter() + (self._plan.duration or math.inf)
        limit = self._plan.iterations or math.inf
        await self._operations(tally, limit, until, patient=True)
        return tally

    async def _operations(self, tally: Tally, limit: float, until: float, *, patient: bool) -> None:
        begun, began = itertools.count(), time.perf_counter()

        async def work(worker: int) -> None:
            while not tally.problem and time.perf_counter() < until and next(begun) < limit:
                try:
                    await self._operation(worker, tally)
                except OrbitError as error:
                    if not patient:
                        raise
                    tally.failed(error)
                if patient:
                    self._tell_progress(tally, limit, began, until)

        workers = [asyncio.ensure_future(work(n)) for n in range(self._plan.inflight)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _operation(self, worker: int, tally: Tally) -> None:
        turn = next(self._turns[worker])
        nbytes = self._plan.batch * self._size
        await self.aside.run(nbytes, self._workload.ready, worker, turn)
        started = time.perf_counter()
        tally.clock.begin(started)
        try:
            items = await self._workload.operate(worker, turn)
        finally:
            ended = time.perf_counter()
            tally.clock.end(ended)
        tally.succeeded(ended - started, items)
        if self._plan.verify is Verify.OFF:
            return
        if self._workload.checks_here:
            mismatch = await self.aside.run(nbytes, self._workload.differs, worker, turn)
        else:
            mismatch = await self._bench.checked_there(worker, turn)
        if mismatch is None:
            tally.verified += 1
        elif not tally.problem:
            tally.problem = self._differs(worker, turn, mismatch)

    def _differs(self, worker: int, turn: int, mismatch: Mismatch) -> str:
        return (
            f"bytes differ: {self._plan.verb} of {self._size} bytes, operation {turn} of worker"
            f" {worker}, item {mismatch.item}, byte {mismatch.byte}"
        )

    def _tell_progress(self, tally: Tally, limit: float, began: float, until: float) -> None:
        now = time.perf_counter()
        if now < self._told_at + _TELL_EVERY_S:
            return
        self._told_at = now
        done = (tally.ops + tally.errors) / limit
        if until < math.inf:
            done = (now - began) / (until - began)
        seconds = tally.clock.seconds(now)
        nbytes = tally.ops * self._plan.batch * self._size
        rate = nbytes / seconds if seconds > 0 else 0.0
        self._tell(Progress(self._size, Source.ORBIT, min(done, 1.0), rate))
