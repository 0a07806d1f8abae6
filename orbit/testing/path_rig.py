"""What the cases of the DataPath contract work with: a pair of paths that share one epoch, and a
transfer between them in either direction.

All memory stands between guard bytes. Payloads have no power-of-two period, so that bytes at a
wrong offset never look right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..errors import DeadlineExceeded, PathFailed, PeerLost
from ..model import Direction, LeaseId
from ..transport.interface import DataPath, Exposure, Progress, Session, Span, Target
from ..transport.pieces import cut_target
from .pattern import pattern

GUARD_BYTES = 64
GUARD = b"\xa5"
REUSED = b"\xee"  # what memory holds that is its side's own again; no payload has a run of it
_ENDS = (PathFailed, PeerLost, DeadlineExceeded)


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
        """Writable memory that the consumer's path can fill, or send."""

    def free(self, memory: Target) -> None:
        """Give back what was allocated, whole."""

    async def kill_owner(self) -> None:
        """End the owner as the death of its process would."""


PathPairFactory = Callable[[], AbstractAsyncContextManager[DataPathPair]]
PathCase = Callable[[DataPathPair], Awaitable[None]]


class GuardedMemory:
    """Pieces of `sizes` bytes, each `offset` bytes behind a guard of its own and before another."""

    def __init__(
        self, allocate: Callable[[int], Target], sizes: Sequence[int], offset: int = 0
    ) -> None:
        self._begin = GUARD_BYTES + offset
        self._whole = [allocate(self._begin + size + GUARD_BYTES) for size in sizes]
        for memory in self._whole:
            memory.view[:] = GUARD * len(memory.view)
        self._parts = [
            cut_target(memory, self._begin, size)
            for memory, size in zip(self._whole, sizes, strict=True)
        ]

    @property
    def target(self) -> Target:
        first, *rest = self._parts
        return Target(first.view, first.pinned, tuple(rest))

    @property
    def span(self) -> Span:
        first, *rest = (Span(part.view, part.pinned) for part in self._parts)
        return Span(first.view, first.pinned, tuple(rest))

    def read(self) -> bytes:
        """All pieces, joined."""
        return b"".join(part.view for part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(len(part.view) for part in self._parts)

    def reuse(self) -> None:
        """The memory is its side's own again, and holds something else."""
        self.write(REUSED * self.nbytes)

    def write(self, payload: bytes) -> None:
        """Exactly over all pieces."""
        at = 0
        for part in self._parts:
            part.view[:] = payload[at : at + len(part.view)]
            at += len(part.view)

    def snapshot(self) -> list[bytes]:
        """Guards included."""
        return [bytes(memory.view) for memory in self._whole]

    def check_guards(self) -> None:
        for memory, part in zip(self._whole, self._parts, strict=True):
            view, end = memory.view, self._begin + len(part.view)
            assert view[: self._begin] == GUARD * self._begin, "written before the memory"
            assert view[end:] == GUARD * (len(view) - end), "written behind the memory"

    def free(self, pair: DataPathPair) -> None:
        for part in self._parts:
            part.view.release()
        for memory in self._whole:
            pair.free(memory)


class Transfer:
    """One lease: memory of the owner and of the consumer, and the steps between them."""

    def __init__(
        self,
        pair: DataPathPair,
        nbytes: int,
        lease: int = 1,
        direction: Direction = Direction.READ,
        *,
        owner_sizes: Sequence[int] | None = None,
        consumer_sizes: Sequence[int] | None = None,
        owner_offset: int = 0,
        consumer_offset: int = 0,
    ) -> None:
        self.pair = pair
        self.lease_id = LeaseId(lease)
        self.direction = direction
        self.owner = GuardedMemory(pair.allocate_source, owner_sizes or [nbytes], owner_offset)
        self.consumer = GuardedMemory(
            pair.allocate_target, consumer_sizes or [nbytes], consumer_offset
        )
        reads = direction is Direction.READ
        self.source = self.owner if reads else self.consumer
        self.target = self.consumer if reads else self.owner
        self.payload = pattern(self.source.nbytes, lease)
        self.source.write(self.payload)

    async def expose(self, direction: Direction | None = None) -> Exposure:
        """For this transfer's direction, unless told otherwise."""
        return await self.pair.owner.expose(
            self.pair.owner_session,
            self.owner.span,
            self.lease_id,
            direction=direction or self.direction,
        )

    async def move(self, exposure: Exposure, progress: Progress | None = None) -> None:
        """The consumer's part: pull, or push."""
        path, session = self.pair.consumer, self.pair.consumer_session
        if self.direction is Direction.READ:
            await path.pull(session, exposure, self.lease_id, self.consumer.target, progress)
        else:
            await path.push(session, exposure, self.lease_id, self.consumer.span, progress)

    async def retract(self, *, transferred: bool) -> None:
        await self.pair.owner.retract(
            self.pair.owner_session, self.lease_id, transferred=transferred
        )

    async def run(self) -> None:
        """The whole of a good transfer, checked."""
        await self.move(await self.expose())
        await self.finish()

    async def finish(self) -> None:
        """It went well: what the consumer has at once, the owner has when the lease has ended."""
        if self.direction is Direction.READ:
            self.check_whole()
        await self.retract(transferred=True)
        self.check_whole()

    async def until_moving(self, exposure: Exposure) -> asyncio.Task[None]:
        """A transfer whose first bytes have moved (or that is over already)."""
        moving = asyncio.Event()
        task = asyncio.ensure_future(self.move(exposure, lambda moved: moving.set()))
        task.add_done_callback(lambda _: moving.set())
        await moving.wait()
        return task

    def check_whole(self) -> None:
        assert self.target.read() == self.payload, "the target differs from the source"
        self.check_guards()

    def check_guards(self) -> None:
        self.owner.check_guards()
        self.consumer.check_guards()

    async def check_untouched(self) -> None:
        """All has ended: whatever the target holds, it holds for good, and the source is its
        side's to use for something else.
        """
        snapshot = self.target.snapshot()
        self.source.reuse()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert self.target.snapshot() == snapshot, "written after the transfer had ended"
        self.check_guards()

    def free(self) -> None:
        self.owner.free(self.pair)
        self.consumer.free(self.pair)


async def ended(task: asyncio.Task[None]) -> BaseException | None:
    """How the transfer ended; only ways that the contract names."""
    async with asyncio.timeout(30):
        await asyncio.wait([task])
    error = task.exception()
    assert error is None or isinstance(error, _ENDS), repr(error)
    return error


async def ended_move(transfer: Transfer, exposure: Exposure) -> BaseException | None:
    """As `ended`, of the whole of pull or push."""
    return await ended(asyncio.ensure_future(transfer.move(exposure)))
