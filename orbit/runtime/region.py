"""One region: memory of the caller's under a registration, what uses it, and how that ends.

The shell of the RegionLife machine: it holds the buffer's export, tells devices to let go, keeps
what cannot be proven and wakes who waits. It knows no handles, slots or peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ClosedError, OrbitError, Unquiesced
from ..events import MemoryRetained, Recorder
from ..memory.buffer import BufferExport
from ..model import Deregistered
from ..protocol.region_life import (
    KeepMemory,
    RegionInput,
    RegionLife,
    RegionState,
    Registered,
    RegistrationFailed,
    Released,
    StopUses,
    TimedOut,
    Unmap,
    UnmapFailed,
    Unmapped,
    Unregister,
    UseBegan,
    UseEnded,
    UseUnproven,
)
from ..transport.interface import PinnedBuffer, PinnedMemory, Span, Target
from ..transport.pieces import cut_target, join_spans, join_targets
from ..transport.timer import DeadlineTimer
from .region_memory import RegionMemory
from .retained import Retained, proven, retain
from .runner import TaskRunner

_log = logging.getLogger("orbit")


@dataclass(frozen=True, slots=True, eq=False)
class RegionHost:
    """What the regions of one node share. `memory` None: a node without RDMA. `changed` is called
    when a region was registered, fell out of use, or ended.
    """

    memory: PinnedMemory | None
    runner: TaskRunner
    recorder: Recorder
    loop: asyncio.AbstractEventLoop
    changed: Callable[[Region], None]


class RegionUse:
    """One use of a range: while it is not ended, the region is not deregistered, unless by force.
    `span` and `target` are the range's bytes, in one piece for each registration that it lies in;
    their views end with the use, whoever still holds them.
    """

    __slots__ = ("_number", "_region", "_views", "span", "stop", "target")

    def __init__(
        self, region: Region, number: int, target: Target, stop: Callable[[], None]
    ) -> None:
        self._region: Region | None = region
        self._number = number
        self._views: list[memoryview] = []
        self.stop = stop
        self.target = join_targets([self._own(piece) for piece in target.pieces])
        self.span = join_spans([self._read_only(piece) for piece in self.target.pieces])

    @property
    def live(self) -> bool:
        """Whether it has not ended and the region is not about to go."""
        return self._region is not None and self._region.live

    def end(self) -> None:
        """Nothing of orbit's accesses the range for this use any more. Idempotent."""
        region, self._region = self._region, None
        if region is None:
            return
        self.span, self.target = Span(memoryview(b"")), Target(memoryview(b""))
        views, self._views = self._views, []
        for view in views:
            _release(view)
        region.use_ended(self._number)

    def keep(self, cause: str) -> None:
        """The use is over, but that nothing accesses the range any more could not be proven: the
        region is never given back. Idempotent, and nothing after `end`.
        """
        region, self._region = self._region, None
        if region is not None:
            region.use_unproven(self._number, cause)

    def _own(self, piece: Target) -> Target:
        view = memoryview(piece.view)
        self._views.append(view)
        pinned = piece.pinned
        if pinned is not None:
            pinned = PinnedBuffer(view, pinned.address, pinned.arena, pinned.token)
        return Target(view, pinned)

    def _read_only(self, piece: Target) -> Span:
        view = piece.view.toreadonly()
        self._views.append(view)
        return Span(view, piece.pinned)


