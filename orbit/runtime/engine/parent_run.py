"""One parent as a shell: what a transfer run does, with the rails that the requester has planned,
and an end of its own.

It goes on until nothing of it reaches local memory and the source has answered; `settled` is when
its engine need not wait any longer, because it is over or its teardown window is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ...errors import (
    ClosedError,
    DeadlineExceeded,
    InternalError,
    OrbitError,
    PathUnavailable,
)
from ...model import Direction, Handle, LeaseId, PathReason
from ...protocol import transfer as machine
from ...protocol.messages import AcquireRequest, RdmaOffer, SliceRun
from ...protocol.parent import ParentMachine, ParentPlan
from ...protocol.paths import BACKEND_VERBS
from ...protocol.transfer import TransferEffect
from ...transport.begun import Begun, begin
from ...transport.copying import copy_now
from ...transport.interface import DataPath, PullReport, Session, Span, Target
from ...transport.timer import DeadlineTimer
from ..transferring import Held, TransferContext, TransferRun, exposure_of

_GIVEN_UP = (
    machine.TransferState.STOPPING,
    machine.TransferState.RETURNING,
    machine.TransferState.ABANDONING,
)


class Ends(Held, Protocol):
    """The local end: memory of the region, or a private copy of it."""

    target: Target
    span: Span


@dataclass(frozen=True, slots=True)
class ParentWish:
    """What moves. `ranges`: of the remote region as `AcquireRequest.ranges` has them, or empty: the
    `nbytes` from `offset` on. `deadline` is a loop time and `timeout_s` what it was made of;
    `teardown_s`: how long its end is waited for.
    """

    handle: Handle
    plan: ParentPlan
    offset: int
    ranges: bytes
    deadline: float | None
    timeout_s: float
    teardown_s: float


Connect = Callable[[], Awaitable[Sequence[SliceRun]]]


class ParentRun(TransferRun):
    """`start` once, then wait for `settled` (and `over`). `connect` puts the runs on arrays."""

    confirm: ClassVar[bool] = True

    def __init__(
        self,
        context: TransferContext,
        session: Session,
        wish: ParentWish,
        memory: Ends,
        connect: Connect,
    ) -> None:
        parent = ParentMachine(wish.plan, wish.deadline, wish.timeout_s)
        super().__init__(context, session, wish.handle, parent, wish.plan, memory)
        self._wish = wish
        self._ends = memory
        self._connect = connect
        self._runs: tuple[SliceRun, ...] = ()
        self._preparing: asyncio.Task[tuple[SliceRun, ...]] | None = None
        self._refused: OrbitError | None = None  # why there are no arrays
        # Nothing of it reaches local memory, unless `unproven`, and no answer is due.
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self._teardown = DeadlineTimer(self._out_of_time)

    @property
    def unproven(self) -> bool:
        """Local memory may be reached for ever, as far as anybody can prove."""
        return self._unproven

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by name, so far."""
        return dict(self._phases)

    def start(self) -> None:
        """Begin now."""
        self._timer.arm(self._machine.deadline)
        self._feed(machine.Begin())
        self._memory.watch(lambda error: self._feed(machine.Stopped(error)))

    def cancel(self) -> None:
        """Post no more; what is posted is drained. Nothing once it is over."""
        self._feed(machine.Cancelled())

    def failure(self) -> OrbitError | None:
        """Why it failed; None when it has succeeded. While it is neither over nor known to have
        failed: that its end is late.
        """
        if not self._result.done():
            return DeadlineExceeded("the end of a transfer", self._wish.teardown_s)
        error = self._result.exception()
        return error if isinstance(error, OrbitError) else None

    # --- what a transfer run asks -----------------------------------------------------------------

    def _carry_out(self, effects: Iterable[TransferEffect]) -> None:
        super()._carry_out(effects)
        if self._machine.ended:
            self._end_if_over()
        elif self._machine.state in _GIVEN_UP and not self._teardown.armed:
            self._teardown.arm(self._loop.time() + self._wish.teardown_s)

    async def _prepare(self) -> None:
        started = time.perf_counter()
        reason = PathReason.OK
        try:
            rest = begin(self._connected())
            if isinstance(rest, Begun):
                # A task of its own, that can be given up alone: this one began within another.
                rest = await self._in_task(rest)
            self._runs = rest
        except PathUnavailable as error:
            self._refused, reason = error, PathReason(error.reason)
        except (OrbitError, asyncio.CancelledError) as error:
            known = error if isinstance(error, OrbitError) else ClosedError("the transfer")
            self._refused, reason = known, PathReason.CONNECT_FAILED
        self._add_phase("connect", started)
        self._why_no_offer = reason
        self._feed(machine.PathsReady(reason))

    async def _in_task(self, rest: Begun[tuple[SliceRun, ...]]) -> tuple[SliceRun, ...]:
        work = self._preparing = self._loop.create_task(rest)
        try:
            return await work
        finally:
            self._preparing = None

    async def _connected(self) -> tuple[SliceRun, ...]:
        return tuple(await self._connect())

    def _start_acquire(self, effect: machine.Acquire) -> None:
        offer = None
        if effect.offer:
            offer = RdmaOffer((BACKEND_VERBS,), pieces_max=machine.PIECES_MAX, runs=self._runs)
        request = self._request(offer, skip_threshold=effect.skip_threshold)
        self._context.runner.start(self._acquire(request), "acquire")

    def _request(self, offer: RdmaOffer | None, *, skip_threshold: bool) -> AcquireRequest:
        wish, plan = self._wish, self._wish.plan
        reads = plan.direction is Direction.READ
        return AcquireRequest(
            wish.handle,
            offer,
            inline_max=self._context.inline_max_bytes if reads and offer is None else 0,
            skip_threshold=skip_threshold,
            lease_ms=self._context.lease_ms,
            direction=int(plan.direction),
            offset=wish.offset,
            nbytes=plan.nbytes,
            ranged=True,
            ranges=wish.ranges,
        )

    def _deliver(self, data: bytes) -> None:
        copy_now(Span(memoryview(data)), self._ends.target)

    def _fail(self, error: OrbitError | None) -> None:
        if isinstance(error, PathUnavailable) and self._refused is not None:
            error = self._refused
        super()._fail(error)

    # --- its end ----------------------------------------------------------------------------------

    def _end_if_over(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()  # what it waits for goes on for who else wants it
            return
        self._teardown.arm(None)
        for future in (self.over, self.settled):
            if not future.done():
                future.set_result(None)

    def _out_of_time(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


class ReadRun(ParentRun):
    """The remote ranges into the local ones."""

    direction: ClassVar[Direction] = Direction.READ

    async def _move_bytes(self, path: DataPath, effect: machine.Move) -> PullReport:
        started = time.perf_counter()
        exposure, target = exposure_of(effect.answer), self._ends.target
        report = await path.pull(self._session, exposure, LeaseId(effect.lease_id), target)
        self._phases["move"] = time.perf_counter() - started
        return report


class WriteRun(ParentRun):
    """The local ranges into the remote ones."""

    direction: ClassVar[Direction] = Direction.WRITE

    async def _move_bytes(self, path: DataPath, effect: machine.Move) -> PullReport:
        started = time.perf_counter()
        exposure, span = exposure_of(effect.answer), self._ends.span
        report = await path.push(self._session, exposure, LeaseId(effect.lease_id), span)
        self._phases["move"] = time.perf_counter() - started
        return report

    def _deliver(self, data: bytes) -> None:
        raise InternalError("the source of a write sent bytes")
