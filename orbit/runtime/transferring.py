"""One transfer as a shell: carries out what its machine decides, over one session.

It starts the calls and the move, keeps the lease renewed while the move runs, and feeds back how
each ended. The decisions (offer, fallback, who gives the lease back) are the machine's; which bytes
move where is for `fetching` and `putting` to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..errors import (
    BudgetExceeded,
    BusyError,
    ClosedError,
    DeadlineExceeded,
    LeaseError,
    OrbitError,
    OutOfRange,
    PathFailed,
    PathUnavailable,
    PeerRefused,
    RangeBusy,
    UnknownHandle,
    Unquiesced,
    UsageError,
    WrongDirection,
)
from ..events import FellBack, MemoryRetained, PathDecided, Recorder, Side
from ..model import Direction, Handle, LeaseId, PathName, PathReason
from ..protocol import transfer as machine
from ..protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    EndReply,
    LeaseRenewRequest,
    RdmaAnswer,
    RdmaOffer,
    ReadyAnswer,
    ReleaseRequest,
)
from ..protocol.paths import BACKEND_VERBS, decide_offer, refusal_of
from ..protocol.transfer import Transfer, TransferEffect, TransferInput, TransferPlan
from ..transport.interface import DataPath, Exposure, PullReport, Session
from ..transport.timer import DeadlineTimer
from .paths import Paths
from .retained import retain
from .runner import TaskRunner

_log = logging.getLogger("orbit")

# Somebody wanted TCP. Every other reason is something that is missing, and worth a warning.
_CHOSEN = (PathReason.ASKED, PathReason.KILL_SWITCH, PathReason.NOT_CONFIGURED)

_RANGE_BUSY = "the range is in use by "  # as RangeBusy begins
RENEWAL_FLOOR_S = 0.005  # a lease so short that it needs more is not worth having


@dataclass(frozen=True, slots=True)
class TransferContext:
    """What all transfers of a node share. `lease_ms`: how long a lease may live without a renewal.
    `warn` is told each fallback, `lose` ends an epoch whose owner went dumb.
    """

    paths: Paths
    recorder: Recorder
    runner: TaskRunner
    inline_max_bytes: int
    lease_ms: int
    warn: Callable[[Session, PathReason], None]
    lose: Callable[[Session, OrbitError], None]


class Held(Protocol):
    """The caller's memory, as far as every transfer is concerned: a Sink or a source."""

    def watch(self, stop: Callable[[OrbitError], None] | None) -> None:
        """`stop` is called when the memory is wanted back."""

    def keep(self, cause: str) -> None:
        """That nothing accesses it any more could not be proven."""

    def discard(self) -> None:
        """The transfer failed, and nothing accesses the memory any more."""


