"""One pull or push from its grants to the end: local memory, shares of the send queues, READs or
WRITEs, delivery.

Owns the order of these steps and the way out of each. A short transfer of one grant, with memory
that is registered already, runs through without giving way to the event loop. What a transfer may
do is decided by its machine; how memory is made reachable is `targets`' choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ClosedError, DeviceError, PathFailed, Unquiesced
from ..model import Direction
from ..transport.interface import Progress, PullReport
from .admission import Share
from .domain import Domain
from .naps import nap_until_done
from .requester import LocalMemory, RequesterMember, Transfer
from .settings import RdmaPathConfig
from .targets import Piece, PreparedMemory, Targets


class Move:
    """Use once: `begin_nowait`, then `run` unless that said that the bytes have moved. `transfers`
    are the lease's grants in payload order, `pieces` the local memory; their borders differ.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        pieces: Sequence[Piece],
        targets: Targets,
        config: RdmaPathConfig,
        progress: Progress | None,
    ) -> None:
        self._transfers = transfers
        self._pieces = pieces
        self._targets = targets
        self._config = config
        self._progress = progress
        self._direction = transfers[0].member.direction
        self._domains: Sequence[Domain] = list(
            dict.fromkeys(transfer.member.domain for transfer in transfers)
        )
        self._nbytes = sum(transfer.record.length for transfer in transfers)
        self._prepared: PreparedMemory | None = None
        self._moved: dict[int, int] = {}  # bytes, by the transfer's place
        self._failure: BaseException | None = None  # the first one of any transfer
        self._clock = time.perf_counter  # uvloop's own clock stands still within a callback
        self._phases: dict[str, float] = {}

    def cancel(self, cause: str) -> None:
        """Give up. `run` still returns or raises only when nothing can reach the local memory."""
        for transfer in self._transfers:
            transfer.cancel(cause)

    def begin_nowait(self) -> bool:
        """Start if nothing has to be waited for. True: every byte has moved already."""
        began = self._clock()
        self._prepared = self._targets.prepare_nowait(self._domains, self._pieces, self._direction)
        if self._prepared is None:
            return False
        self._phases["target"] = self._clock() - began
        if len(self._transfers) > 1:
            return False
        transfer = self._transfers[0]
        memory = self._prepared.memory[transfer.member.domain]
        try:
            share = transfer.member.admission.acquire_nowait(self._nbytes, len(memory.borders))
        except ClosedError:
            return False
        if share is not None:
            self._start(transfer, memory, share, self._progress)
            self._nap()
        return transfer.delivered

    async def run(self) -> PullReport:
        """Raises PathFailed, Unquiesced. Not to be cancelled: use `cancel`."""
        prepared = self._prepared or await self._prepare()
        if len(self._transfers) == 1:
            (memory,) = prepared.memory.values()
            await self._feed_all([(self._transfers[0], memory, self._progress)])
        else:
            await self._run_many(prepared.memory)
        ends = [transfer.finished for transfer in self._transfers]
        await asyncio.wait(ends)
        errors = [error for end in ends if (error := end.exception()) is not None]
        for error in errors:
            if isinstance(error, Unquiesced):
                raise error
        if errors:
            await _let_go(prepared)
            raise self._failure or errors[0]
        return await self.deliver()

    async def deliver(self) -> PullReport:
        """The bytes have moved: hand them over, and let go of what was taken for them."""
        assert self._prepared is not None
        arrived = self._clock()
        last = "copy" if self._prepared.copies else "deregister"
        try:
            await self._prepared.deliver()
        finally:
            await _let_go(self._prepared)
        spans = [transfer.moved_between for transfer in self._transfers]
        moving = max(end for _, end in spans) - min(begin for begin, _ in spans)
        self._phases["read" if self._direction is Direction.READ else "write"] = moving
        self._phases[last] = self._clock() - arrived
        rails = dict.fromkeys(transfer.member.device.name for transfer in self._transfers)
        return PullReport(self._phases, {"bytes": self._nbytes}, tuple(rails))

    async def _prepare(self) -> PreparedMemory:
        began = self._clock()
        try:
            prepared = await self._targets.prepare(self._domains, self._pieces, self._direction)
        except PathFailed as error:
            self.cancel(str(error))  # hands the unused grants back by their receipts
            await asyncio.wait([transfer.finished for transfer in self._transfers])
            raise
        self._prepared = prepared
        self._phases["target"] = self._clock() - began
        return prepared

    async def _run_many(self, memory: Mapping[Domain, LocalMemory]) -> None:
        """Each queue pair's transfers in order, all queue pairs at once. The first failure gives up
        the rest.
        """
        waiting: dict[RequesterMember, list[_Part]] = {}
        offset = 0
        for place, transfer in enumerate(self._transfers):
            transfer.finished.add_done_callback(self._one_finished)
            part = memory[transfer.member.domain].cut(offset, transfer.record.length)
            progress = None if self._progress is None else self._share_of_progress(place)
            waiting.setdefault(transfer.member, []).append((transfer, part, progress))
            offset += transfer.record.length
        await asyncio.gather(*(self._feed_all(parts) for parts in waiting.values()))
        self._nap()

    async def _feed_all(self, parts: Sequence[_Part]) -> None:
        """Start them, one after the other, as the send queue of their queue pair has room."""
        while parts and (parts := self._feed(parts)):
            (transfer, memory, progress), *parts = parts
            share = await self._wait_share(transfer, len(memory.borders))
            if share is not None:
                self._start(transfer, memory, share, progress)

    def _feed(self, parts: Sequence[_Part]) -> Sequence[_Part]:
        """Start, in one post, those that have room now; the rest."""
        member = parts[0][0].member
        with member.one_post():
            for place, (transfer, memory, progress) in enumerate(parts):
                if transfer.started or transfer.finished.done():
                    continue
                share = None
                with contextlib.suppress(ClosedError):  # `finished` tells why
                    share = member.admission.acquire_nowait(
                        transfer.record.length, len(memory.borders)
                    )
                if share is None:
                    return parts[place:]
                self._start(transfer, memory, share, progress)
        return ()

    async def _wait_share(self, transfer: Transfer, cuts: int) -> Share | None:
        """None: the transfer ended while it waited, and `finished` tells why."""
        began, admission = self._clock(), transfer.member.admission
        with contextlib.suppress(ClosedError):  # `finished` tells why
            share = admission.acquire_nowait(transfer.record.length, cuts)
            if share is not None:
                return share
        waiting = asyncio.ensure_future(admission.acquire(transfer.record.length, cuts))
        either: list[asyncio.Future[Any]] = [waiting, transfer.finished]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait([waiting])
            return None
        self._phases["queue"] = self._phases.get("queue", 0.0) + self._clock() - began
        with contextlib.suppress(ClosedError):
            return waiting.result()
        return None

    def _start(
        self, transfer: Transfer, memory: LocalMemory, share: Share, progress: Progress | None
    ) -> None:
        if transfer.startable:
            transfer.start(memory, share, progress)
        else:
            transfer.member.admission.release(share)

    def _nap(self) -> None:
        """Wait for a short one here, where that is cheaper than one more wake-up."""
        if self._nbytes <= self._config.nap_bytes_max:
            nap_until_done(
                ((t.member.queue_pair.lane, t.finished) for t in self._transfers),
                self._config.nap_us,
            )

    def _share_of_progress(self, place: int) -> Progress:
        def moved(nbytes: int) -> None:
            self._moved[place] = nbytes
            if self._progress is not None:
                self._progress(sum(self._moved.values()))

        return moved

    def _one_finished(self, finished: asyncio.Future[None]) -> None:
        error = finished.exception()
        if error is not None and self._failure is None:
            self._failure = error
            self.cancel(f"another part failed: {error}")


_Part = tuple[Transfer, LocalMemory, Progress | None]


async def _let_go(prepared: PreparedMemory) -> None:
    # What cannot be deregistered stays registered and held: the device's close tries again.
    with contextlib.suppress(DeviceError, TimeoutError):
        await prepared.discard()
