"""read and write of a transfer engine, between a region here and one at the server."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine import EngineRegion, RemoteRegion, TransferRequest
from ...errors import PeerProtocolError
from ...model import RegionAccess
from ...runtime.engine.requests import Op
from ..endings import Mismatch, Moved
from ..pattern import Pattern
from ..plan import Plan, Verb, Verify
from ..slots import VARIANTS, Slots, stride_of, variant
from ..usage import Usage
from .shape import Bench


class Ranges:
    """The items of an operation are submitted together, each as a request of its own. Reads take
    the server's payloads in turn; writes have a place there for each piece of this end's memory.
    """

    def __init__(self, plan: Plan, bench: Bench) -> None:
        self._plan = plan
        self._bench = bench
        self._reads = self.checks_here = plan.verb is Verb.READ
        self._pattern = Pattern(plan.seed)
        begins = Pattern(plan.seed + self._reads)  # as nothing that the server has, to read into
        self._slots = Slots(plan.inflight, plan.batch, bench.size, begins)
        self._remote = RemoteRegion.parse(bench.offered("region", str))
        self._stride = stride_of(bench.size)
        pieces = VARIANTS if self._reads else plan.items
        if self._remote.nbytes != pieces * self._stride:
            raise PeerProtocolError(f"the server offers a region of {self._remote.nbytes} bytes")
        self._local: EngineRegion | None = None

    async def open(self) -> None:
        await self._slots.fill_all()
        self._local = await self._bench.end.engine.register(
            self._slots.memory, access=RegionAccess.LOCAL
        )

    async def close(self) -> None:
        if self._local is not None:
            await self._local.unregister()

    def ready(self, worker: int, turn: int) -> None:
        if not self._reads and self._plan.verify is not Verify.OFF:
            self._slots.fill(worker, turn, self._plan.verify)

    async def operate(self, worker: int, turn: int) -> Sequence[Moved]:
        requests = [self._request(worker, turn, item) for item in range(self._plan.batch)]
        results = await self._bench.end.engine.submit(requests)
        return [Moved(one.path, one.rails, phases=one.phases) for one in results]

    def differs(self, worker: int, turn: int) -> Mismatch | None:
        for item, piece in enumerate(self._slots.pieces(worker)):
            byte = self._pattern.differs(piece, variant(turn, item), self._plan.verify)
            if byte is not None:
                return Mismatch(item, byte)
        return None

    def went_by(self, here: Usage, there: Usage) -> str | None:
        return None  # each result has said it

    def _request(self, worker: int, turn: int, item: int) -> TransferRequest:
        assert self._local is not None
        size = self._bench.size
        here = self._slots.places_of(worker)[item]
        there = variant(turn, item) * self._stride if self._reads else here
        return TransferRequest(
            Op.READ if self._reads else Op.WRITE,
            self._local[here : here + size],
            self._remote[there : there + size],
            transport=self._plan.transport,
        )