class TransferRun:
    """One transfer from its first call to its end. `run` once; it never leaves a lease behind."""

    direction: ClassVar[Direction]
    confirm: ClassVar[bool] = False  # of a READ, too, the end is answered when it is proven
    _arrays: tuple[int, ...] = ()  # which the owner may use at once
    _rails: tuple[str, ...] = ()  # of the last move

    def __init__(
        self,
        context: TransferContext,
        session: Session,
        handle: Handle,
        transfer: Transfer,
        plan: TransferPlan,
        memory: Held,
    ) -> None:
        self._context = context
        self._session = session
        self._handle = handle
        self._machine = transfer
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._on_deadline)
        self._result: asyncio.Future[machine.Finish] = self._loop.create_future()
        self._caller: asyncio.Future[None] | None = None  # what it waits on; it may be cancelled
        self._moving: asyncio.Task[None] | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._phases: dict[str, float] = {}
        # Until prepare has answered, what is known at hand; then what prepare said.
        self._why_no_offer = decide_offer(
            plan.transport, kill_switch=plan.kill_switch, rdma=plan.rdma
        )
        self._path = PathName.TCP  # of the last move
        self._unproven = False  # the memory may still be accessed

    def peer_gone(self, error: OrbitError) -> None:
        """The session has ended."""
        self._feed(machine.PeerGone(error))

    # --- what each kind of transfer says for itself -----------------------------------------------

    def _request(self, offer: RdmaOffer | None, *, skip_threshold: bool) -> AcquireRequest:
        raise NotImplementedError

    async def _move_bytes(self, path: DataPath, effect: machine.Move) -> PullReport:
        """Have the memory ready, and pull or push."""
        raise NotImplementedError

    def _deliver(self, data: bytes) -> None:
        raise NotImplementedError

    # --- the caller -------------------------------------------------------------------------------

    async def _run(self) -> machine.Finish:
        """A caller that is cancelled gets its CancelledError only when nothing accesses the memory
        any more. On any error the memory is discarded.
        """
        self._timer.arm(self._machine.deadline)
        self._feed(machine.Begin())
        self._memory.watch(lambda error: self._feed(machine.Stopped(error)))
        try:
            return await self._delivered()
        except BaseException:
            if not self._unproven:
                self._memory.discard()
            raise
        finally:
            self._memory.watch(None)

    async def _delivered(self) -> machine.Finish:
        cancelled: asyncio.CancelledError | None = None
        while not self._result.done():
            self._caller = self._loop.create_future()
            try:
                await self._caller
            except asyncio.CancelledError as error:
                cancelled = error
                self._feed(machine.Cancelled())
        try:
            finish = self._result.result()
        except OrbitError as error:
            if cancelled is None:
                raise
            raise cancelled from error
        if cancelled is None:
            return finish
        raise cancelled

    # --- the machine ------------------------------------------------------------------------------

    def _feed(self, event: TransferInput) -> None:
        self._carry_out(self._machine.step(event, self._loop.time()))

    def _on_deadline(self) -> None:
        due = self._machine.deadline
        if due is not None:
            self._carry_out(self._machine.on_deadline(max(self._loop.time(), due)))

    def _carry_out(self, effects: Iterable[TransferEffect]) -> None:  # noqa: PLR0912 (one arm each)
        for effect in effects:
            match effect:
                case machine.Prepare():
                    self._context.runner.start(self._prepare(), "prepare")
                case machine.Acquire():
                    self._start_acquire(effect)
                case machine.Move():
                    self._moving = self._context.runner.start(self._move(effect), "move")
                case machine.StopMoving():
                    if self._moving is not None:
                        self._moving.cancel()
                case machine.Deliver(data):
                    self._deliver(data)
                case machine.StartRenewal(lease_id, timeout_s):
                    self._renew_after(lease_id, max(timeout_s / 2, RENEWAL_FLOOR_S))
                case machine.StopRenewal():
                    self._stop_renewal()
                case machine.FellBack(reason):
                    self._note_fallback(reason)
                case machine.Detach(lease_id, transferred):
                    self._session.notify(DetachRequest(self._handle, lease_id, transferred))
                case machine.Release(lease_id):
                    gone = ReleaseRequest(self._handle, lease_id, transferred=False)
                    self._session.notify(gone)
                case machine.End(lease_id, transferred):
                    self._context.runner.start(self._end(lease_id, transferred), "end")
                case machine.Finish():
                    self._finish(effect)
                case machine.Fail(error):
                    self._fail(error)
        if self._machine.ended:
            self._timer.arm(None)
            self._stop_renewal()

    # --- calls ------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        started = time.perf_counter()
        rdma = self._context.paths.by_name(PathName.RDMA)
        try:
            reason = await rdma.prepare(self._session, self.direction)
        except (OrbitError, asyncio.CancelledError) as error:
            _log.debug("preparing RDMA to %s failed: %s", self._session.peer, error)
            reason = PathReason.CONNECT_FAILED
        self._phases["prepare"] = time.perf_counter() - started
        self._why_no_offer = reason
        if reason is not PathReason.OK:
            self._context.warn(self._session, reason)
        self._feed(machine.PathsReady(reason))

    def _start_acquire(self, effect: machine.Acquire) -> None:
        offer = None
        if effect.offer:
            arrays = self._arrays
            offer = RdmaOffer((BACKEND_VERBS,), pieces_max=machine.PIECES_MAX, arrays=arrays)
        elif self._why_no_offer is not PathReason.OK:
            self._decided(PathName.TCP, self._why_no_offer)
            if self._why_no_offer not in _CHOSEN:
                self._context.warn(self._session, self._why_no_offer)
        request = self._request(offer, skip_threshold=effect.skip_threshold)
        self._context.runner.start(self._acquire(request), "acquire")

    async def _acquire(self, request: AcquireRequest) -> None:
        # A task of its own: when the caller gives up, somebody must still learn of a granted lease.
        started = time.perf_counter()
        event: TransferInput
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
        self._add_phase("acquire", started)
        self._feed(event)

    async def _end(self, lease_id: LeaseId, transferred: bool) -> None:
        # A task of its own, as it is the end of the lease whoever still waits for it.
        started = time.perf_counter()
        request = DetachRequest(self._handle, lease_id, transferred, self.confirm)
        event: TransferInput
        try:
            reply = await self._session.call(request, EndReply)
            event = machine.Ended()
            if transferred and not reply.in_place:
                early = LeaseError(f"lease {lease_id} ended before its bytes were in place")
                event = machine.EndFailed(early)
        except DeadlineExceeded as error:
            self._context.lose(self._session, error)
            event = machine.EndFailed(error)
        except OrbitError as error:
            event = machine.EndFailed(_end_refused(error, self._handle, self._path))
        except asyncio.CancelledError:
            event = machine.EndFailed(ClosedError("node"))
        self._add_phase("finish", started)
        self._feed(event)

    # --- the move ---------------------------------------------------------------------------------

    async def _move(self, effect: machine.Move) -> None:
        self._feed(await self._moved(effect))

    async def _moved(self, effect: machine.Move) -> TransferInput:
        self._path = effect.path
        try:
            path = self._context.paths.by_name(effect.path)
            report = await self._move_bytes(path, effect)
        except Unquiesced as error:
            self._keep(error)
            return machine.MoveFailed(PathReason.GET_FAILED, error)
        except (OrbitError, asyncio.CancelledError) as error:
            _drop_frames(error)
            return _move_failed(error)
        except Exception as error:
            # A bug in a path proves nothing about its use of the memory.
            _log.exception("a transfer failed in a way that its contract does not know")
            unproven = Unquiesced("memory of a transfer", effect.total_bytes, repr(error))
            self._keep(unproven)
            return machine.MoveFailed(PathReason.GET_FAILED, unproven)
        self._phases.update(report.phases)
        self._rails = report.rails
        return machine.Moved()

    def _keep(self, error: Unquiesced) -> None:
        self._unproven = True
        retain(error, self._memory)
        self._memory.keep(error.cause)
        retained = MemoryRetained(error.what, error.retained_bytes, error.cause)
        self._context.recorder.record(retained)

    def _renew_after(self, lease_id: LeaseId, period_s: float) -> None:
        # A timer of its own: neither the move nor the caller can delay it, only the event loop can.
        def renew() -> None:
            self._session.notify(LeaseRenewRequest(self._handle, lease_id))
            self._renew_after(lease_id, period_s)

        self._renewal = self._loop.call_later(period_s, renew)

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    # --- the end ----------------------------------------------------------------------------------

    def _note_fallback(self, reason: PathReason) -> None:
        self._decided(PathName.TCP, reason)
        peer = self._session.peer.worker_id
        self._context.recorder.record(FellBack(peer, reason))
        self._context.warn(self._session, reason)

    def _finish(self, effect: machine.Finish) -> None:
        if effect.path is PathName.RDMA:
            self._decided(effect.path, effect.reason)
        self._result.set_result(effect)
        self._wake_caller()

    def _fail(self, error: OrbitError | None) -> None:
        if isinstance(error, PathUnavailable) and not error.detail:
            error = self._context.paths.unavailable(PathReason(error.reason))
        self._result.set_exception(error or ClosedError("the transfer"))
        self._result.exception()  # a cancelled caller does not look at it
        self._wake_caller()

    def _wake_caller(self) -> None:
        if self._caller is not None and not self._caller.done():
            self._caller.set_result(None)

    def _decided(self, path: PathName, reason: PathReason) -> None:
        self._context.recorder.record(PathDecided(Side.CONSUMER, path, reason))

    def _add_phase(self, name: str, started: float) -> None:
        elapsed = time.perf_counter() - started
        self._phases[name] = self._phases.get(name, 0.0) + elapsed


