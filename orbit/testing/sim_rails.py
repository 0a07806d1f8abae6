"""Rails of simulated nodes, and the places for queue pairs on them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import BudgetExceeded
from ..model import PathReason
from ..protocol.messages import RailHint
from ..transport.rails import RailFacts


@dataclass(eq=False)
class SimRail:
    """One port. `active` is changed by the path that it belongs to."""

    nic: int
    device: str
    gid: str
    numa_node: int = -1
    active: bool = True
    detail: str = ""

    @property
    def facts(self) -> RailFacts:
        return RailFacts(
            nic=self.nic,
            device=self.device,
            port=1,
            gid=self.gid,
            active=self.active,
            numa_node=self.numa_node,
            detail=self.detail,
            reason=PathReason.OK if self.active else PathReason.PORT_DOWN,
        )

    @property
    def hint(self) -> RailHint:
        """What a hello says of it."""
        return RailHint(self.device, 1, self.gid, 1, 4096)


class SimEndpoints:
    """Places for queue pairs of one node in both roles: given out in the order of asking."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def take_nowait(self, count: int) -> bool:
        """Whether they were free, and nobody waits. Then they are taken."""
        if self._waiting or self.in_use + count > self.limit:
            return False
        self.in_use += count
        return True

    async def take(self, count: int, evict: Callable[[], bool]) -> None:
        """Waits for them; `evict` makes room if it can, and says so. Raises BudgetExceeded (more
        than there are).
        """
        if count > self.limit:
            raise BudgetExceeded("queue pairs", count, self.limit, self.in_use, "max_endpoints")
        while not self._waiting and self.in_use + count > self.limit and evict():
            pass
        if self.take_nowait(count):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = count, turn
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(count)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._serve()
            raise

    def give_back(self, count: int) -> None:
        self.in_use -= count
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.in_use + self._waiting[0][0] <= self.limit:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.in_use += count
                turn.set_result(None)
