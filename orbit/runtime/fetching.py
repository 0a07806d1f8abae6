"""One fetch as a shell: carries out what the fetch machine decides, over one session.

It starts the calls and the pull, keeps the lease renewed while an RDMA pull runs, and feeds back
how each ended. The decisions (offer, fallback, who gets the lease) are the machine's.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import (
    BudgetExceeded,
    BusyError,
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerRefused,
    UnknownHandle,
    Unquiesced,
)
from ..events import FellBack as FellBackEvent
from ..events import MemoryRetained, PathDecided, Recorder, Side
from ..model import Handle, Lease, LeaseId, PathName, PathReason
from ..protocol import fetch as machine
from ..protocol.fetch import Fetch, FetchEffect, FetchInput, FetchPlan
from ..protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    LeaseRenewRequest,
    RdmaAnswer,
    RdmaOffer,
    ReadyAnswer,
)
from ..protocol.paths import BACKEND_VERBS, decide_offer
from ..transport.interface import Exposure, Progress, Session
from ..transport.timer import DeadlineTimer
from .paths import Paths
from .retained import retain
from .runner import TaskRunner
from .sinks import Sink

_log = logging.getLogger("orbit")

RENEWAL_FLOOR_S = 0.005  # a lease so short that it needs more is not worth having


@dataclass(frozen=True, slots=True)
class FetchContext:
    """What all fetches of a node share. `warn` is told each fallback, `lose` ends an epoch whose
    owner went dumb.
    """

    paths: Paths
    recorder: Recorder
    runner: TaskRunner
    inline_max_bytes: int
    warn: Callable[[Session, PathReason], None]
    lose: Callable[[Session, OrbitError], None]


class FetchRun:
    """One get from its first call to its lease. Await `outcome` once; it never leaves a lease
    behind.

    `deadline` is a loop time, `timeout_s` what it was made of.
    """

    def __init__(
        self,
        context: FetchContext,
        session: Session,
        handle: Handle,
        plan: FetchPlan,
        sink: Sink,
        progress: Progress | None,
        deadline: float | None,
        timeout_s: float,
    ) -> None:
        self._context = context
        self._session = session
        self._handle = handle
        self._sink = sink
        self._progress = progress
        self._machine = Fetch(plan, deadline, timeout_s)
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._on_deadline)
        self._result: asyncio.Future[Lease] = self._loop.create_future()
        self._pulling: asyncio.Task[None] | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._phases: dict[str, float] = {}
        # Until prepare has answered, what is known at hand; then what prepare said.
        self._why_no_offer = decide_offer(
            plan.transport, kill_switch=plan.kill_switch, rdma=plan.rdma
        )
        self._fell_back = False
        self._unproven = False  # the sink may still be written

    async def outcome(self, started: float) -> Lease:
        """The lease, with the bytes in the sink. `started` (perf_counter) is where the total phase
        begins.

        A caller that is cancelled gets its CancelledError only when nothing writes the sink any
        more.
        """
        self._timer.arm(self._machine.deadline)
        self._feed(machine.Begin())
        try:
            lease = await self._delivered()
        except BaseException:
            if not self._unproven:
                self._sink.discard()
            raise
        phases = {**self._phases, "total": time.perf_counter() - started}
        return replace(lease, phases=phases)

    async def _delivered(self) -> Lease:
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                lease = await asyncio.shield(self._result)
            except asyncio.CancelledError as error:
                cancelled = error
                self._feed(machine.Cancelled())
                continue
            except OrbitError as error:
                if cancelled is None:
                    raise
                raise cancelled from error
            if cancelled is None:
                return lease
            raise cancelled

    def peer_gone(self, error: OrbitError) -> None:
        """The session has ended."""
        self._feed(machine.PeerGone(error))

    def _feed(self, event: FetchInput) -> None:
        self._carry_out(self._machine.step(event, self._loop.time()))

    def _on_deadline(self) -> None:
        due = self._machine.deadline
        if due is not None:
            self._carry_out(self._machine.on_deadline(max(self._loop.time(), due)))

    def _carry_out(self, effects: Iterable[FetchEffect]) -> None:  # noqa: PLR0912 (one arm each)
        for effect in effects:
            match effect:
                case machine.Prepare():
                    self._context.runner.spawn(self._prepare(), "prepare")
                case machine.Acquire():
                    self._start_acquire(effect)
                case machine.Pull():
                    self._pulling = self._context.runner.spawn(self._pull(effect), "pull")
                case machine.Deliver(data):
                    self._sink.deliver(data)
                case machine.StartRenewal(lease_id, timeout_s):
                    self._renew_after(lease_id, max(timeout_s / 2, RENEWAL_FLOOR_S))
                case machine.StopRenewal():
                    self._stop_renewal()
                case machine.CancelPull():
                    if self._pulling is not None:
                        self._pulling.cancel()
                case machine.FellBack(reason):
                    self._note_fallback(reason)
                case machine.Detach(lease_id, transferred):
                    self._session.notify(DetachRequest(self._handle, lease_id, transferred))
                case machine.Finish():
                    self._finish(effect)
                case machine.Fail(error):
                    self._fail(error)
        if self._machine.ended:
            self._timer.arm(None)
            self._stop_renewal()

    async def _prepare(self) -> None:
        started = time.perf_counter()
        rdma = self._context.paths.by_name(PathName.RDMA)
        try:
            reason = await rdma.prepare(self._session)
        except (OrbitError, asyncio.CancelledError) as error:
            _log.debug("preparing RDMA to %s failed: %s", self._session.peer, error)
            reason = PathReason.CONNECT_FAILED
        self._phases["prepare"] = time.perf_counter() - started
        self._why_no_offer = reason
        if reason is not PathReason.OK:
            self._context.warn(self._session, reason)
        self._feed(machine.PathsReady(reason))

    def _start_acquire(self, effect: machine.Acquire) -> None:
        offer = RdmaOffer((BACKEND_VERBS,)) if effect.offer else None
        if offer is None and not self._fell_back:
            self._decided(PathName.TCP, self._why_no_offer)
        inline_max = self._context.inline_max_bytes if self._sink.takes_inline else 0
        request = AcquireRequest(self._handle, offer, inline_max, effect.skip_threshold)
        self._context.runner.spawn(self._acquire(request), "acquire")

    async def _acquire(self, request: AcquireRequest) -> None:
        # A task of its own: when the caller gives up, somebody must still learn of a granted lease.
        started = time.perf_counter()
        event: FetchInput
        try:
            event = machine.AcquireAnswered(await self._session.call(request, AcquireReply))
        except DeadlineExceeded as error:
            # A lease may be granted yet, and nobody will know of it: it has to end with its epoch.
            self._context.lose(self._session, error)
            event = machine.AcquireFailed(error)
        except OrbitError as error:
            event = machine.AcquireFailed(typed_refusal(error, self._handle))
        except asyncio.CancelledError:
            event = machine.AcquireFailed(ClosedError("node"))  # only shutdown cancels it
        elapsed = time.perf_counter() - started
        self._phases["acquire"] = self._phases.get("acquire", 0.0) + elapsed
        self._feed(event)

    async def _pull(self, effect: machine.Pull) -> None:
        self._feed(await self._pulled(effect))

    async def _pulled(self, effect: machine.Pull) -> FetchInput:
        try:
            await self._open_and_pull(effect)
        except Unquiesced as error:
            self._keep(error)
            return machine.PullFailed(PathReason.GET_FAILED, error)
        except (OrbitError, asyncio.CancelledError) as error:
            _drop_frames(error)
            return _pull_failed(error)
        except Exception as error:
            # A bug in a path proves nothing about its writers.
            _log.exception("a pull failed in a way that its contract does not know")
            unproven = Unquiesced("target of a pull", effect.total_bytes, repr(error))
            self._keep(unproven)
            return machine.PullFailed(PathReason.GET_FAILED, unproven)
        return machine.PullFinished()

    async def _open_and_pull(self, effect: machine.Pull) -> None:
        target = await self._sink.open(effect.total_bytes)
        path = self._context.paths.by_name(effect.path)
        started = time.perf_counter()
        report = await path.pull(
            self._session, _exposure(effect.answer), effect.lease_id, target, self._progress
        )
        self._phases["pull"] = time.perf_counter() - started
        self._phases.update(report.phases)

    def _keep(self, error: Unquiesced) -> None:
        self._unproven = True
        retain(error, self._sink)
        retained = MemoryRetained(error.what, error.retained_bytes, error.cause)
        self._context.recorder.record(retained)

    def _renew_after(self, lease_id: LeaseId, period_s: float) -> None:
        def renew() -> None:
            self._session.notify(LeaseRenewRequest(self._handle, lease_id))
            self._renew_after(lease_id, period_s)

        self._renewal = self._loop.call_later(period_s, renew)

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    def _note_fallback(self, reason: PathReason) -> None:
        self._fell_back = True
        self._decided(PathName.TCP, reason)
        peer = self._session.peer.worker_id
        self._context.recorder.record(FellBackEvent(peer, reason))
        self._context.warn(self._session, reason)

    def _finish(self, effect: machine.Finish) -> None:
        if effect.path is PathName.RDMA:
            self._decided(effect.path, effect.reason)
        lease = Lease(self._handle, effect.lease_id, effect.path, effect.reason, effect.total_bytes)
        self._result.set_result(lease)

    def _fail(self, error: OrbitError | None) -> None:
        if isinstance(error, PathUnavailable) and not error.detail:
            error = self._context.paths.unavailable(PathReason(error.reason))
        self._result.set_exception(error or ClosedError("the get"))
        self._result.exception()  # a cancelled caller does not look at it

    def _decided(self, path: PathName, reason: PathReason) -> None:
        self._context.recorder.record(PathDecided(Side.CONSUMER, path, reason))


def typed_refusal(error: OrbitError, handle: Handle) -> OrbitError:
    """An owner's refusal as the error that the same mistake raises locally."""
    if isinstance(error, PeerRefused):
        if error.reason == UnknownHandle.code:
            return UnknownHandle(str(handle))
        if error.reason == LeaseError.code:
            return LeaseError(error.detail or "the lease has ended")
    return error


def _pull_failed(error: OrbitError | asyncio.CancelledError) -> machine.PullFailed:
    match error:
        case PathFailed():
            return machine.PullFailed(PathReason(error.reason), error)
        case BudgetExceeded() | BusyError():  # no memory for the target
            return machine.PullFailed(PathReason.POOL_EXHAUSTED, error)
        case OrbitError():
            return machine.PullFailed(PathReason.GET_FAILED, error)
        case _:
            return machine.PullFailed(PathReason.GET_FAILED, ClosedError("the pull"))


def _drop_frames(error: BaseException) -> None:
    """Let go of what the frames of an ended pull hold: slices of the target. Else whoever keeps the
    error keeps the caller's buffer exported, which then cannot be resized or closed.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def deadline_error(timeout_s: float) -> DeadlineExceeded:
    """What a get that ran out of time raises, whatever it was doing."""
    return DeadlineExceeded("get", timeout_s)


def _exposure(answer: RdmaAnswer | ReadyAnswer) -> Exposure:
    if isinstance(answer, RdmaAnswer):
        return Exposure(descriptor=answer.descriptor, grant=answer.grant)
    return Exposure(transfer_id=answer.transfer_id)
