"""One get: the payload moves into a sink, and the caller gets the lease."""

from __future__ import annotations

import time
from typing import ClassVar

from ..model import Direction, Handle, Lease
from ..protocol import transfer as machine
from ..protocol.fetch import Fetch, FetchPlan
from ..protocol.messages import AcquireRequest, RdmaOffer
from ..transport.interface import DataPath, Progress, PullReport, Session
from .sinks import Sink
from .transferring import TransferContext, TransferRun, exposure_of


class FetchRun(TransferRun):
    """One get from its first call to its lease. Await `outcome` once; it never leaves a lease
    behind.

    `deadline` is a loop time, `timeout_s` what it was made of. `arrays`: see RdmaOffer.
    """

    direction: ClassVar[Direction] = Direction.READ

    def __init__(
        self,
        context: TransferContext,
        session: Session,
        handle: Handle,
        plan: FetchPlan,
        sink: Sink,
        progress: Progress | None,
        deadline: float | None,
        timeout_s: float,
        arrays: tuple[int, ...] = (),
    ) -> None:
        fetch = Fetch(plan, deadline, timeout_s)
        super().__init__(context, session, handle, fetch, plan, sink)
        self._sink = sink
        self._progress = progress
        self._arrays = arrays

    async def outcome(self, started: float) -> Lease:
        """The lease, with the bytes in the sink. `started` (perf_counter) is where the total phase
        begins. On any error the sink is discarded.
        """
        done = await self._run()
        phases = {**self._phases, "total": time.perf_counter() - started}
        return Lease(
            self._handle,
            done.lease_id,
            done.path,
            done.reason,
            done.total_bytes,
            phases,
            self._rails,
        )

    def _request(self, offer: RdmaOffer | None, *, skip_threshold: bool) -> AcquireRequest:
        inline_max = self._context.inline_max_bytes if self._sink.takes_inline else 0
        return AcquireRequest(
            self._handle, offer, inline_max, skip_threshold, self._context.lease_ms
        )

    async def _move_bytes(self, path: DataPath, effect: machine.Move) -> PullReport:
        target = await self._sink.open(effect.total_bytes)
        started = time.perf_counter()
        exposure = exposure_of(effect.answer)
        report = await path.pull(self._session, exposure, effect.lease_id, target, self._progress)
        self._phases["pull"] = time.perf_counter() - started
        return report

    def _deliver(self, data: bytes) -> None:
        self._sink.deliver(data)
