"""What one lease opens at its source: a grant for each part of the span, all of them or none.

Owns the order: every window and receive is reserved before anything is bound, so that a lease that
does not fit costs no queue pair; then all are bound at once; they are published and end together.
What one grant may do is decided by its machine.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence

from ..errors import InternalError, OrbitError, PathFailed, PathUnavailable
from ..model import Address, Direction, LeaseId, PathName, PathReason
from ..protocol.descriptor import Descriptor, encode_descriptor
from ..protocol.grants import Done, SessionClosed
from ..transport.interface import Exposure, Session, Span
from .grant_ends import GrantPart
from .naps import nap_until_done
from .source import SourceGrant, SourceMember
from .source_arrays import SourceArrays
from .source_runs import ArrayPart
from .targets import region_of


class LeaseGrants:
    """The grants of one lease, in payload order. `whole`: who says that all was transferred is told
    when it was not.
    """

    def __init__(self, grants: Sequence[SourceGrant], *, whole: bool) -> None:
        self._grants = grants
        self._whole = whole

    @property
    def ended(self) -> bool:
        return all(grant.ended for grant in self._grants)

    @property
    def settled(self) -> bool:
        """Nobody uses it any more: it has ended, or every receipt was seen."""
        return all(grant.ended or grant.receipted for grant in self._grants)

    async def wait_settled(self) -> None:
        """Until `settled`."""
        await _all_done([grant.watch_unused() for grant in self._grants])

    @property
    def found_dead(self) -> bool:
        """`publish` failed for nothing but queue pairs that had died unnoticed, as a requester's
        error makes them: another one may serve.
        """
        failed = [grant for grant in self._grants if _error(grant.published) is not None]
        return bool(failed) and all(grant.member.found_dead for grant in failed)

    async def publish(self, nap_us: int, forget: Callable[[], None]) -> Exposure:
        """Bind all of them. Raises PathUnavailable: then nothing was published, and what was bound
        is gone or listed as retained. Cancelled: ended as well, and `forget` is called when that is
        done.
        """
        grants = self._grants
        for member, served in _by_member(grants).items():
            member.bind(served)
        nap_until_done(((g.member.queue_pair.lane, g.published) for g in grants), nap_us)
        try:
            await _all_done([g.published for g in grants], until_error=True)
        except asyncio.CancelledError:
            self._when_released(forget)
            self._give_up()
            raise
        failure = next((e for g in grants if (e := _error(g.published)) is not None), None)
        if failure is not None:
            self._give_up()
            await _all_done([g.released for g in grants])
            raise failure
        return _exposure(grants)

    async def end(self, *, transferred: bool) -> None:
        """DONE. Returns when every grant has ended. Raises Unquiesced."""
        for lane in {g.member.queue_pair.lane for g in self._grants if not g.receipted}:
            lane.poll()  # a receipt that has arrived counts
        for grant in self._grants:
            grant.feed(Done(transferred))
        await _all_done([grant.released for grant in self._grants])
        for grant in self._grants:
            grant.released.result()

    async def end_by_force(self, cause: OrbitError) -> None:
        """Nobody waits any longer: what is not `settled` loses its queue pair. Returns when every
        grant has ended. Raises Unquiesced.
        """
        for grant in self._grants:
            if not (grant.ended or grant.receipted):
                grant.member.abort(cause)
            grant.feed(SessionClosed())
        await _all_done([grant.released for grant in self._grants])
        for grant in self._grants:
            grant.released.result()

    def check_whole(self, *, transferred: bool) -> None:
        """After `end`. Raises PathFailed for what its requester calls transferred, but whose
        receipts did not all come.
        """
        missing = sum(not grant.receipted for grant in self._grants)
        if transferred and missing and self._whole:
            detail = f"{missing} of {len(self._grants)} receipts did not come"
            raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, detail)

    def _give_up(self) -> None:
        for grant in self._grants:
            grant.feed(Done(transferred=False))

    def _when_released(self, callback: Callable[[], None]) -> None:
        waiting = [grant.released for grant in self._grants]

        def released(future: asyncio.Future[None]) -> None:
            waiting.remove(future)
            if not waiting:
                callback()

        for future in list(waiting):
            future.add_done_callback(released)


def reserve(
    arrays: SourceArrays,
    session: Session,
    parts: Sequence[ArrayPart],
    lease_id: LeaseId,
    direction: Direction,
    generations: Iterator[int],
) -> list[SourceGrant]:
    """A grant for each part, each on a queue pair of the part's array. Raises PathUnavailable,
    having given back what it took.
    """
    if not parts:
        raise InternalError("a lease of no bytes has no grants")
    grants: list[SourceGrant] = []
    request_id = b""
    try:
        for index, (array, piece) in enumerate(parts):
            generation = next(generations)
            request_id = request_id or struct.pack(">QQ", lease_id, generation)
            part = GrantPart(request_id, generation, index, len(parts))
            try:
                grant = _reserve_piece(arrays.choose(session, array, direction), piece, part)
            except PathUnavailable as error:
                if error.reason is not PathReason.WINDOWS_BUSY:
                    raise
                arrays.poll(session, array, direction)  # receipts that have come make room
                grant = _reserve_piece(arrays.choose(session, array, direction), piece, part)
            grants.append(grant)
    except BaseException:
        for grant in grants:
            grant.member.forget(grant)
        raise
    return grants


def _reserve_piece(member: SourceMember, piece: Span, part: GrantPart) -> SourceGrant:
    pinned = piece.pinned
    if pinned is None:
        raise PathUnavailable(PathName.RDMA, PathReason.NOT_PINNED)
    region = region_of(pinned, member.domain)
    if region is None or piece.view.nbytes > pinned.view.nbytes:
        raise PathUnavailable(PathName.RDMA, PathReason.NOT_PINNED, "not registered any more")
    return member.reserve(part, pinned, piece.view.nbytes, region.native)


def _by_member(grants: Sequence[SourceGrant]) -> dict[SourceMember, list[SourceGrant]]:
    found: dict[SourceMember, list[SourceGrant]] = {}
    for grant in grants:
        found.setdefault(grant.member, []).append(grant)
    return found


def _exposure(grants: Sequence[SourceGrant]) -> Exposure:
    published: list[tuple[bytes, bytes]] = []
    for grant in grants:
        record = grant.record
        address = Address(record.address)
        descriptor = Descriptor(record.generation, address, record.length, grant.window.key)
        published.append((encode_descriptor(descriptor), record.encode()))
    (descriptor_bytes, grant_bytes), *rest = published
    return Exposure(descriptor=descriptor_bytes, grant=grant_bytes, rest=tuple(rest))


async def _all_done(futures: Sequence[asyncio.Future[None]], *, until_error: bool = False) -> None:
    """Until all have ended, however; with `until_error` at most until one has failed."""
    waiting = [future for future in futures if not future.done()]
    if not waiting:
        return
    if not (until_error and any(_error(future) is not None for future in futures)):
        when = asyncio.FIRST_EXCEPTION if until_error else asyncio.ALL_COMPLETED
        await asyncio.wait(waiting, return_when=when)


def _error(future: asyncio.Future[None]) -> BaseException | None:
    return future.exception() if future.done() else None
