"""What the server has ready for the operations of one size, by verb, and how it checks them.

Each holds memory of this end until it is closed. Facts go to the client as plain values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from ..engine import EngineRegion
from ..errors import UsageError
from ..model import Handle, RegionAccess
from ..node import Message, RegionGuard, RegisterOptions
from ..runtime.fresh_memory import fresh_memory
from .aside import Aside
from .ends import End
from .pattern import Pattern
from .plan import Plan, Verb, Verify
from .slots import VARIANTS, Slots, number_of
from .workloads.messages import ECHO, SINK

_RETAIN = RegisterOptions(retain=True)


class Offer(Protocol):
    """Made for one size of one plan."""

    async def open(self) -> Mapping[str, object]:
        """Take memory, register it; the facts that the client works with."""

    def differs(self, worker: int, turn: int) -> list[int] | None:
        """Item and byte of the first one that is wrong, of an operation that moved bytes here.
        Raises UsageError for one that moved none.
        """

    async def close(self) -> None:
        """Give all of it back."""


def offer_for(plan: Plan, size: int, end: End) -> Offer:
    match plan.verb:
        case Verb.MSG:
            return Sinks(plan, size, end)
        case Verb.UNARY:
            return Echo(plan, size, end)
        case Verb.GET | Verb.GET_INTO:
            return Payloads(plan, size, end)
        case Verb.PUT:
            return Destinations(plan, size, end)
        case Verb.READ:
            return ReadRegion(plan, size, end)
        case Verb.WRITE:
            return WriteRegion(plan, size, end)


class _ReadOnly:
    """The client sees for itself what it got."""

    def differs(self, worker: int, turn: int) -> list[int] | None:
        raise UsageError("nothing was written here")


class _Written:
    """Memory that operations fill: a piece for each of their items."""

    def __init__(self, plan: Plan, size: int, end: End) -> None:
        self._end = end
        self._plan = plan
        self._pattern = Pattern(plan.seed)
        self._slots = Slots(plan.inflight, plan.batch, size, self._pattern)

    def differs(self, worker: int, turn: int) -> list[int] | None:
        slots = self._slots
        for item, piece in enumerate(slots.pieces(worker)):
            number = slots.number(worker, turn, item)
            byte = self._pattern.differs(piece, number, self._plan.verify)
            if byte is not None:
                return [item, byte]
        return None


class Payloads(_ReadOnly):
    """Payloads to get, in registered memory where this end has RDMA."""

    def __init__(self, plan: Plan, size: int, end: End) -> None:
        self._node = end.node
        self._pattern = Pattern(plan.seed)
        self._size = size
        self._handles: list[Handle] = []

    async def open(self) -> Mapping[str, object]:
        for number in range(VARIANTS):
            payload = fresh_memory(self._size)
            await Aside().run(self._size, self._pattern.fill, payload, number)
            self._handles.append(await self._node.register_data_pinned(payload, _RETAIN))
        return {"handles": [str(handle) for handle in self._handles]}

    async def close(self) -> None:
        while self._handles:
            await self._node.withdraw(self._handles.pop())


class Destinations(_Written):
    """Places to put into, all of one region."""

    def __init__(self, plan: Plan, size: int, end: End) -> None:
        super().__init__(plan, size, end)
        self._size = size
        self._handles: list[Handle] = []
        self._region: RegionGuard | None = None

    async def open(self) -> Mapping[str, object]:
        node = self._end.node
        await self._slots.fill_all()
        region = self._region = await node.register_owned(self._slots.memory)
        pieces = [region.slice(at, self._size) for at in self._slots.places]
        for piece in pieces:
            self._handles.append(await node.register_destination(piece, _RETAIN))
        return {"handles": [str(handle) for handle in self._handles]}

    async def close(self) -> None:
        while self._handles:
            await self._end.node.withdraw(self._handles.pop())
        if self._region is not None:
            await self._region.unregister()


class ReadRegion(_ReadOnly):
    """A region of an engine with the payloads behind each other."""

    def __init__(self, plan: Plan, size: int, end: End) -> None:
        self._end = end
        pattern = Pattern(plan.seed)
        self._slots = Slots(1, VARIANTS, size, pattern)  # whose first turn is just that
        self._region: EngineRegion | None = None

    async def open(self) -> Mapping[str, object]:
        engine = self._end.engine
        await self._slots.fill_all()
        self._region = await engine.register(self._slots.memory, access=RegionAccess.READ)
        return {"region": str(self._region.remote())}

    async def close(self) -> None:
        if self._region is not None:
            await self._region.unregister()


class WriteRegion(_Written):
    """A region of an engine, with a place for each item."""

    _region: EngineRegion | None = None

    async def open(self) -> Mapping[str, object]:
        engine = self._end.engine
        await self._slots.fill_all()
        self._region = await engine.register(self._slots.memory, access=RegionAccess.WRITE)
        return {"region": str(self._region.remote())}

    async def close(self) -> None:
        if self._region is not None:
            await self._region.unregister()


class Sinks:
    """A handler for each worker of the client, which keeps the payloads of its last operation."""

    def __init__(self, plan: Plan, size: int, end: End) -> None:
        self._node = end.node
        self._plan = plan
        self._size = size
        self._pattern = Pattern(plan.seed)
        kept = 0 if plan.verify is Verify.OFF else plan.batch
        self._last = [deque[memoryview](maxlen=kept) for _ in range(plan.inflight)]

    async def open(self) -> Mapping[str, object]:
        for worker, last in enumerate(self._last):
            self._node.handler(f"{SINK}.{worker}", partial(_keep, last))
        return {}

    def differs(self, worker: int, turn: int) -> list[int] | None:
        plan, last = self._plan, self._last[worker]
        left = list(last)
        for item in range(plan.batch):
            if not left:
                return [item, 0]
            # In any order: a large payload is fetched before its handler runs.
            wrong = [self._wrong(left[0], worker, turn, item)]
            if wrong[0] is not None:
                wrong = [self._wrong(payload, worker, turn, item) for payload in left]
            if None not in wrong:
                return [item, wrong[0] or 0]
            del left[wrong.index(None)]
        return None

    async def close(self) -> None:
        for worker in range(len(self._last)):
            self._node.remove_handler(f"{SINK}.{worker}")

    def _wrong(self, payload: memoryview, worker: int, turn: int, item: int) -> int | None:
        plan = self._plan
        number = number_of(plan.inflight, plan.batch, worker, turn, item)
        return self._pattern.wrong(payload, self._size, number, plan.verify)


def _keep(last: deque[memoryview], message: Message) -> None:
    last.append(message.payload)


class Echo(_ReadOnly):
    """Answers each call with its payload."""

    def __init__(self, plan: Plan, size: int, end: End) -> None:
        self._end = end
        self._node = end.node
        self._size = size
        self._items = plan.items

    async def open(self) -> Mapping[str, object]:
        await self._end.map_registered(self._size, self._items)
        self._node.handler(ECHO, _echo)
        return {}

    async def close(self) -> None:
        self._node.remove_handler(ECHO)


def _echo(message: Message) -> memoryview:
    return message.payload
