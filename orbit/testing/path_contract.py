"""The contract of DataPath as cases over an owner's and a consumer's path that share one epoch.

Every target stands between guard bytes, and is looked at again after the pull ended: nothing may
write it any more. Payloads have no power-of-two period, so that bytes at a wrong offset never look
right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from ..errors import (
    DeadlineExceeded,
    OrbitError,
    PathFailed,
    PathUnavailable,
    PeerLost,
)
from ..model import LeaseId, PathReason
from ..transport.interface import (
    DataPath,
    Exposure,
    PinnedBuffer,
    Progress,
    Session,
    Span,
    Target,
)
from .leftovers import nothing_left
from .pattern import pattern

GUARD_BYTES = 64
_GUARD = b"\xa5" * GUARD_BYTES
_PULL_ENDS = (PathFailed, PeerLost, DeadlineExceeded)


class DataPathPair(Protocol):
    """What a factory opens. Closing it closes both paths and sessions."""

    @property
    def owner(self) -> DataPath: ...
    @property
    def consumer(self) -> DataPath: ...
    @property
    def owner_session(self) -> Session: ...
    @property
    def consumer_session(self) -> Session: ...

    @property
    def big_bytes(self) -> int:
        """A transfer long enough to be caught in the middle."""

    def allocate_source(self, nbytes: int) -> Target:
        """Writable memory that the owner's path can expose (pinned where it needs that)."""

    def allocate_target(self, nbytes: int) -> Target:
        """Writable memory that the consumer's path can fill."""

    def free(self, memory: Target) -> None:
        """Give back what was allocated, whole."""

    async def kill_owner(self) -> None:
        """End the owner as the death of its process would."""


PathPairFactory = Callable[[], AbstractAsyncContextManager[DataPathPair]]


class Transfer:
    """One source and one guarded target of a pair, and the steps between them."""

    def __init__(
        self,
        pair: DataPathPair,
        nbytes: int,
        lease: int = 1,
        *,
        source_offset: int = 0,
        target_offset: int = 0,
        target_bytes: int | None = None,
    ) -> None:
        self.pair = pair
        self.lease_id = LeaseId(lease)
        self.payload = pattern(nbytes, lease)
        self._source = pair.allocate_source(nbytes + source_offset + 1)
        source = slice_target(self._source, source_offset, nbytes)
        source.view[:] = self.payload
        self.span = Span(source.view, source.pinned)
        wanted = nbytes if target_bytes is None else target_bytes
        begin = GUARD_BYTES + target_offset
        self._memory = pair.allocate_target(begin + wanted + GUARD_BYTES)
        self._memory.view[:] = _GUARD[:1] * len(self._memory.view)
        self.target = slice_target(self._memory, begin, wanted)
        self._begin = begin

    async def expose(self) -> Exposure:
        return await self.pair.owner.expose(self.pair.owner_session, self.span, self.lease_id)

    async def pull(self, exposure: Exposure, progress: Progress | None = None) -> None:
        session = self.pair.consumer_session
        await self.pair.consumer.pull(session, exposure, self.lease_id, self.target, progress)

    async def retract(self, *, transferred: bool) -> None:
        await self.pair.owner.retract(
            self.pair.owner_session, self.lease_id, transferred=transferred
        )

    async def run(self) -> None:
        """The whole of a good transfer, checked."""
        await self.pull(await self.expose())
        self.check_whole()
        await self.retract(transferred=True)

    def check_whole(self) -> None:
        assert self.target.view == self.payload, "the target differs from the source"
        self.check_guards()

    def check_guards(self) -> None:
        view, end = self._memory.view, self._begin + len(self.target.view)
        assert view[: self._begin] == _GUARD[:1] * self._begin, "written before the target"
        assert view[end:] == _GUARD[:1] * (len(view) - end), "written behind the target"

    async def check_untouched(self) -> None:
        """The pull has ended: whatever the target holds, it holds for good."""
        snapshot = bytes(self._memory.view)
        self.span.view[:] = b"\xee" * len(self.span.view)  # the owner reuses its memory
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert self._memory.view == snapshot, "written after the pull had ended"
        self.check_guards()

    def free(self) -> None:
        self.target.view.release()
        self.span.view.release()
        self.pair.free(self._memory)
        self.pair.free(self._source)


PathCase = Callable[[DataPathPair], Awaitable[None]]


