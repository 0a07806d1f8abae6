"""The RDMA data path: DataPath over READ arrays and one-use memory windows.

Owns the devices, the arrays of every session, the pinned memory and the table from lease to grant;
puts the parts together and closes them in order. What a grant may do next is decided by the grant
machines, what a fetch does next by its caller. The passive side does nothing per byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict

from ..errors import (
    DeviceError,
    InternalError,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
    Unquiesced,
)
from ..memory.budget import Budget
from ..model import LeaseId, PathName, PathReason
from ..protocol.binding import GrantRecord
from ..protocol.descriptor import (
    Descriptor,
    DescriptorError,
    decode_descriptor,
    encode_descriptor,
)
from ..protocol.grants import Done, GrantTimeouts
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
from .counters import PathCounters, PathStatistics
from .device import DeviceContext
from .offload import Offload
from .pulling import Pull
from .read_arrays import ReadArray
from .registration import PinnedArena
from .requester import ReadMember, Transfer
from .retention import Retained
from .settings import RdmaPathConfig
from .source import SourceGrant
from .source_arrays import SourceArrays
from .targets import Targets

_BOUNCE_BYTES_MIN = 1 << 20

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
        self.memory = PinnedArena(self._devices, config.pool.initial_arena_bytes, budget)
        self._bounce = PinnedArena(
            self._devices, max(_BOUNCE_BYTES_MIN, 4 * config.crossover_bytes), budget
        )
        self._targets = Targets(self._bounce, config.crossover_bytes, self._counters)
        self._sources = SourceArrays(
            self._devices, config, self._retained, self._counters, self._timeouts
        )
        self._reads: dict[bytes, ReadArray] = {}  # by session attempt
        self._leases: dict[tuple[bytes, LeaseId], SourceGrant] = {}
        self._generation = 0
        self._companions: list[Closing] = []
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
            rd_atomic=self._weakest("max_init_rd_atomic"),
            max_dest_rd_atomic=self._weakest("max_rd_atomic"),
            grants_max=self._config.width * self._config.recv_depth,
            bulk_width=self._config.width,
        )

    def availability(self, session: Session) -> PathReason:
        if self._closing is not None:
            return PathReason.DRAINING
        return self._read_array(session).availability()

    async def prepare(self, session: Session) -> PathReason:
        if self._closing is not None:
            return PathReason.DRAINING
        return await self._read_array(session).prepare()

    def handlers(self) -> Mapping[str, CallHandler]:
        return {
            ConnectBulkRequest.METHOD: self._on_connect_bulk,
            BulkLostNotice.METHOD: self._on_bulk_lost,
        }

    # --- owner ---

    async def expose(
        self, session: Session, span: Span, lease_id: LeaseId, array: int = 0
    ) -> Exposure:
        """One grant over exactly `span`. Raises PathUnavailable; then no key was published."""
        if self._closing is not None:
            raise PathUnavailable(PathName.RDMA, PathReason.DRAINING)
        if span.view.nbytes == 0:
            return Exposure()  # nothing to read, so no authority
        key = session.attempt, lease_id
        if key in self._leases:
            raise InternalError(f"lease {lease_id} is exposed already")
        pinned = span.pinned
        if pinned is None or not isinstance(pinned.arena, PinnedArena):
            raise PathUnavailable(PathName.RDMA, PathReason.NOT_PINNED)
        member = self._sources.choose(session, array)
        region = pinned.arena.region(member.device)
        if region is None or not 0 < span.view.nbytes <= pinned.view.nbytes:
            raise PathUnavailable(PathName.RDMA, PathReason.NOT_PINNED, "not in a live arena")
        self._generation += 1
        grant = member.expose(lease_id, self._generation, pinned, span.view.nbytes, region.native)
        self._leases[key] = grant
        member.queue_pair.lane.nap(grant.published.done, self._config.nap_us)
        try:
            if not grant.published.done():
                await asyncio.shield(grant.published)
            grant.published.result()
        except asyncio.CancelledError:
            grant.feed(Done(transferred=False))
            raise
        except PathUnavailable:
            await _quiet(grant.released)  # its window is gone, or listed as retained
            self._leases.pop(key, None)
            raise
        record = grant.record
        descriptor = Descriptor(record.generation, pinned.address, record.length, grant.window.key)
        return Exposure(descriptor=encode_descriptor(descriptor), grant=record.encode())

    async def retract(self, session: Session, lease_id: LeaseId, *, transferred: bool) -> None:
        key = session.attempt, lease_id
        grant = self._leases.get(key)
        if grant is None:
            return
        grant.member.poll()  # a receipt that has arrived counts
        grant.feed(Done(transferred))
        if not grant.released.done():
            await asyncio.shield(grant.released)
        grant.released.result()
        self._leases.pop(key, None)

    # --- consumer ---

    async def pull(
        self,
        session: Session,
        exposure: Exposure,
        lease_id: LeaseId,
        target: Target,
        progress: Progress | None = None,
    ) -> PullReport:
        """Cancelling hands the grant back, or kills the queue pair, and then raises."""
        self._counters.pulls += 1
        if not exposure.descriptor and target.view.nbytes == 0:
            return PullReport()
        transfer = self._accept(session, exposure, target)
        pull = Pull(transfer, target, self._targets, self._config, progress)
        if pull.begin_nowait():
            return await pull.deliver()
        work = asyncio.get_running_loop().create_task(pull.run())
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                cancelled = True
                pull.cancel("cancelled by the caller")
        error = work.exception()
        if error is not None:
            self._counters.pulls_failed += 1
        if cancelled and not isinstance(error, Unquiesced):
            raise asyncio.CancelledError
        if isinstance(error, PathFailed) and session.closed:
            raise PeerLost(str(session.peer), error.detail) from error
        return work.result()

    # --- the end ---

    async def close_session(self, session: Session) -> None:
        """Kill the session's queue pairs, both roles. Raises Unquiesced."""
        array = self._reads.pop(session.attempt, None)
        ends = [self._sources.close_session(session)]
        if array is not None:
            ends.append(array.close(OrbitError("the epoch is over")))
        results = await asyncio.gather(*ends, return_exceptions=True)
        for key in [key for key in self._leases if key[0] == session.attempt]:
            if self._leases[key].ended:
                del self._leases[key]
        _raise_first(results)

    async def close(self) -> None:
        """Arrays and companions, pinned memory, devices, in this order, once. Raises Unquiesced:
        then the rest is left to the end of the process.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    def statistics(self) -> PathStatistics:
        histories = [device.windows.history for device in self._devices]
        return PathStatistics(
            counts=asdict(self._counters),
            grants_active=self._sources.grants_active,
            queue_pairs=sum(device.queue_pairs for device in self._devices),
            windows_parked=sum(len(device.windows.parked) for device in self._devices),
            window_keys_used=sum(history.keys_used for history in histories),
            window_keys_remaining=min((h.keys_remaining for h in histories), default=0),
            registered_bytes=self.memory.registered_bytes + self._bounce.registered_bytes,
            unknown_completions=sum(d.lanes.unknown_completions for d in self._devices),
            crossings=self._devices[0].turn.crossings.total if self._devices else 0,
            retained_bytes=self._retained.nbytes,
            retained=self._retained.items(),
        )

    # --- parts ---

    async def _on_connect_bulk(self, session: Session, body: object) -> Message:
        return await self._sources.connect(session, ConnectBulkRequest.from_wire(body))

    async def _on_bulk_lost(self, session: Session, body: object) -> None:
        notice = BulkLostNotice.from_wire(body)
        array = self._reads.get(session.attempt)
        if array is not None:
            array.lost_at_source(notice)

    def _read_array(self, session: Session) -> ReadArray:
        array = self._reads.get(session.attempt)
        if array is None:
            array = ReadArray(
                session,
                self._devices,
                self._config,
                self._retained,
                self._counters,
                self._timeouts,
            )
            if not session.closed:  # else nobody would close it
                self._reads[session.attempt] = array
        return array

    def _accept(self, session: Session, exposure: Exposure, target: Target) -> Transfer:
        """Check what came with the answer against the connection. Raises PathFailed."""
        try:
            descriptor = decode_descriptor(exposure.descriptor)
            record = GrantRecord.decode(exposure.grant)
            record.check_descriptor(descriptor)
        except DescriptorError as error:
            raise _decode_error(str(error)) from error
        if record.length != target.view.nbytes:
            raise _decode_error(f"{record.length} bytes for a target of {target.view.nbytes}")
        array = self._reads.get(session.attempt)
        member: ReadMember | None = array.member(record.index) if array is not None else None
        if member is None:
            detail = f"member {record.index} of the array is not connected"
            raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, detail)
        differing = member.mismatch(record)
        if differing:
            raise _decode_error(f"grant of another connection: {', '.join(differing)}")
        return member.accept(record)

    async def _close(self) -> None:
        cause = OrbitError("the path is closed")
        arrays, self._reads = list(self._reads.values()), {}
        ends: list[Awaitable[None]] = [self._sources.close()]
        ends += [array.close(cause) for array in arrays]
        ends += [close() for close in self._companions]
        _raise_first(await asyncio.gather(*ends, return_exceptions=True))
        try:
            await self.memory.close()
            await self._bounce.close()
            for device in self._devices:
                await device.close()
        except (DeviceError, TimeoutError) as error:
            raise Unquiesced("the RDMA path", self.memory.registered_bytes, str(error)) from error
        self._leases.clear()
        self._offload.close()

    def _weakest(self, limit: str) -> int:
        return min((getattr(d.limits, limit) for d in self._devices), default=0)


async def _quiet(future: asyncio.Future[None]) -> None:
    """Wait for the end, whatever it is."""
    await asyncio.wait([future])


def _decode_error(detail: str) -> PathFailed:
    return PathFailed(PathName.RDMA, PathReason.DECODE_ERROR, detail)


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
