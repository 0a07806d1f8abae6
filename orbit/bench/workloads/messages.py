"""msg and unary: one-way messages whose handler has run, and calls that answer their payload."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from ...model import PathName
from ...node import SendResult
from ...transport.messages import MessageLink
from ..endings import Mismatch, Moved
from ..pattern import Pattern
from ..plan import Plan, Verb, Verify
from ..slots import Slots
from ..usage import Usage
from .shape import Bench

SINK: Final = (
    "orbit.bench.sink"  # and a dot and the worker: a handler for each, which keeps its last ones
)
ECHO: Final = "orbit.bench.echo"

T = TypeVar("T")


class Messages:
    """The items of an operation are sent behind each other, and then all of them are waited for."""

    def __init__(self, plan: Plan, bench: Bench) -> None:
        self._plan = plan
        self._bench = bench
        self._node = bench.end.node
        self.checks_here = plan.verb is Verb.UNARY
        self._pattern = Pattern(plan.seed)
        self._slots = Slots(plan.inflight, plan.batch, bench.size, self._pattern)
        self._answers: dict[int, list[memoryview]] = {}  # by worker, of its last turn
        self._large = False  # a payload did not fit into a message
        self._link: MessageLink | None = None  # of the last message
        self._moved_by = Moved(PathName.LOCAL)

    async def open(self) -> None:
        await self._slots.fill_all()
        await self._bench.end.map_registered(self._bench.size, self._plan.items)

    async def close(self) -> None:
        """Nothing is held."""

    def ready(self, worker: int, turn: int) -> None:
        if self._plan.verify is not Verify.OFF:
            self._slots.fill(worker, turn, self._plan.verify)

    async def operate(self, worker: int, turn: int) -> Sequence[Moved]:
        pieces = self._slots.pieces(worker)
        demanded, server = self._plan.transport, self._bench.server
        if self._plan.verb is Verb.UNARY:
            calls = [self._node.unary(server, ECHO, one, transport=demanded) for one in pieces]
            self._answers[worker] = await _all(calls)
            return [self._moved(call) for call in calls]
        name = f"{SINK}.{worker}"
        sends = [self._node.sync(server, name, one, transport=demanded) for one in pieces]
        await _all(sends)
        return [self._moved(send) for send in sends]

    def differs(self, worker: int, turn: int) -> Mismatch | None:
        for item, answer in enumerate(self._answers.pop(worker, ())):
            number = self._slots.number(worker, turn, item)
            byte = self._pattern.wrong(answer, self._bench.size, number, self._plan.verify)
            if byte is not None:
                return Mismatch(item, byte)
        return None

    def went_by(self, here: Usage, there: Usage) -> str | None:
        """A message that is too long for its link has its payload fetched, by a path of its own."""
        if not self._large:
            return None
        end = self._bench.end
        if here.fetched_tcp + there.fetched_tcp:
            return end.path_text(PathName.TCP)
        rails = end.node.address.rails
        return end.path_text(PathName.RDMA, [rails[0].device] if len(rails) == 1 else ())

    def _moved(self, call: SendResult[Any]) -> Moved:
        link = None if call.route is None else call.route.link
        if link is not None and link is not self._link:
            self._link = link
            rail = link.statistics().rail
            self._moved_by = Moved(link.transport, (rail,) if rail else ())
            self._large = self._large or self._bench.size > link.ceiling_bytes
        return self._moved_by


async def _all(calls: Sequence[SendResult[T]]) -> list[T]:
    """Raises the first error, when all are over."""
    ended = await asyncio.gather(*(_outcome(call) for call in calls), return_exceptions=True)
    done: list[T] = []
    for one in ended:
        if isinstance(one, BaseException):
            raise one
        done.append(one)
    return done


async def _outcome(call: SendResult[T]) -> T:
    return await call
