"""One put: the caller's bytes move into the owner's destination."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar

from ..errors import InternalError
from ..model import Direction, Handle
from ..protocol import transfer as machine
from ..protocol.messages import AcquireRequest, RdmaOffer
from ..protocol.put import PutMachine, PutPlan
from ..transport.interface import DataPath, Progress, PullReport, Session
from .borrowed import Borrowed
from .options import Put
from .transferring import TransferContext, TransferRun, exposure_of


class PutRun(TransferRun):
    """One put from its first call to the owner's word that the bytes are in place. Await `outcome`
    once; it never leaves a lease behind.

    `offset` is the first byte written; `deadline` a loop time, `timeout_s` what it was made of.
    """

    direction: ClassVar[Direction] = Direction.WRITE

    def __init__(
        self,
        context: TransferContext,
        session: Session,
        handle: Handle,
        plan: PutPlan,
        source: Borrowed,
        offset: int,
        progress: Progress | None,
        deadline: float | None,
        timeout_s: float,
    ) -> None:
        put = PutMachine(plan, deadline, timeout_s)
        super().__init__(context, session, handle, put, plan, source)
        self._source = source
        self._nbytes = plan.nbytes
        self._offset = offset
        self._progress = progress

    async def outcome(self, before: Mapping[str, float], started: float) -> Put:
        """The put, with the bytes in place. `before` are phases that came before, `started`
        (perf_counter) is where the total phase begins. The source is given back in any case.
        """
        done = await self._run()
        self._source.give_back()
        phases = {**before, **self._phases, "total": time.perf_counter() - started}
        return Put(
            self._handle,
            self._session.peer.worker_id,
            done.path,
            done.reason,
            self._offset,
            done.total_bytes,
            phases,
            self._rails,
        )

    def _request(self, offer: RdmaOffer | None, *, skip_threshold: bool) -> AcquireRequest:
        return AcquireRequest(
            self._handle,
            offer,
            skip_threshold=skip_threshold,
            lease_ms=self._context.lease_ms,
            direction=int(Direction.WRITE),
            offset=self._offset,
            nbytes=self._nbytes,
        )

    async def _move_bytes(self, path: DataPath, effect: machine.Move) -> PullReport:
        started = time.perf_counter()
        exposure, span = exposure_of(effect.answer), self._source.span
        report = await path.push(self._session, exposure, effect.lease_id, span, self._progress)
        self._phases["push"] = time.perf_counter() - started
        return report

    def _deliver(self, data: bytes) -> None:
        raise InternalError("the owner of a destination sent bytes")
