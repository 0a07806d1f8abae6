"""The RDMA data path: DataPath and RailedPath over bulk arrays and one-use memory windows.

Owns the devices, the arrays of every session and the pinned memory; puts the parts together and
closes them in order. What a grant may do next is decided by the grant machines, what a fetch does
next by its caller. The passive side does nothing per byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict

from ..errors import (
    DeviceError,
    OrbitError,
    PathUnavailable,
    Unquiesced,
)
from ..memory.budget import Budget
from ..model import Direction, LeaseId, PathName, PathReason
from ..protocol.grants import GrantTimeouts
from ..protocol.messages import BulkLostNotice, Limits, RailHint
from ..transport.interface import (
    CallHandler,
    Exposure,
    Progress,
    PullReport,
    Session,
    Span,
    Target,
)
from .arena_pool import ArenaPool
from .bulk_context import BulkContext
from .counters import PathCounters, PathStatistics
from .device import DeviceContext
from .endpoints import EndpointBudget
from .exposures import Exposures
from .monitor import Monitor
from .offload import Offload
from .path_rails import PathRails
from .requester import RequesterMember
from .requester_table import RequesterTable
from .requesting import Requesting
from .retention import Retained
from .rollover import Rollover
from .settings import RdmaPathConfig
from .source import SourceMember
from .source_arrays import SourceArrays
from .source_runs import parts_of_array

Closing = Callable[[], Awaitable[None]]


class RdmaPath(PathRails):
    """Made by `opening.open_rdma_path`. All methods belong to one event loop."""

    name = PathName.RDMA

    def __init__(
        self, devices: Sequence[DeviceContext], config: RdmaPathConfig, offload: Offload
    ) -> None:
        self._devices = tuple(devices)
        self._config = config
        self._offload = offload
        self._monitor = Monitor(self._devices, config.monitor_interval_s)
        timeouts = GrantTimeouts(
            bind_s=config.bind_timeout_s,
            receipt_s=config.receipt_timeout_s,
            progress_s=config.progress_timeout_s,
            cancel_s=config.drain_timeout_s,
            drain_s=config.drain_timeout_s * 2,  # the drain itself, then the windows
        )
        self._context = BulkContext(
            config, timeouts, Retained(), PathCounters(), EndpointBudget(config.endpoints_max)
        )
        budget = Budget(
            "registered memory",
            config.pool.registered_bytes_budget,
            "rdma.pool.registered_bytes_budget",
        )
        self.memory = ArenaPool(self._devices, config.pool, budget, self._context.retained)
        self._sources = SourceArrays(self._devices, self._context)
        self._exposures = Exposures(self._sources, config.nap_us)
        self._requests = Requesting(
            RequesterTable(self._devices, self._context), self.memory, self._context
        )
        arrays = self._sources, self._requests.arrays
        self._rollover = Rollover(self._devices, self.memory, arrays, self._context)
        self._companions: list[Closing] = []
        self._gated = False
        self._unproven: Unquiesced | None = None  # of `end_transfers`; nothing is freed after it
        self._closing: asyncio.Task[None] | None = None
        self._monitor.start()
        self._rollover.start()

    @property
    def devices(self) -> tuple[DeviceContext, ...]:
        return self._devices

    @property
    def budget(self) -> Budget:
        """Of all memory that is registered on these devices."""
        return self.memory.budget

    def close_before(self, close: Closing) -> None:
        """`close` ends something else on these devices: it runs before they close. Idempotent."""
        self._companions.append(close)

    @property
    def hints(self) -> tuple[RailHint, ...]:
        """For this node's hello, best first: the active ones. Without any, those that may become
        active: peers learn then that they are worth asking.
        """
        active = tuple(device.rail for device in self._devices if device.active)
        return active or tuple(d.rail for d in self._devices if not d.state.dead)

    @property
    def limits(self) -> Limits:
        """For this node's hello: what its weakest device can do."""
        # A grant needs a receive, and a send slot for its bind.
        depths = (min(d.config.send_depth, d.config.recv_depth) for d in self._devices)
        return Limits(
            rd_atomic=min((d.limits.max_init_rd_atomic for d in self._devices), default=0),
            max_dest_rd_atomic=min((d.limits.max_rd_atomic for d in self._devices), default=0),
            grants_max=self._config.width * min(depths, default=0),
            bulk_width=self._config.width,
        )

    def availability(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        if self._gated:
            return PathReason.DRAINING
        return self._requests.array(session, direction).availability()

    async def prepare(self, session: Session, direction: Direction = Direction.READ) -> PathReason:
        if self._gated:
            return PathReason.DRAINING
        return await self._requests.array(session, direction).prepare()

    def handlers(self) -> Mapping[str, CallHandler]:
        return {**self._sources.handlers(), BulkLostNotice.METHOD: self._on_bulk_lost}

    # --- owner ---

    async def expose(
        self,
        session: Session,
        span: Span,
        lease_id: LeaseId,
        array: int = 0,
        direction: Direction = Direction.READ,
    ) -> Exposure:
        """A grant over each piece of `span`. Raises PathUnavailable; then no key was published."""
        if self._gated:
            raise PathUnavailable(PathName.RDMA, PathReason.DRAINING)
        if span.nbytes == 0:
            return Exposure()  # nothing to move, so no authority
        parts = parts_of_array(span, array)
        return await self._exposures.expose(session, parts, lease_id, direction, whole=False)

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        await self._exposures.retract(session, lease_id, transferred=transferred)

    # --- consumer ---

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        """Cancelling hands the grants back, or kills queue pairs, and then raises."""
        self._context.counters.pulls += 1
        try:
            return await self._requests.move(
                session, exposure, target.pieces, Direction.READ, progress
            )
        except BaseException:
            self._context.counters.pulls_failed += 1
            raise

    async def push(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        source: Span,
        progress: Progress | None = None,
    ) -> PullReport:
        """As `pull`. A WRITE that was posted is never posted again."""
        self._context.counters.pushes += 1
        try:
            return await self._requests.move(
                session, exposure, source.pieces, Direction.WRITE, progress
            )
        except BaseException:
            self._context.counters.pushes_failed += 1
            raise

    # --- the end ---

    async def close_session(self, session: Session) -> None:
        """Kill the session's queue pairs, both roles. Raises Unquiesced."""
        requested = self._requests.arrays.close_session(session)
        ends = [self._sources.close_session(session), *requested]
        results = await asyncio.gather(*ends, return_exceptions=True)
        self._exposures.forget_ended(session)
        _raise_first(results)

    def gate(self) -> None:
        self._gated = True
        self._rollover.gate()

    async def drain(self) -> None:
        await self._exposures.wait_settled()
        await self._requests.moving.wait()

    async def end_transfers(self) -> None:
        """Kills the queue pairs that something is on its way on; those of messages, and what is
        idle, live on.
        """
        self.gate()
        cause = OrbitError("registered memory is given back")
        ends: list[Awaitable[None]] = [*self._exposures.end_by_force(cause)]
        if self._requests.moving:
            ends += self._requests.close(cause)
        try:
            _raise_first(await asyncio.gather(*ends, return_exceptions=True))
        except Unquiesced as error:
            self._unproven = error
        if self._unproven is not None:
            raise self._unproven

    async def release_memory(self) -> None:
        """The pool's arenas and regions; slabs of messages are theirs."""
        if self._unproven is not None:
            raise self._unproven
        try:
            await self._rollover.close()
            await self.memory.close()
        except (OrbitError, TimeoutError) as error:
            raise Unquiesced(
                "registered memory", self.memory.registered_bytes, str(error)
            ) from error

    async def close(self) -> None:
        """Arrays and companions, pinned memory, devices, in this order. Raises Unquiesced: then the
        rest stays as it is, and a further call looks for the proofs that were missing and goes on.
        What a device has refused to destroy is kept for good.
        """
        self.gate()
        ended = self._closing is not None and self._closing.done()
        if self._closing is None or (ended and self._closing.exception() is not None):
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    def statistics(self) -> PathStatistics:
        domains = [domain for device in self._devices for domain in device.domains]
        keys_gone = sum(device.key_count for device in self._devices)
        current = {d.name: d.domain.windows.history for d in self._devices}
        counts = asdict(self._context.counters)
        grants_active, grant_age_s = self._sources.grants_active()
        return PathStatistics(
            bind_s=counts.pop("bind_s"),
            receipt_s=counts.pop("receipt_s"),
            counts=counts,
            grants_active=grants_active,
            grant_age_s=grant_age_s,
            queue_pairs=sum(device.queue_pairs for device in self._devices),
            windows_parked=sum(len(domain.windows.parked) for domain in domains),
            window_keys_used=keys_gone + sum(d.windows.history.keys_used for d in domains),
            window_keys_remaining=min((h.keys_remaining for h in current.values()), default=0),
            device_window_keys={n: (h.keys_remaining, h.keys_total) for n, h in current.items()},
            registered_bytes=self.memory.registered_bytes,
            unknown_completions=sum(d.lanes.unknown_completions for d in self._devices),
            crossings=self._devices[0].turn.crossings.total if self._devices else 0,
            retained_bytes=self._context.retained.nbytes,
            retained=self._context.retained.items(),
        )

    # --- parts ---

    async def _on_bulk_lost(self, session: Session, body: object) -> None:
        self._requests.arrays.lost_at_source(session, BulkLostNotice.from_wire(body))

    async def _close(self) -> None:
        cause = OrbitError("the path is closed")
        ends: list[Awaitable[None]] = [
            self._monitor.close(),
            self._rollover.close(),
            self._sources.close(),
        ]
        ends += self._requests.close(cause)
        ends += [
            kept.wait_closed(again=True)
            for kept in self._context.retained.kept()
            if isinstance(kept, SourceMember | RequesterMember)
        ]
        ends += [close() for close in self._companions]
        _raise_first(await asyncio.gather(*ends, return_exceptions=True))
        try:
            await self.memory.close()
            for device in self._devices:
                await device.close()
        except (DeviceError, TimeoutError) as error:
            raise Unquiesced("the RDMA path", self.memory.registered_bytes, str(error)) from error
        self._rollover.forget()
        self._exposures.clear()
        self._offload.close()


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
