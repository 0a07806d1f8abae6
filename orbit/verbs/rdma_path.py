"""The RDMA data path: DataPath over bulk arrays and one-use memory windows.

Owns the devices, the arrays of every session, the pinned memory and the table from lease to grant;
puts the parts together and closes them in order. What a grant may do next is decided by the grant
machines, what a fetch does next by its caller. The passive side does nothing per byte.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict

from ..errors import (
    DeviceError,
    InternalError,
    OrbitError,
    PathUnavailable,
    Unquiesced,
)
from ..memory.budget import Budget
from ..model import Direction, LeaseId, PathName, PathReason
from ..protocol.grants import GrantTimeouts
from ..protocol.messages import (
    BulkLostNotice,
    ConnectBulkRequest,
    Limits,
    Message,
    RailHint,
)
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
from .counters import PathCounters, PathStatistics
from .device import DeviceContext
from .exposing import LeaseGrants, reserve
from .offload import Offload
from .requesting import Requesting
from .retention import Retained
from .settings import RdmaPathConfig
from .source_arrays import SourceArrays

Closing = Callable[[], Awaitable[None]]


class RdmaPath:
    """Made by `opening.open_rdma_path`. All methods belong to one event loop."""

    name = PathName.RDMA

    def __init__(
        self, devices: Sequence[DeviceContext], config: RdmaPathConfig, offload: Offload
    ) -> None:
        self._devices = tuple(devices)
        self._config = config
        self._offload = offload
        self._counters = PathCounters()
        self._retained = Retained()
        self._timeouts = GrantTimeouts(
            bind_s=config.bind_timeout_s,
            receipt_s=config.receipt_timeout_s,
            progress_s=config.progress_timeout_s,
            cancel_s=config.drain_timeout_s,
            drain_s=config.drain_timeout_s * 2,  # the drain itself, then the windows
        )
        budget = Budget(
            "registered memory",
            config.pool.registered_bytes_budget,
            "rdma.pool.registered_bytes_budget",
        )
        self.memory = ArenaPool(self._devices, config.pool, budget, self._retained)
        self._sources = SourceArrays(
            self._devices, config, self._retained, self._counters, self._timeouts
        )
        self._requests = Requesting(
            self._devices, config, self.memory, self._retained, self._counters, self._timeouts
        )
        self._leases: dict[tuple[bytes, LeaseId], LeaseGrants] = {}
        self._generations = itertools.count(1)
        self._companions: list[Closing] = []
        self._gated = False
        self._unproven: Unquiesced | None = None  # of `end_transfers`; nothing is freed after it
        self._closing: asyncio.Task[None] | None = None

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
    def rails(self) -> tuple[RailHint, ...]:
        """For this node's hello, best first."""
        return tuple(device.rail for device in self._devices)

    @property
    def limits(self) -> Limits:
        """For this node's hello: what its weakest device can do."""
        return Limits(
            rd_atomic=min((d.limits.max_init_rd_atomic for d in self._devices), default=0),
            max_dest_rd_atomic=min((d.limits.max_rd_atomic for d in self._devices), default=0),
            grants_max=self._config.width * self._config.recv_depth,
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
        return {
            ConnectBulkRequest.METHOD: self._on_connect_bulk,
            BulkLostNotice.METHOD: self._on_bulk_lost,
        }

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
        key = session.attempt, lease_id
        if key in self._leases:
            raise InternalError(f"lease {lease_id} is exposed already")

        def open_grants() -> LeaseGrants:
            sources, generations = self._sources, self._generations
            return reserve(sources, session, span, lease_id, array, direction, generations)

        lease = open_grants()
        try:
            return await self._publish(key, lease)
        except PathUnavailable:
            if not lease.found_dead:
                raise
        return await self._publish(key, open_grants())

    async def _publish(self, key: tuple[bytes, LeaseId], lease: LeaseGrants) -> Exposure:
        self._leases[key] = lease
        try:
            return await lease.publish(self._config.nap_us, lambda: self._forget_lease(key, lease))
        except PathUnavailable:
            self._forget_lease(key, lease)
            raise

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        key = session.attempt, lease_id
        lease = self._leases.get(key)
        if lease is None:
            return
        await lease.end(transferred=transferred)
        self._forget_lease(key, lease)
        lease.check_whole(transferred=transferred)

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
        self._counters.pulls += 1
        try:
            return await self._requests.move(
                session, exposure, target.pieces, Direction.READ, progress
            )
        except BaseException:
            self._counters.pulls_failed += 1
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
        self._counters.pushes += 1
        try:
            return await self._requests.move(
                session, exposure, source.pieces, Direction.WRITE, progress
            )
        except BaseException:
            self._counters.pushes_failed += 1
            raise

    # --- the end ---

    async def close_session(self, session: Session) -> None:
        """Kill the session's queue pairs, both roles. Raises Unquiesced."""
        ends = [self._sources.close_session(session), *self._requests.close_session(session)]
        results = await asyncio.gather(*ends, return_exceptions=True)
        for key in [key for key in self._leases if key[0] == session.attempt]:
            if self._leases[key].ended:
                del self._leases[key]
        _raise_first(results)

    def gate(self) -> None:
        self._gated = True

    async def drain(self) -> None:
        for lease in list(self._leases.values()):
            await lease.wait_settled()
        await self._requests.moving.wait()

    async def end_transfers(self) -> None:
        """Kills the queue pairs that something is on its way on; those of messages, and what is
        idle, live on.
        """
        self.gate()
        cause = OrbitError("registered memory is given back")
        leases = self._leases.values()
        ends: list[Awaitable[None]] = [lease.end_by_force(cause) for lease in leases]
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
            await self.memory.close()
        except (OrbitError, TimeoutError) as error:
            raise Unquiesced(
                "registered memory", self.memory.registered_bytes, str(error)
            ) from error

    async def close(self) -> None:
        """Arrays and companions, pinned memory, devices, in this order, once. Raises Unquiesced:
        then the rest is left to the end of the process.
        """
        self.gate()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    def statistics(self) -> PathStatistics:
        histories = [device.windows.history for device in self._devices]
        counts = asdict(self._counters)
        return PathStatistics(
            bind_s=counts.pop("bind_s"),
            receipt_s=counts.pop("receipt_s"),
            counts=counts,
            grants_active=self._sources.grants_active,
            queue_pairs=sum(device.queue_pairs for device in self._devices),
            windows_parked=sum(len(device.windows.parked) for device in self._devices),
            window_keys_used=sum(history.keys_used for history in histories),
            window_keys_remaining=min((h.keys_remaining for h in histories), default=0),
            registered_bytes=self.memory.registered_bytes,
            unknown_completions=sum(d.lanes.unknown_completions for d in self._devices),
            crossings=self._devices[0].turn.crossings.total if self._devices else 0,
            retained_bytes=self._retained.nbytes,
            retained=self._retained.items(),
        )

    # --- parts ---

    async def _on_connect_bulk(self, session: Session, body: object) -> Message:
        return await self._sources.connect(session, ConnectBulkRequest.from_wire(body))

    async def _on_bulk_lost(self, session: Session, body: object) -> None:
        self._requests.lost_at_source(session, BulkLostNotice.from_wire(body))

    def _forget_lease(self, key: tuple[bytes, LeaseId], lease: LeaseGrants) -> None:
        if self._leases.get(key) is lease:
            del self._leases[key]

    async def _close(self) -> None:
        cause = OrbitError("the path is closed")
        ends: list[Awaitable[None]] = [self._sources.close(), *self._requests.close(cause)]
        ends += [close() for close in self._companions]
        _raise_first([*await asyncio.gather(*ends, return_exceptions=True), self._unproven])
        try:
            await self.memory.close()
            for device in self._devices:
                await device.close()
        except (DeviceError, TimeoutError) as error:
            raise Unquiesced("the RDMA path", self.memory.registered_bytes, str(error)) from error
        self._leases.clear()
        self._offload.close()


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
