"""The requester's half of the RDMA path: the arrays towards every owner, and the transfers on them.

It checks what came with an answer before anything of it is taken on, and sees a transfer to its
end. What a grant may do next is decided by its machine, what a fetch does next by its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from ..errors import OrbitError, PathFailed, PeerLost, Unquiesced
from ..model import Direction, PathName, PathReason
from ..protocol.binding import GrantRecord
from ..protocol.descriptor import DescriptorError, decode_descriptor
from ..protocol.grants import GrantTimeouts
from ..protocol.messages import BulkLostNotice
from ..transport.begun import Begun, begin
from ..transport.in_flight import InFlight
from ..transport.interface import Exposure, Progress, PullReport, Session
from .arena_pool import ArenaPool
from .counters import PathCounters
from .device import DeviceContext
from .moving import Move
from .requester import RequesterMember, Transfer
from .requester_arrays import RequesterArray
from .retention import Retained
from .settings import RdmaPathConfig
from .source_arrays import DEFAULT_ARRAYS
from .targets import Piece, Targets


class Requesting:
    """All methods belong to one event loop."""

    def __init__(
        self,
        devices: Sequence[DeviceContext],
        config: RdmaPathConfig,
        memory: ArenaPool,
        retained: Retained,
        counters: PathCounters,
        timeouts: GrantTimeouts,
    ) -> None:
        self.moving = InFlight()  # transfers
        self._devices = devices
        self._config = config
        self._retained = retained
        self._counters = counters
        self._timeouts = timeouts
        self._targets = Targets(memory, config.crossover_bytes, counters)
        # By session attempt and direction.
        self._arrays: dict[tuple[bytes, Direction], RequesterArray] = {}

    def array(self, session: Session, direction: Direction) -> RequesterArray:
        """Its array towards that session's owner, made when it is asked for first."""
        key = session.attempt, direction
        array = self._arrays.get(key)
        if array is None:
            array = RequesterArray(
                session,
                direction,
                self._devices,
                self._config,
                self._retained,
                self._counters,
                self._timeouts,
            )
            if not session.closed:  # else nobody would close it
                self._arrays[key] = array
        return array

    async def move(
        self,
        session: Session,
        exposure: Exposure,
        pieces: Sequence[Piece],
        direction: Direction,
        progress: Progress | None,
    ) -> PullReport:
        """Fill, or send, `pieces` by what `exposure` grants. Cancelling hands the grants back, or
        kills queue pairs, and then raises. Raises PathFailed, PeerLost, Unquiesced.
        """
        moving = self.moving.begin()
        try:
            return await self._move(session, exposure, pieces, direction, progress)
        finally:
            self.moving.end(moving)

    async def _move(
        self,
        session: Session,
        exposure: Exposure,
        pieces: Sequence[Piece],
        direction: Direction,
        progress: Progress | None,
    ) -> PullReport:
        full = [piece for piece in pieces if piece.view.nbytes]
        if not exposure.descriptor and not full:
            return PullReport()
        nbytes = sum(piece.view.nbytes for piece in full)
        transfers = await self._accept(session, exposure, direction, nbytes)
        move = Move(transfers, full, self._targets, self._config, progress)
        if move.begin_nowait():
            return await move.deliver()
        try:
            return await _see_through(move)
        except PathFailed as error:
            if session.closed:
                raise PeerLost(str(session.peer), error.detail) from error
            raise

    def lost_at_source(self, session: Session, notice: BulkLostNotice) -> None:
        """The owner lost queue pairs of an array."""
        for direction, number in DEFAULT_ARRAYS.items():
            array = self._arrays.get((session.attempt, direction))
            if array is not None and number == notice.array:
                array.lost_at_source(notice)

    def close_session(self, session: Session) -> list[Awaitable[None]]:
        """Kill the session's queue pairs: await each. They raise Unquiesced."""
        arrays = [self._arrays.pop((session.attempt, d), None) for d in Direction]
        cause = OrbitError("the epoch is over")
        return [array.close(cause) for array in arrays if array is not None]

    def close(self, cause: OrbitError) -> list[Awaitable[None]]:
        """As `close_session`, of every session."""
        arrays, self._arrays = list(self._arrays.values()), {}
        return [array.close(cause) for array in arrays]

    async def _accept(
        self, session: Session, exposure: Exposure, direction: Direction, nbytes: int
    ) -> list[Transfer]:
        """Check what came with the answer against the connection and among itself, all of it before
        anything is taken on. Raises PathFailed.
        """
        found = _decode_grants(exposure)
        granted = sum(record.length for record in found)
        if granted != nbytes:
            raise _decode_error(f"{granted} bytes are granted, for {nbytes}")
        array = self._arrays.get((session.attempt, direction))
        if array is not None:
            await array.connected([record.index for record in found])
        members = [_member(array, record) for record in found]
        return [member.accept(record) for member, record in zip(members, found, strict=True)]


async def _see_through(move: Move) -> PullReport:
    """A cancellation gives the move up, and shows when it has ended."""
    rest = begin(move.run())
    if not isinstance(rest, Begun):
        return rest
    work = asyncio.get_running_loop().create_task(rest)
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
            move.cancel("cancelled by the caller")
    if cancelled and not isinstance(work.exception(), Unquiesced):
        raise asyncio.CancelledError
    return work.result()


def _decode_grants(exposure: Exposure) -> list[GrantRecord]:
    """The records of one lease, in payload order. Raises PathFailed (decode_error)."""
    found: list[GrantRecord] = []
    try:
        for descriptor_bytes, grant_bytes in exposure.grants:
            record = GrantRecord.decode(grant_bytes)
            record.check_descriptor(decode_descriptor(descriptor_bytes))
            found.append(record)
    except DescriptorError as error:
        raise _decode_error(str(error)) from error
    for index, record in enumerate(found):
        if (record.slice_index, record.slice_count) != (index, len(found)):
            named = f"slice_index {record.slice_index}, slice_count {record.slice_count}"
            raise _decode_error(f"grant {index} of {len(found)} says {named}")
        if record.request_id != found[0].request_id:
            raise _decode_error(f"grant {index} has another request_id")
    if len(found) > 1 and len({(record.index, record.key) for record in found}) != len(found):
        raise _decode_error("two grants have one key")
    return found


def _member(array: RequesterArray | None, record: GrantRecord) -> RequesterMember:
    """The queue pair that a record names. Raises PathFailed."""
    member = array.member(record.index) if array is not None else None
    if member is None:
        detail = f"member {record.index} of the array is not connected"
        raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, detail)
    differing = member.mismatch(record)
    if differing:
        raise _decode_error(f"grant of another connection: {', '.join(differing)}")
    return member


def _decode_error(detail: str) -> PathFailed:
    return PathFailed(PathName.RDMA, PathReason.DECODE_ERROR, detail)