async def check_data_path(case: str, open_pair: PathPairFactory) -> None:
    """Run one of PATH_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left(), open_pair() as pair:
        assert pair.consumer.availability(pair.consumer_session) is PathReason.OK
        assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
        await PATH_CASES[case](pair)


def slice_target(memory: Target, begin: int, nbytes: int) -> Target:
    """A part of `memory`, with its registration where it has one."""
    view = memory.view[begin : begin + nbytes]
    pinned = memory.pinned
    if pinned is None:
        return Target(view)
    address = type(pinned.address)(pinned.address + begin)
    return Target(view, PinnedBuffer(view, address, pinned.arena, pinned.token))


async def _until_moving(transfer: Transfer, exposure: Exposure) -> asyncio.Task[None]:
    """A pull whose first bytes have arrived (or that is over already)."""
    moving = asyncio.Event()
    task = asyncio.ensure_future(transfer.pull(exposure, lambda arrived: moving.set()))
    task.add_done_callback(lambda _: moving.set())
    await moving.wait()
    return task


async def _ended(task: asyncio.Task[None]) -> BaseException | None:
    """How the pull ended; only ways that the contract names."""
    async with asyncio.timeout(30):
        await asyncio.wait([task])
    error = task.exception()
    assert error is None or isinstance(error, _PULL_ENDS), repr(error)
    return error


async def every_size(pair: DataPathPair) -> None:
    around = [n + d for n in (64, 4096, 65536, 1 << 20) for d in (-1, 0, 1)]
    for lease, nbytes in enumerate([0, 1, 2, 7, *around, (3 << 20) + 77], 1):
        transfer = Transfer(pair, nbytes, lease)
        await transfer.run()
        transfer.free()


async def unaligned(pair: DataPathPair) -> None:
    for lease, (source, target) in enumerate([(1, 0), (0, 1), (3, 5), (4095, 63)], 1):
        transfer = Transfer(pair, 70_001, lease, source_offset=source, target_offset=target)
        await transfer.run()
        transfer.free()


async def two_at_once(pair: DataPathPair) -> None:
    transfers = [Transfer(pair, pair.big_bytes // 4 + lease, lease) for lease in (1, 2)]
    await asyncio.gather(*(transfer.run() for transfer in transfers))
    for transfer in transfers:
        transfer.check_whole()
        transfer.free()


async def many_at_once(pair: DataPathPair) -> None:
    transfers = [Transfer(pair, 10_000 + lease, lease) for lease in range(1, 13)]
    await asyncio.gather(*(transfer.run() for transfer in transfers))
    for transfer in transfers:
        transfer.free()


async def progress_is_monotone(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes // 4)
    seen: list[int] = []
    await transfer.pull(await transfer.expose(), seen.append)
    transfer.check_whole()
    await transfer.retract(transferred=True)
    assert seen == sorted(seen)
    assert seen[-1] == len(transfer.payload)
    transfer.free()


async def retract_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await _until_moving(transfer, await transfer.expose())
    await transfer.retract(transferred=False)
    # From here on the owner's memory may be reused: none of what follows may arrive.
    transfer.span.view[:] = b"\xee" * len(transfer.payload)
    if await _ended(task) is None:
        transfer.check_whole()
    reused = b"\xee" * 4096  # no payload has a run like this
    assert reused not in bytes(transfer.target.view), "bytes from after the retraction arrived"
    await transfer.check_untouched()
    transfer.free()
    await Transfer(pair, 5000, 2).run()


async def cancel_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await _until_moving(transfer, await transfer.expose())
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None
    await transfer.check_untouched()
    await transfer.retract(transferred=False)
    transfer.free()
    await Transfer(pair, 5000, 2).run()


async def owner_dies_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await _until_moving(transfer, await transfer.expose())
    await pair.kill_owner()
    if await _ended(task) is None:
        transfer.check_whole()
    await transfer.check_untouched()
    transfer.free()


async def owner_is_dead_before(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000)
    exposure = await transfer.expose()
    await pair.kill_owner()
    task = asyncio.ensure_future(transfer.pull(exposure))
    assert await _ended(task) is not None
    await transfer.check_untouched()
    transfer.free()


async def retracted_is_unknown(pair: DataPathPair) -> None:
    await Transfer(pair, 100, 1).run()
    transfer = Transfer(pair, 5000, 2)
    exposure = await transfer.expose()
    await transfer.retract(transferred=False)
    task = asyncio.ensure_future(transfer.pull(exposure))
    assert isinstance(await _ended(task), PathFailed)
    assert transfer.target.view == _GUARD[:1] * 5000, "bytes of a retracted span arrived"
    await transfer.check_untouched()
    transfer.free()
    await Transfer(pair, 5000, 3).run()


async def range_beyond_the_span(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 5000, target_bytes=5001)
    task = asyncio.ensure_future(transfer.pull(await transfer.expose()))
    assert isinstance(await _ended(task), PathFailed)
    await transfer.check_untouched()
    await transfer.retract(transferred=False)
    transfer.free()
    await Transfer(pair, 5000, 2).run()


async def retract_is_idempotent(pair: DataPathPair) -> None:
    await pair.owner.retract(pair.owner_session, LeaseId(99), transferred=False)
    transfer = Transfer(pair, 100)
    await transfer.run()
    await transfer.retract(transferred=True)
    await transfer.retract(transferred=False)
    transfer.free()


async def close_session_during_pull(pair: DataPathPair) -> None:
    transfer = Transfer(pair, pair.big_bytes)
    task = await _until_moving(transfer, await transfer.expose())
    await pair.consumer.close_session(pair.consumer_session)
    await _ended(task)
    await transfer.check_untouched()
    await pair.owner.close_session(pair.owner_session)
    await pair.owner.close_session(pair.owner_session)
    transfer.free()


async def closed_exposes_nothing(pair: DataPathPair) -> None:
    transfer = Transfer(pair, 100)
    await pair.owner.close()
    await pair.owner.close()
    try:
        await transfer.expose()
    except PathUnavailable:
        pass
    else:
        raise AssertionError("a closed path exposed a span")
    await pair.consumer.close()
    try:
        await transfer.pull(Exposure(transfer_id=1, descriptor=bytes(29), grant=b""))
    except OrbitError:
        pass
    else:
        raise AssertionError("a closed path pulled")
    transfer.free()


PATH_CASES: Final[Mapping[str, PathCase]] = {
    case.__name__: case
    for case in (
        every_size,
        unaligned,
        two_at_once,
        many_at_once,
        progress_is_monotone,
        retract_during_pull,
        cancel_during_pull,
        owner_dies_during_pull,
        owner_is_dead_before,
        retracted_is_unknown,
        range_beyond_the_span,
        retract_is_idempotent,
        close_session_during_pull,
        closed_exposes_nothing,
    )
}