def typed_refusal(error: OrbitError, handle: Handle) -> OrbitError:
    """An owner's refusal as the error that the same mistake raises locally."""
    if not isinstance(error, PeerRefused):
        return error
    match error.reason:
        case UnknownHandle.code:
            return UnknownHandle(str(handle))
        case LeaseError.code:
            return LeaseError(error.detail or "the lease has ended")
        case WrongDirection.code:
            return WrongDirection(error.detail)
        case OutOfRange.code:
            return OutOfRange(error.detail)
        case RangeBusy.code:
            return RangeBusy(error.detail.removeprefix(_RANGE_BUSY))
        case BusyError.code:
            return BusyError(error.detail)
        case UsageError.code:
            return UsageError(error.detail)
    return refusal_of(error) or error


def _end_refused(error: OrbitError, handle: Handle, path: PathName) -> OrbitError:
    """As `typed_refusal`, of what ends a put: that its bytes are not in place has a type, too."""
    if isinstance(error, PeerRefused) and error.reason == PathFailed.code:
        return PathFailed(path, PathReason.GET_FAILED, error.detail)
    return typed_refusal(error, handle)


def exposure_of(answer: RdmaAnswer | ReadyAnswer) -> Exposure:
    """What the owner exposed, for the path that it chose."""
    if isinstance(answer, RdmaAnswer):
        rest = tuple((piece.descriptor, piece.grant) for piece in answer.rest)
        return Exposure(descriptor=answer.descriptor, grant=answer.grant, rest=rest)
    return Exposure(transfer_id=answer.transfer_id)


def _move_failed(error: OrbitError | asyncio.CancelledError) -> machine.MoveFailed:
    match error:
        case PathFailed():
            return machine.MoveFailed(PathReason(error.reason), error)
        case BudgetExceeded() | BusyError():  # no memory for it
            return machine.MoveFailed(PathReason.POOL_EXHAUSTED, error)
        case OrbitError():
            return machine.MoveFailed(PathReason.GET_FAILED, error)
        case _:
            return machine.MoveFailed(PathReason.GET_FAILED, ClosedError("the transfer"))


def _drop_frames(error: BaseException) -> None:
    """Let go of what the frames of an ended move hold: slices of the memory. Else whoever keeps the
    error keeps the caller's buffer exported, which then cannot be resized or closed.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
