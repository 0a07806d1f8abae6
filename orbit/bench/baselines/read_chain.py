"""Plain RC READs, or WRITEs, between the same two processes on the devices that orbit used: no
windows, no grants, no receipts. What is above this line is what the protocol costs.

One queue pair on one rail. The server's processor does nothing meanwhile, so its part costs 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ...errors import PathUnavailable, PeerProtocolError
from ...model import PathName, PathReason
from ...protocol.messages import RailHint
from ...verbs import records
from ...verbs.provider import Provider
from ...verbs.rail_pairs import pair_rails
from ..figures import latency_of
from ..plan import SIZE_MAX
from ..report import EndUsage
from .asking import (
    RUN_S,
    Ask,
    Measured,
    Request,
    Work,
    integer,
    rail_of,
    rail_to_wire,
)
from .chain_end import ChainEnd
from .chain_moves import Moved, Mover
from .crew import Crew

OPEN_S: Final = 30.0


def rail_for(mine: Sequence[RailHint], theirs: RailHint) -> RailHint:
    """That of ours which reaches the peer's best, as orbit chooses it. Raises PathUnavailable."""
    for _, index in pair_rails([theirs], mine):
        return mine[index]
    detail = f"no rail of the server has the link layer of {theirs.device}"
    raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, detail)


class ReadChainServer:
    """One run at a time; a new one ends the one before."""

    def __init__(
        self, rails: Sequence[RailHint], room: int, provider: Callable[[], Provider]
    ) -> None:
        self._rails = rails
        self._room = room
        self._provider = provider
        self._end: ChainEnd | None = None
        self._crew: Crew | None = None

    async def open(self, request: Request) -> dict[str, Any]:
        """`nbytes` of scratch memory that the client may read (or, `write`, write) by the rail
        that suits `rail`. Raises OrbitError.
        """
        await self.close()
        nbytes = integer(request, "nbytes", 1, SIZE_MAX)
        if nbytes > self._room:
            raise PeerProtocolError(f"baseline: {nbytes} bytes; this end may use {self._room}")
        write = integer(request, "write", 0, 1)
        access = records.ACCESS_REMOTE_WRITE if write else records.ACCESS_REMOTE_READ
        rail = rail_for(self._rails, rail_of(request, "rail"))
        self._crew = Crew(1, "orbit-read-chain")

        def make() -> ChainEnd:
            self._end = ChainEnd(self._provider(), rail, nbytes, access)
            return self._end

        [end] = await self._crew.run([make], OPEN_S)
        return end.offer

    async def connect(self, request: Request) -> dict[str, Any]:
        """To the client's queue pair. Raises OrbitError."""
        if self._end is None or self._crew is None:
            raise PeerProtocolError("baseline: no READ chain is open")
        await self._crew.run([partial(self._end.connect, request, initiator=False)], OPEN_S)
        return {}

    async def close(self) -> None:
        """Raises DeviceError."""
        crew, self._crew = self._crew, None
        if crew is not None:
            await _close(crew, lambda: self._end)
        self._end = None


async def measure(
    work: Work, ask: Ask, rail: RailHint, room: int, provider: Callable[[], Provider]
) -> Measured:
    """Raises OrbitError. Nothing is left on the device on any way out."""
    work.check_room(room)
    nbytes = work.nbytes * work.inflight
    shape = {"nbytes": nbytes, "write": int(work.to_server), "rail": rail_to_wire(rail)}
    offer = await ask("chain.open", shape)
    crew = Crew(1, "orbit-read-chain")
    made: list[ChainEnd] = []
    movers: list[Mover] = []

    def make() -> None:
        made.append(ChainEnd(provider(), rail, nbytes, 0))
        target = made[0].connect(offer, initiator=True)
        if target.nbytes < nbytes:
            raise PeerProtocolError(f"baseline: {target.nbytes} bytes were offered of {nbytes}")
        movers.append(Mover(made[0], target, work))

    def move() -> Moved:
        movers[0].move(work.warmup)
        return movers[0].move(work.ops)

    try:
        await crew.run([make], OPEN_S)
        await ask("chain.connect", made[0].offer)
        [found] = await crew.run([move], 2 * RUN_S)
    finally:
        for mover in movers:
            mover.stop()
        await _close(crew, lambda: made[0] if made else None)
        await ask("chain.close", {})
    return Measured(
        found.seconds,
        latency_of(found.samples),
        len(found.samples),
        EndUsage(cpu_s=found.cpu_s, crossings=found.crossings, copied_bytes=0),
        EndUsage(cpu_s=0.0, crossings=0, copied_bytes=0),
    )


async def _close(crew: Crew, end: Callable[[], ChainEnd | None]) -> None:
    """In the crew's one thread, so after whatever it does. Raises DeviceError."""

    def close() -> None:
        found = end()
        if found is not None:
            found.close()

    closing = crew.start([close])
    await crew.close()
    closing[0].result()
