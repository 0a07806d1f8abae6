"""Transfer engines in a simulated world, every transfer told to a model and judged by it.

The world composes the engine's core as orbit/engine.py does, over simulated links, paths and time.
What is random, and what goes wrong, is its user's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import EngineConfig
from ..errors import (
    BudgetExceeded,
    ClosedError,
    DeadlineExceeded,
    InternalError,
    OrbitError,
    PathUnavailable,
    RangeBusy,
    UnknownHandle,
    Unquiesced,
    UsageError,
    WrongDirection,
)
from ..memory.buffer import address_of
from ..memory.range_locks import LOCKS
from ..model import PathName, RegionAccess
from ..protocol.remote_region import RemoteRegion
from ..runtime.engine.batch import Batch
from ..runtime.engine.core import EngineCore
from ..runtime.engine.region import EngineRegion
from ..runtime.engine.requests import (
    RangeRequest,
    TransferRequest,
    TransferResult,
    TransferState,
)
from ..runtime.retained import proven, retained
from .engine_model import Attempt, EngineModel, Interval, ModelRegion, Part
from .faults import LinkFaults
from .flights import Flights
from .sim_railed_path import SimRailedPath
from .world import World, WorldNode

# A request of one range that fails with these has moved nothing.
_REFUSALS = (
    BudgetExceeded,
    PathUnavailable,
    RangeBusy,
    UnknownHandle,
    UsageError,
    WrongDirection,
)


@dataclass(eq=False)
class EngineNode:
    """One node and the engine on it."""

    node: WorldNode
    engine: EngineCore
    areas: list[Area] = field(default_factory=list)
    unproven: int = 0  # transfers whose end nobody will ever prove


@dataclass(eq=False)
class Area:
    """A region, and what it must hold. `remote` None: peers cannot reach it."""

    owner: EngineNode
    region: EngineRegion
    model: ModelRegion
    remote: RemoteRegion | None


@dataclass(frozen=True, eq=False)
class Ask:
    """One request to come. Several `parts` make a RangeRequest, and so does `as_ranges`."""

    op: str
    local: Area
    remote: Area
    parts: Sequence[Part]
    transport: str = "rdma"
    timeout: float | None = None
    as_ranges: bool = False

    def request(self) -> TransferRequest | RangeRequest:
        there = self.remote.remote
        assert there is not None
        if len(self.parts) == 1 and not self.as_ranges:
            ((here, far, nbytes),) = self.parts
            return TransferRequest(
                self.op,
                self.local.region[here : here + nbytes],
                there[far : far + nbytes],
                self.transport,
                self.timeout,
            )
        here_s, far_s, sizes = (list(column) for column in zip(*self.parts, strict=True))
        return RangeRequest(
            self.op, self.local.region, there, here_s, far_s, sizes, self.transport, self.timeout
        )


class EngineWorld(World):
    """`proofs_withheld` is set by whoever arms a fault that withholds one: then ends may stay
    unproven, and what they hold is held.
    """

    def __init__(self, seed: int = 0, faults: LinkFaults | None = None) -> None:
        super().__init__(seed, faults)
        self.flights = self.fabric.flights = Flights()
        self.model = EngineModel(_in_use)
        self.engines: list[EngineNode] = []
        self.proofs_withheld = False
        self.outcomes = dict.fromkeys(TransferState, 0)
        self._locks_before = LOCKS.held
        self._retained_before = len(retained())

    def add_engine(self, config: EngineConfig, *, rails: int = 2) -> EngineNode:
        """A node with that many rails (0: without RDMA) and an engine on it."""
        node = self.add_node(config.node_config(), rdma=bool(rails), rails=rails)
        made = EngineNode(node, EngineCore(config, node.rendezvous.parts()))
        self.engines.append(made)
        return made

    async def place(
        self, owner: EngineNode, contents: Sequence[bytes], access: RegionAccess | str
    ) -> list[Area]:
        """Regions with these contents, registered in one call."""
        first = len(owner.areas)
        name = f"region {{}} of {owner.node.identity.worker_id}"
        models = [ModelRegion(data, name.format(first + n)) for n, data in enumerate(contents)]
        regions = await owner.engine.register([model.view for model in models], access)
        reached = bool(RegionAccess(access).directions)
        made = [
            Area(owner, region, model, region.remote() if reached else None)
            for region, model in zip(regions, models, strict=True)
        ]
        owner.areas += made
        return made

    async def transfer(
        self,
        owner: EngineNode,
        asks: Sequence[Ask],
        *,
        timeout: float | None = None,
        cancel_after: float | None = None,
    ) -> list[TransferResult]:
        """One batch from its submission to its end; every result is judged. Raises what `submit`
        raises.
        """
        now = asyncio.get_running_loop().time()
        attempts = []
        for ask in asks:
            reads = ask.op == "read"
            attempt = Attempt(reads, ask.local.model, ask.remote.model, ask.parts, now)
            attempts.append(self.model.begin(attempt))
        try:
            batch = owner.engine.submit([ask.request() for ask in asks], timeout)
        except OrbitError:
            for attempt in attempts:
                self.model.failed(attempt, harmless=True)
            raise
        await self._wait(batch, cancel_after)
        results = batch.results()
        assert len(results) == len(asks), self.named("a batch is over without all its results")
        assert batch.nbytes == sum(result.nbytes for result in results)
        for ask, attempt, result in zip(asks, attempts, results, strict=True):
            self._judge(owner, ask, attempt, result)
        for name, (in_use, limit) in owner.engine.statistics().budgets.items():
            assert in_use <= limit, self.named(f"more than all of {name}: {in_use} of {limit}")
        return results

    def write(self, area: Area, offset: int, data: bytes) -> bool:
        """By the CPU, under the region's lock. Whether it could be had."""
        try:
            with area.region.cpu(offset, len(data), write=True) as view:
                view[:] = data
        except (RangeBusy, ClosedError):
            return False
        self.model.written(area.model, offset, data)
        return True

    async def close(self) -> None:
        """The engines first, then their nodes."""
        for made in self.engines:
            try:
                await made.engine.close(None)
            except (Unquiesced, DeadlineExceeded) as error:
                if not self.proofs_withheld:
                    raise AssertionError(self.named("an engine does not close")) from error
        for made in self.engines:
            path = made.node.rdma
            private = path.arrays.private if isinstance(path, SimRailedPath) else 0
            assert not private or self.proofs_withheld, self.named("private arrays are left")
        await super().close()

    def check_nothing_left(self) -> None:
        """After `close`: what every world must leave behind, which is nothing but what was never
        proven to be over.
        """
        assert not self.flights.conflicts, self.named(f"at once: {self.flights.conflicts[:3]}")
        assert not self.model.open_count, self.named("a transfer has no result")
        self._note_stuck()
        for made in self.engines:
            for area in made.areas:
                self.model.check(area.model)
        for made in self.engines:
            grants, _ = made.engine.statistics().budgets["max_grants"]
            assert grants >= made.unproven, self.named("what is unproven was given back")
        if self.proofs_withheld:
            self._forget_what_was_kept()
            return
        super().check_nothing_left()
        assert len(self.flights) == 0, self.named("memory is still in use")
        assert LOCKS.held == self._locks_before, self.named("range locks are left")
        assert len(retained()) == self._retained_before, self.named("something is retained")
        for made in self.engines:
            found = made.engine.statistics()
            in_use = {name: used for name, (used, _) in found.budgets.items() if used}
            waiting = sum(found.waiting.values())
            left = (in_use, found.in_flight_bytes, found.regions, found.running, waiting)
            assert left == ({}, 0, 0, 0, 0), self.named(f"left: {left}")
            assert not made.engine.retained(), self.named("an engine retains something")

    def named(self, text: str) -> str:
        """That, with the seed that repeats it."""
        return f"seed {self.network.seed}: {text}"

    # --- within -----------------------------------------------------------------------------------

    async def _wait(self, batch: Batch, cancel_after: float | None) -> None:
        if cancel_after is not None and not await batch.wait(cancel_after):
            batch.cancel()
        if not await batch.wait(120.0) and self.proofs_withheld:
            batch.cancel()  # it may wait for what will never be given back
        assert await batch.wait(600.0), self.named(f"a batch hangs: {batch.explain()}")

    def _judge(self, owner: EngineNode, ask: Ask, attempt: Attempt, result: TransferResult) -> None:
        """Whether that result may be, and whether the bytes are as it says."""
        self.outcomes[result.state] += 1
        self._note_stuck()
        state, error = result.state, result.error
        where = self.named(f"{ask.op} by {ask.transport} of {attempt.nbytes} bytes: {result}")
        assert result.path == PathName(ask.transport), where
        good = state is TransferState.SUCCEEDED
        assert result.nbytes == (attempt.nbytes if good else 0), where
        assert (error is None) == good, where
        assert not isinstance(error, InternalError), where
        assert result.locally_drained == (state is not TransferState.UNQUIESCED), where
        try:
            if good:
                if result.path is PathName.RDMA:
                    self._check_receipts(attempt, where)
                self.model.succeeded(attempt)
            elif state is TransferState.UNQUIESCED:
                assert self.proofs_withheld, where
                self.model.unproven(attempt)
                if "simulated" in str(error):  # and not just late
                    owner.unproven += 1
            else:
                refused = len(ask.parts) == 1 and isinstance(error, _REFUSALS)
                self.model.failed(attempt, harmless=refused and not self.proofs_withheld)
        except AssertionError as wrong:
            raise AssertionError(f"{wrong}; {where}") from wrong

    def _note_stuck(self) -> None:
        """What a source could not prove to be over may be written for ever."""
        while self.fabric.stuck:
            exposed = self.fabric.stuck.pop()
            for made in self.engines:
                for area in made.areas:
                    area.model.haunt(exposed.span.view)

    def _forget_what_was_kept(self) -> None:
        """The world is over, and with it the devices that might have come back to that memory."""
        for entry in retained()[self._retained_before :]:
            proven(entry)
        LOCKS.forget()

    def _check_receipts(self, attempt: Attempt, where: str) -> None:
        """None of them was lost since it began. Of copies in staging nothing is known here."""
        region, intervals = attempt.target
        for lost in self.fabric.receipts_lost:
            if lost.at_s >= attempt.begun:
                views = (region.view[begin:end] for begin, end in intervals)
                assert not lost.lies_in(views), f"a success without its receipt: {where}"


def _in_use(region: ModelRegion, intervals: Sequence[Interval]) -> bool:
    """Somebody holds a lock to write some of it."""
    first = address_of(region.view)
    ranges = [(first + begin, end - begin) for begin, end in intervals]
    try:
        LOCKS.lock_many(ranges, True, "the model").release()
    except RangeBusy:
        return True
    return False
