"""get, get_into and put: payloads by handle, memory at this end registered beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ...errors import PeerProtocolError
from ...model import Handle, Lease
from ...node import Put, RegionGuard, RegionSlice
from ..endings import Mismatch, Moved
from ..pattern import Pattern
from ..plan import Plan, Verb, Verify
from ..slots import VARIANTS, Slots, variant
from ..usage import Usage
from .shape import Bench


class Handles:
    """What both directions share."""

    checks_here = True

    def __init__(self, plan: Plan, bench: Bench) -> None:
        self._plan = plan
        self._bench = bench
        self._node = bench.end.node
        self._pattern = Pattern(plan.seed)
        self._handles = [Handle.parse(str(text)) for text in bench.offered("handles", list)]
        self._slots: Slots | None = None
        self._region: RegionGuard | None = None

    async def open(self) -> None:
        plan = self._plan
        if plan.verb is Verb.GET:
            return
        # What is read into begins as nothing that the server has.
        begins = Pattern(plan.seed + (plan.verb is not Verb.PUT))
        slots = self._slots = Slots(plan.inflight, plan.batch, self._bench.size, begins)
        await slots.fill_all()
        self._region = await self._node.register_owned(slots.memory)

    async def close(self) -> None:
        if self._region is not None:
            await self._region.unregister()

    def ready(self, worker: int, turn: int) -> None:
        """Nothing leaves this end."""

    def differs(self, worker: int, turn: int) -> Mismatch | None:
        """Nothing arrives at this end."""
        return None

    def went_by(self, here: Usage, there: Usage) -> str | None:
        return None  # each lease has said it

    def _registered(self, worker: int) -> list[RegionSlice]:
        assert self._slots is not None
        assert self._region is not None
        places = self._slots.places_of(worker)
        return [self._region.slice(at, self._bench.size) for at in places]

    def _moved(self, done: Lease | Put, released: float | None = None) -> Moved:
        """`released`: seconds for giving the lease back, which belong to the whole, too."""
        phases = dict(done.phases)
        if released is not None:
            phases |= {"release": released, "total": phases.get("total", 0.0) + released}
        return Moved(done.path, done.rails, done.reason, phases)


class Gets(Handles):
    """The server has VARIANTS payloads, which every piece of memory gets in turn. An operation is
    over when its leases are given back.
    """

    def __init__(self, plan: Plan, bench: Bench) -> None:
        super().__init__(plan, bench)
        if len(self._handles) != VARIANTS:
            raise PeerProtocolError(f"the server offers {len(self._handles)} payloads")
        self._fresh: dict[int, list[memoryview | None]] = {}  # by worker, of its last turn

    async def operate(self, worker: int, turn: int) -> Sequence[Moved]:
        plan, node = self._plan, self._node
        handles = [self._handles[variant(turn, item)] for item in range(plan.batch)]
        into = None if plan.verb is Verb.GET else self._registered(worker)
        self._fresh.pop(worker, None)
        got = await node.get_many(
            handles, into=into, transport=plan.transport, concurrency=plan.batch
        )
        self._fresh[worker] = [view for view, _ in got]
        arrived = time.perf_counter()
        leases = [lease for _, lease in got]
        await asyncio.gather(*map(node.detach, handles, leases))
        released = time.perf_counter() - arrived
        return [self._moved(lease, released) for lease in leases]

    def differs(self, worker: int, turn: int) -> Mismatch | None:
        kept = self._fresh.get(worker, [])
        views = [view for view in kept if view is not None]
        if self._slots is not None:
            views = self._slots.pieces(worker)
        for item, view in enumerate(views):
            number = variant(turn, item)
            byte = self._pattern.wrong(view, self._bench.size, number, self._plan.verify)
            if byte is not None:
                return Mismatch(item, byte)
        return None


class Puts(Handles):
    """The server has one destination for each piece of this end's memory."""

    checks_here = False

    async def open(self) -> None:
        await super().open()
        if len(self._handles) != self._plan.items:
            raise PeerProtocolError(f"the server offers {len(self._handles)} destinations")

    def ready(self, worker: int, turn: int) -> None:
        if self._plan.verify is not Verify.OFF:
            assert self._slots is not None
            self._slots.fill(worker, turn, self._plan.verify)

    async def operate(self, worker: int, turn: int) -> Sequence[Moved]:
        first = worker * self._plan.batch
        puts = [
            self._node.put(self._handles[first + item], source, transport=self._plan.transport)
            for item, source in enumerate(self._registered(worker))
        ]
        ended = await asyncio.gather(*puts, return_exceptions=True)
        done: list[Put] = []
        for one in ended:
            if isinstance(one, BaseException):
                raise one
            done.append(one)
        return [self._moved(put) for put in done]
