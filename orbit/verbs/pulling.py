"""One pull from its grant to the caller's bytes: target, share of the send queue, READs, delivery.

Owns the order of these steps and the way out of each. A short pull into memory that is registered
already runs through without giving way to the event loop. What a transfer may do is decided by its
machine; where the bytes land is `targets`' choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from ..errors import ClosedError, DeviceError, PathFailed
from ..transport.interface import Progress, PullReport, Target
from .admission import Share
from .requester import Transfer
from .settings import RdmaPathConfig
from .targets import PreparedTarget, Targets


class Pull:
    """Use once: `begin_nowait`, then `run` unless that said that the bytes are there."""

    def __init__(
        self,
        transfer: Transfer,
        target: Target,
        targets: Targets,
        config: RdmaPathConfig,
        progress: Progress | None,
    ) -> None:
        self._transfer = transfer
        self._target = target
        self._targets = targets
        self._config = config
        self._progress = progress
        self._prepared: PreparedTarget | None = None
        self._clock = time.perf_counter  # uvloop's own clock stands still within a callback
        self._phases: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        return self._transfer.record.length

    def cancel(self, cause: str) -> None:
        """Give up. `run` still returns or raises only when nothing can write the target."""
        self._transfer.cancel(cause)

    def begin_nowait(self) -> bool:
        """Start if nothing has to be waited for. True: every byte has arrived already."""
        began = self._clock()
        self._prepared = self._targets.prepare_nowait(
            self._transfer.member.device, self._target, self.nbytes
        )
        if self._prepared is None:
            return False
        self._phases["target"] = self._clock() - began
        try:
            share = self._transfer.member.admission.acquire_nowait(self.nbytes)
        except ClosedError:
            return False
        if share is not None:
            self._start(self._prepared, share)
        return self._transfer.delivered

    async def run(self) -> PullReport:
        """Raises PathFailed, Unquiesced. Not to be cancelled: use `cancel`."""
        prepared = self._prepared or await self._prepare()
        if not self._transfer.started:
            share = await self._wait_share()
            if share is not None:
                self._start(prepared, share)
        try:
            await asyncio.shield(self._transfer.finished)
        except PathFailed:
            await _let_go(prepared)
            raise
        return await self.deliver()

    async def deliver(self) -> PullReport:
        """The bytes are there: hand them over, and let go of what was taken for them."""
        assert self._prepared is not None
        arrived = self._clock()
        self._prepared.deliver(self.nbytes)
        last = "copy" if self._prepared.copies else "deregister"
        await _let_go(self._prepared)
        self._phases["read"] = self._transfer.read_s
        self._phases[last] = self._clock() - arrived
        return PullReport(phases=self._phases, counts={"bytes": self.nbytes})

    async def _prepare(self) -> PreparedTarget:
        began = self._clock()
        device = self._transfer.member.device
        try:
            prepared = await self._targets.prepare(device, self._target, self.nbytes)
        except PathFailed as error:
            self._transfer.cancel(str(error))  # hands the unused grant back by its receipt
            await asyncio.wait([self._transfer.finished])
            raise
        self._prepared = prepared
        self._phases["target"] = self._clock() - began
        return prepared

    async def _wait_share(self) -> Share | None:
        """None: the transfer ended while it waited, and `finished` tells why."""
        began, admission = self._clock(), self._transfer.member.admission
        waiting = asyncio.ensure_future(admission.acquire(self.nbytes))
        either: list[asyncio.Future[Any]] = [waiting, self._transfer.finished]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait([waiting])
            return None
        self._phases["queue"] = self._clock() - began
        with contextlib.suppress(ClosedError):
            return waiting.result()
        return None

    def _start(self, prepared: PreparedTarget, share: Share) -> None:
        if not self._transfer.startable:
            self._transfer.member.admission.release(share)
            return
        self._transfer.start(prepared.memory, share, self._progress)
        if self.nbytes <= self._config.nap_bytes_max:
            lane = self._transfer.member.queue_pair.lane
            lane.nap(self._transfer.finished.done, self._config.nap_us)


async def _let_go(prepared: PreparedTarget) -> None:
    # What cannot be deregistered stays registered and held: the device's close tries again.
    with contextlib.suppress(DeviceError, TimeoutError):
        await prepared.discard()
