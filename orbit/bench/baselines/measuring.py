"""Which baselines stand beside one size of a plan, and their rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import OrbitError
from ...model import PathName
from ...protocol.messages import RailHint
from ...verbs.provider import Provider
from ..plan import Plan
from ..report import Row, Source
from . import perftest as perftest_tools
from . import read_chain, socket_loop
from .asking import Ask, Measured, Work, failed_row, path_of, row_of
from .chain_end import open_provider
from .perftest_commands import SIZE_MAX

if TYPE_CHECKING:
    from ..ends import NodeSettings

_Measure = Callable[[], Awaitable[Measured]]


async def baseline_rows(
    plan: Plan,
    size: int,
    ops: int,
    ask: Ask,
    settings: NodeSettings,
    *,
    perftest: bool = False,
    rails: Sequence[RailHint] = (),
    path: str = PathName.TCP.value,
    provider: Callable[[], Provider] = open_provider,
) -> list[Row]:
    """One row of each baseline that does the work which orbit did by `path` (a row's): the socket
    loop always; on RDMA before it the chain for the verbs that move memory, and perftest when both
    ends have it. `rails` are those of this end's node.

    A baseline that failed has a row without operations, whose `reason` says why.
    """
    work = Work.of(plan, size, ops)
    about = await ask("about", {})
    hosts, room = [str(host) for host in about["hosts"]], settings.buffer_bytes
    rows = []
    rail = rail_that_ran(path, rails)
    if rail is not None and about["rdma"]:
        rdma = path_of(rail)
        if not plan.verb.of_messages:

            async def chain(rail: RailHint = rail) -> Measured:
                return await read_chain.measure(work, ask, rail, room, provider)

            rows.append(await _row(work, Source.READ_CHAIN, rdma, chain))
        if perftest and about["perftest"] and perftest_tools.installed() and size <= SIZE_MAX:
            # Its latency tests have one message in flight.
            alike = replace(work, inflight=1, batch=1) if plan.verb.of_messages else work

            async def tool(rail: RailHint = rail) -> Measured:
                return await perftest_tools.measure(alike, ask, hosts, rail)

            rows.append(await _row(alike, Source.PERFTEST, rdma, tool))

    async def sockets() -> Measured:
        return await socket_loop.measure(work, ask, hosts, room)

    rows.append(await _row(work, Source.SOCKET, PathName.TCP.value, sockets))
    return rows


def rail_that_ran(path: str, rails: Sequence[RailHint]) -> RailHint | None:
    """The best of this end's rails that a row's path names. None: it was not RDMA."""
    transport, _, named = path.partition("/")
    if transport != PathName.RDMA or not rails:
        return None
    ran = {part.strip() for part in named.split("+")}
    found = (rail for rail in rails if rail.device in ran or path_of(rail).partition("/")[2] in ran)
    return next(found, rails[0])


async def _row(work: Work, source: Source, path: str, measure: _Measure) -> Row:
    try:
        return row_of(work, source, path, await measure())
    except OrbitError as error:
        return failed_row(work, source, path, error)
