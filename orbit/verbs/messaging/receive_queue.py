"""The shared receive queue of one device: which slabs are posted, and posting them again.

Owns the slabs' posted state, the batched refill and the low-water event, which is armed again
after each firing. Credits keep the queue from running dry; the event counts the times that it came
close. It knows no peers, and what a packet says is others' business.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ...errors import DeviceError, OrbitError
from ...protocol.messaging.credits import REFILL_MAX
from ..offload import Offload
from ..provider import NativeSharedReceive
from ..records import pack_recv
from ..turn import Turn
from .slabs import Slabs
from .wr_ids import SLAB_MASK, receive_id

logger = logging.getLogger("orbit.verbs")

_ARM_TIMEOUT_S = 5.0
_POST_MAX = 256  # receives in one crossing


@dataclass(slots=True)
class ReceiveCounters:
    posted: int = 0  # receives, ever
    refills: int = 0  # crossings that posted them
    limit_hits: int = 0  # low-water events
    unknown: int = 0  # completions of no posting: late or doubled


class ReceiveQueue:
    """All slabs are posted by `fill`; `take` gives one back with its packet, `recycle` returns it,
    and `refill` posts what was recycled.
    """

    def __init__(
        self, turn: Turn, shared: NativeSharedReceive, slabs: Slabs, offload: Offload
    ) -> None:
        self._turn = turn
        self._shared = shared
        self._offload = offload
        self.slabs = slabs
        self._ids = [0] * slabs.count  # the current posting of each slab; 0: not posted
        self._generations = [0] * slabs.count
        self._recycled: list[int] = list(range(slabs.count))
        self.limit = min(REFILL_MAX, max(1, slabs.count // 4))
        self.counters = ReceiveCounters()
        self.failed: OrbitError | None = None

    @property
    def shared(self) -> NativeSharedReceive:
        return self._shared

    @property
    def native(self) -> int:
        return self._shared.native

    @property
    def posted(self) -> int:
        """Receives that wait for a packet now, as far as completions tell."""
        return len(self._ids) - self._ids.count(0)

    def fill(self) -> None:
        """Post every slab. Raises DeviceError."""
        self.refill()
        if self.failed is not None:
            raise self.failed

    async def arm(self) -> None:
        """Ask for the low-water event, once. Raises DeviceError, DeadlineExceeded."""
        await self._offload.run(
            "arming a shared receive queue",
            _ARM_TIMEOUT_S,
            lambda: self._shared.arm_limit(self.limit),
        )

    def take(self, wr_id: int) -> int:
        """The slab of a completed receive, which is the caller's until `recycle`; -1 (and counted)
        for a completion of no current posting.
        """
        slab = wr_id & SLAB_MASK
        if slab >= len(self._ids) or self._ids[slab] != wr_id:
            self.counters.unknown += 1
            return -1
        self._ids[slab] = 0
        return slab

    def recycle(self, slab: int) -> None:
        self._recycled.append(slab)
        if len(self._recycled) >= REFILL_MAX:
            self.refill()

    def refill(self) -> None:
        """Post what was recycled. A refusal is in `failed`: the slabs that it may have lost are not
        posted again, since the device may still own them.
        """
        while self._recycled and self.failed is None:
            batch, self._recycled = self._recycled[:_POST_MAX], self._recycled[_POST_MAX:]
            self._post(batch)

    async def limit_reached(self) -> None:
        """The event has fired: count it, refill, and ask for the next one."""
        self.counters.limit_hits += 1
        self.refill()
        try:
            await self.arm()
        except (OrbitError, TimeoutError) as error:
            # The event is an observation: without it credits go on keeping the queue filled.
            logger.warning("the low-water event could not be armed again: %s", error)

    def _post(self, batch: list[int]) -> None:
        slabs = self.slabs
        nbytes, lkey, addresses = slabs.slab_bytes, slabs.lkey, slabs.addresses
        packed = []
        for slab in batch:
            generation = self._generations[slab] = self._generations[slab] + 1
            wr_id = self._ids[slab] = receive_id(slab, generation)
            packed.append(pack_recv(wr_id, addresses[slab], nbytes, lkey))
        result = self._turn.post_shared_receive(self._shared.native, packed)
        self.counters.refills += 1
        if result.errno == 0:
            self.counters.posted += len(batch)
            return
        if result.accepted is not None:
            self.counters.posted += result.accepted
            for slab in batch[result.accepted :]:
                self._ids[slab] = 0
        self.failed = DeviceError("shared receive queue", "post_srq_recv", result.errno)
