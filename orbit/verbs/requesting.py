"""The requester's half of the RDMA path: the transfers on its arrays.

It checks what came with an answer before anything of it is taken on, and sees a transfer to its
end. What a grant may do next is decided by its machine, what a fetch does next by its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from operator import attrgetter

from ..errors import OrbitError, PathFailed, PeerLost, Unquiesced
from ..model import Direction, PathName, PathReason
from ..protocol.binding import GrantRecord
from ..protocol.descriptor import DescriptorError, decode_descriptor
from ..transport.begun import Begun, begin
from ..transport.in_flight import InFlight
from ..transport.interface import Exposure, Progress, PullReport, Session
from .arena_pool import ArenaPool
from .bulk_context import BulkContext
from .moving import Move
from .requester import RequesterMember, Transfer
from .requester_arrays import RequesterArray
from .requester_table import RequesterTable
from .source_arrays import DEFAULT_ARRAYS
from .targets import Piece, Targets


class Requesting:
    """All methods belong to one event loop."""

    def __init__(self, arrays: RequesterTable, memory: ArenaPool, context: BulkContext) -> None:
        self.arrays = arrays
        self.moving = InFlight()  # transfers
        self._config = context.config
        self._targets = Targets(memory, context.config.crossover_bytes, context.counters)

    def array(self, session: Session, direction: Direction) -> RequesterArray:
        """The one for who does not choose."""
        return self.arrays.default(session, direction)

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

    def close(self, cause: OrbitError) -> list[Awaitable[None]]:
        """Kill every queue pair: await each. They raise Unquiesced."""
        return self.arrays.close(cause)

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
        by_array: dict[int, list[int]] = {}
        for record in found:
            by_array.setdefault(record.array, []).append(record.index)
        arrays = {number: self._find(session, number, direction) for number in by_array}
        for number, indexes in by_array.items():
            await arrays[number].connected(indexes)
        members = [_member(arrays[record.array], record) for record in found]
        return [member.accept(record) for member, record in zip(members, found, strict=True)]

    def _find(self, session: Session, number: int, direction: Direction) -> RequesterArray:
        """The array that a record names. Raises PathFailed."""
        array = self.arrays.find(session, number)
        if array is not None and array.name.direction is direction:
            return array
        if array is None and number == DEFAULT_ARRAYS[direction]:
            detail = f"array {number} is not connected"
            raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, detail)
        what = "unknown here" if array is None else "of the other direction"
        raise _decode_error(f"grant of another connection: array {number} is {what}")


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
    if len(found) > 1 and len(set(map(_place_and_key, found))) != len(found):
        raise _decode_error("two grants have one key")
    return found


_place_and_key = attrgetter("array", "index", "key")


def _member(array: RequesterArray, record: GrantRecord) -> RequesterMember:
    """The queue pair that a record names. Raises PathFailed."""
    member = array.member(record.index)
    if member is None:
        detail = f"member {record.index} of array {record.array} is not connected"
        raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, detail)
    differing = member.mismatch(record)
    if differing:
        raise _decode_error(f"grant of another connection: {', '.join(differing)}")
    return member


def _decode_error(detail: str) -> PathFailed:
    return PathFailed(PathName.RDMA, PathReason.DECODE_ERROR, detail)
