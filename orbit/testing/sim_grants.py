"""One transfer over simulated grants: each moves through its own array, and the transfer ends when
all of them have ended.

Owns the faults of one transfer: where it fails, stalls, or loses its completions or its receipt.
Which grants there are is told by the path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import DeadlineExceeded, PathFailed, Unquiesced
from ..memory.buffer import address_of
from ..model import PathName, PathReason
from ..transport.interface import Progress, Span, Target
from .fabric import SimExposed, copy_bytes
from .faults import PathFaults, RailFaults
from .flights import LostReceipt
from .sim_arrays import SimArray

Memory = Span | Target


@dataclass(slots=True, eq=False, kw_only=True)
class SimGrant(SimExposed):
    """A part of a lease that goes through one array. `whole`: its receipt was matched, which for
    those of `expose` to read nobody asks.
    """

    array: SimArray
    counted: bool = True


@dataclass(slots=True, eq=False)
class GrantPart:
    """A grant with the consumer's memory that it fills, or that fills it. `start`: its place in the
    transfer.
    """

    grant: SimGrant
    memory: Memory
    start: int

    @property
    def nbytes(self) -> int:
        return self.grant.span.nbytes


@dataclass(slots=True, eq=False)
class Fate:
    """What this transfer suffers; each None, or bytes of it that still arrive."""

    fail_at: int | None = None
    reason: PathReason = PathReason.GET_FAILED
    withheld_at: int | None = None
    receipt_lost: bool = False

    @classmethod
    def drawn(cls, faults: PathFaults, rail_faults: RailFaults) -> Fate:
        """What is next in these lists, which it uses up."""
        fate = cls()
        if faults.failures:
            fate.fail_at, fate.reason = faults.failures.pop(0)
        if rail_faults.withheld:
            fate.withheld_at = rail_faults.withheld.pop(0)
        if rail_faults.receipts_lost:
            rail_faults.receipts_lost -= 1
            fate.receipt_lost = True
        return fate


class GrantTransfer:
    """`check` raises when a grant cannot be used any more. `ghost` is told of bytes that may still
    arrive, at that place of a target, although their transfer has been given up, and `lost` of
    receipts that will not.
    """

    def __init__(
        self,
        parts: Sequence[GrantPart],
        faults: PathFaults,
        fate: Fate,
        no_progress_s: float,
        check: Callable[[GrantPart], None],
        ghost: Callable[[Memory, int, bytes], None],
        lost: list[LostReceipt],
        progress: Progress | None,
    ) -> None:
        self.moved = 0
        self.chunks = 0
        self._parts = parts
        self._faults = faults
        self._fate = fate
        self._no_progress_s = no_progress_s
        self._check = check
        self._ghost = ghost
        self._lost = lost
        self._progress = progress
        self._cause: BaseException | None = None  # the first failure

    async def run(self) -> None:
        """Raises the first failure when all have ended; Unquiesced before others."""
        tasks = [asyncio.ensure_future(self._move(part)) for part in self._parts]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        failures = [error for task in tasks if (error := task.exception()) is not None]
        unproven = next((error for error in failures if isinstance(error, Unquiesced)), None)
        if failures:
            raise unproven or self._cause or failures[0]

    async def _move(self, part: GrantPart) -> None:
        array = part.grant.array
        array.begin_move()
        try:
            await self._move_chunks(part)
        except Unquiesced as error:
            self._cause = self._cause or error
            array.retained = True
            array.lose("its completions are lost")
            raise
        except BaseException as error:  # other queue pairs of the array serve on
            self._cause = self._cause or error
            raise
        finally:
            array.end_move()

    async def _move_chunks(self, part: GrantPart) -> None:
        done = 0
        while done < part.nbytes:
            count = min(self._faults.chunk_bytes, part.nbytes - done)
            await asyncio.sleep(count / self._faults.bytes_per_s)
            if self._cause is not None:
                raise PathFailed(PathName.RDMA, PathReason.GET_FAILED, "another grant failed")
            await self._suffer(part, done, count)
            self._check(part)
            self._copy(part, done, count)
            done += count
            self.moved += count
            self.chunks += 1
            if self._progress is not None:
                self._progress(self.moved)
        last = part is self._parts[-1]
        if last and self._fate.receipt_lost:
            now = asyncio.get_running_loop().time()
            written = part.memory if isinstance(part.memory, Target) else part.grant.span
            lost = LostReceipt(now, int(address_of(written.view)))
            self._lost.append(lost)
            return
        part.grant.whole = True
        part.grant.over.set()

    async def _suffer(self, part: GrantPart, done: int, count: int) -> None:
        begin, end = part.start + done, part.start + done + count
        fate, stall = self._fate, self._faults.stall_at_bytes
        if fate.fail_at is not None and begin < max(fate.fail_at, 1) <= end:
            raise PathFailed(PathName.RDMA, fate.reason, "simulated")
        if stall is not None and begin >= stall:
            await asyncio.sleep(self._no_progress_s)
            raise DeadlineExceeded("progress of the simulated transfer", self._no_progress_s)
        if fate.withheld_at is not None and begin <= fate.withheld_at < end:
            late = bytes(part.grant.span.view[done : done + count])
            await asyncio.sleep(self._no_progress_s)
            if isinstance(part.memory, Target):
                self._ghost(part.memory, done, late)
            raise Unquiesced("a simulated queue pair", part.nbytes, "its completions are lost")

    def _copy(self, part: GrantPart, done: int, count: int) -> None:
        exposed, memory = part.grant.span, part.memory
        if isinstance(memory, Target):
            copy_bytes(exposed, memory, done, count)
        else:
            copy_bytes(memory, exposed, done, count)


def parts_of(grants: Sequence[SimGrant], cut: Callable[[int, int], Memory]) -> list[GrantPart]:
    """Each grant with its part of the consumer's memory, in payload order."""
    parts, start = [], 0
    for grant in grants:
        parts.append(GrantPart(grant, cut(start, grant.span.nbytes), start))
        start += grant.span.nbytes
    return parts


def end_grants(exposed: Sequence[SimExposed]) -> None:
    """They are gone from their arrays."""
    for grant in exposed:
        if isinstance(grant, SimGrant):
            grant.array.end_grant()


async def wait_receipts(grants: Sequence[SimGrant], timeout_s: float) -> None:
    """Until all have come, or will not come any more."""
    missing = [grant for grant in grants if not grant.whole and not grant.array.broken]
    if not missing:
        return
    waits = [asyncio.ensure_future(grant.over.wait()) for grant in missing]
    try:
        await asyncio.wait(waits, timeout=timeout_s)
    finally:
        for wait in waits:
            wait.cancel()