class Region:
    """For the event loop's thread, apart from what says otherwise. `source` is the caller's object,
    `site` where it was registered (for people).
    """

    def __init__(self, host: RegionHost, export: BufferExport, source: object, site: str) -> None:
        """Takes `export` over, whatever follows."""
        self.host = host
        self.memory = RegionMemory(export)
        self.source: object | None = source
        self.site = site
        self.nbytes = export.nbytes
        self._life = RegionLife()
        self._timer = DeadlineTimer(lambda: self._step(TimedOut()))
        self._uses: dict[int, RegionUse] = {}
        self._uses_begun = 0
        self._waiters: list[asyncio.Future[Deregistered]] = []
        self._latch: asyncio.Future[Deregistered] = self.host.loop.create_future()
        self._kept: Retained | None = None

    # --- what it is -------------------------------------------------------------------------------

    @property
    def state(self) -> RegionState:
        return self._life.state

    @property
    def view(self) -> memoryview:
        """All of it, writable. Raises ClosedError when the memory is the caller's again."""
        return self.memory.view

    @property
    def live(self) -> bool:
        """Whether it may be used."""
        return self._life.state is RegionState.LIVE

    @property
    def in_use(self) -> bool:
        return self._life.in_use

    # --- its life ---------------------------------------------------------------------------------

    async def register(self, *, own: bool = False, peers: bool = True) -> None:
        """Once: a registration for work requests of this side, one for windows that peers are
        granted, or both. Raises what PinnedMemory.register raises; then the region is over, and
        nothing of the caller's is held. Raises Unquiesced when a device has one of the two and does
        not let go: the region is kept.
        """
        memory = self.host.memory
        try:
            if memory is not None:
                await self.memory.register(memory, own=own, peers=peers)
        except BaseException as error:
            if isinstance(error, OrbitError | asyncio.CancelledError):
                _forget_frames(error)
            if not self.memory.registered:
                self._step(RegistrationFailed())
                raise
            self._step(Registered())  # in part; nobody uses it, so that its end begins at once
            await end_regions([self], error)
            raise
        self._step(Registered())

    def refuse(self) -> None:
        """In place of `register`: nothing was registered, and the region is over."""
        self._step(RegistrationFailed())

    def use(
        self, offset: int, nbytes: int, stop: Callable[[], None], *, own: bool = False
    ) -> RegionUse:
        """See RegionSlice.use. `own`: for work requests of this side alone. Raises OutOfRange,
        ClosedError.
        """
        if not self.live:
            raise ClosedError("the region")
        # No await since: between this look and the note of the use nobody can begin to deregister.
        target = cut_target(self.memory.target(own=own), offset, nbytes)
        self._uses_begun += 1
        use = RegionUse(self, self._uses_begun, target, stop)
        self._uses[self._uses_begun] = use
        self._step(UseBegan(self._uses_begun))
        return use

    def use_ended(self, number: int) -> None:
        """Of a RegionUse only."""
        del self._uses[number]
        self._step(UseEnded(number))

    def use_unproven(self, number: int, cause: str) -> None:
        """Of a RegionUse only."""
        del self._uses[number]
        self._step(UseUnproven(number, cause))

    def unregister(self, deadline: float | None = None) -> asyncio.Future[Deregistered]:
        """Begin the end, now; `deadline` (loop time) is where waiting for uses turns into force.
        The future fails with Unquiesced; nobody has to wait for it.
        """
        waiter: asyncio.Future[Deregistered] = self.host.loop.create_future()
        self._waiters.append(waiter)
        self._step(Unregister(deadline))
        return waiter

    async def deregistered(self) -> Deregistered:
        """See RegionGuard.deregistered."""
        return await asyncio.shield(self._latch)

    def when_ended(self, act: Callable[[], object]) -> None:
        """`act` runs, from the loop, once the memory is the caller's again."""
        self._latch.add_done_callback(lambda _: act())

    def drop(self, timeout_s: float) -> None:
        """Its owner is gone: as `unregister`, from any thread and at any time. Never blocks or
        raises.
        """
        try:
            self.host.loop.call_soon_threadsafe(self._dropped, timeout_s)
        except RuntimeError:  # the loop is closed: nobody is left to hear a device confirm
            if self.memory.registered:
                self._keep("its event loop was closed before it was unregistered")

    def give_up_uses(self, cause: str) -> None:
        """Whatever still uses it is not going to end."""
        for use in list(self._uses.values()):
            use.keep(cause)

    def _dropped(self, timeout_s: float) -> None:
        if self.live:
            self.unregister(self.host.loop.time() + timeout_s)

    # --- what the machine says --------------------------------------------------------------------

    def _step(self, event: RegionInput) -> None:
        effects = self._life.step(event, self.host.loop.time())
        self._timer.arm(self._life.deadline)
        for effect in effects:
            match effect:
                case StopUses(numbers):
                    self._stop(numbers)
                case Unmap():
                    self._unmap()
                case Released(how):
                    self._released(how)
                case KeepMemory(cause):
                    self._fail(self._keep(cause))
        self.host.changed(self)

    def _stop(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            use = self._uses.get(number)
            if use is None:  # one stop brought others to their end
                continue
            try:
                use.stop()
            except Exception:  # somebody else's; the others must hear of it all the same
                _log.exception("stopping a use of the region registered at %s failed", self.site)

    def _unmap(self) -> None:
        if self.host.memory is None or not self.memory.registered:
            self._step(Unmapped())
            return
        work = self._deregister(self.host.memory)
        self.host.runner.spawn(work, f"deregister {self.nbytes} bytes")

    async def _deregister(self, memory: PinnedMemory) -> None:
        try:
            await self.memory.deregister(memory)
        except BaseException as error:
            # Whatever it was: only a return proves that every device has let go.
            if isinstance(error, OrbitError | asyncio.CancelledError):
                _forget_frames(error)
            else:
                _log.error("deregistering %s bytes failed", self.nbytes, exc_info=error)
            self._step(UnmapFailed(str(error) or "cancelled"))
            if not isinstance(error, Exception):
                raise
        else:
            self._step(Unmapped())

    def _released(self, how: Deregistered) -> None:
        self.source = None
        self.memory.release()
        if self._kept is not None:
            proven(self._kept)
            self._kept = None
        if not self._latch.done():
            self._latch.set_result(how)
        for waiter in self._take_waiters():
            waiter.set_result(how)

    def _keep(self, cause: str) -> Unquiesced:
        what = f"the region of {self.nbytes} bytes registered at {self.site}"
        error = Unquiesced(what, self.nbytes, cause)
        if self._kept is None:
            self._kept = retain(error, self)
            self.host.recorder.record(MemoryRetained(what, self.nbytes, cause))
        return error

    def _fail(self, error: Unquiesced) -> None:
        for waiter in self._take_waiters():
            waiter.set_exception(error)
            waiter.exception()  # it was logged; nobody has to wait for it

    def _take_waiters(self) -> list[asyncio.Future[Deregistered]]:
        waiters, self._waiters = self._waiters, []
        return [waiter for waiter in waiters if not waiter.done()]


async def end_regions(regions: Sequence[Region], cause: BaseException) -> None:
    """Undo registrations because of `cause`, which the caller raises then; nothing uses them.
    Returns when all have their verdict, also if it is cancelled meanwhile. Raises Unquiesced from
    `cause` when a device does not let go.
    """
    now = asyncio.get_running_loop().time()
    waiting = {region.unregister(now) for region in regions}
    kept: list[BaseException] = []
    while waiting:
        with contextlib.suppress(asyncio.CancelledError):
            done, waiting = await asyncio.wait(waiting)
            kept += [error for waiter in done if (error := waiter.exception()) is not None]
    if kept and isinstance(cause, Exception):
        raise kept[0] from cause


def _release(view: memoryview) -> None:
    # A slice of it that is used no more may still be held; the buffer's export then ends with that.
    with contextlib.suppress(BufferError):
        view.release()


def _forget_frames(error: BaseException) -> None:
    """A refusal is routine, and the memory is the caller's again while it is being handled: the
    frames of a traceback would hold views of it.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
