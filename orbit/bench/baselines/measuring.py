"""Which baselines stand beside one size of a plan, and their rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ...errors import OrbitError, UsageError
from ...model import PathName
from ...protocol.messages import RailHint
from ...verbs.provider import Provider
from ..paths import rail_words, rails_of, rdma_words, transport_of
from ..plan import Plan
from ..report import Row, Source
from . import perftest as perftest_tools
from . import read_chain, socket_loop
from .asking import Ask, Measured, Work, failed_row, row_of
from .chain_end import open_provider

if TYPE_CHECKING:
    from ..ends import NodeSettings


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
    tell: Callable[[Source], None] = lambda source: None,
) -> list[Row]:
    """One row of each baseline that does the work which orbit did by `path` (a row's): the socket
    loop always; on RDMA before it the chain for the verbs that move memory; and perftest where it
    is asked for. `rails` are those of this end's node; `tell` hears which baseline begins.

    A baseline that failed has a row without operations, whose `reason` says why.
    """
    work = Work.of(plan, size, ops)
    about = await ask("about", {})
    hosts, room = [str(host) for host in about["hosts"]], settings.buffer_bytes
    rail = rail_that_ran(path, rails) if about["rdma"] else None
    ran = PathName.TCP.value if rail is None else rdma_words([_words(rail)])
    runs: list[_Run] = []
    if rail is not None and not plan.verb.of_messages:
        chain = partial(read_chain.measure, work, ask, rail, room, provider)
        runs.append(_Run(work, Source.READ_CHAIN, ran, chain))
    if perftest:
        # Its latency tests have one message in flight.
        alike = replace(work, inflight=1, batch=1) if plan.verb.of_messages else work
        tool = partial(_perftest, alike, ask, hosts, rail, there=bool(about["perftest"]))
        runs.append(_Run(alike, Source.PERFTEST, ran, tool))
    sockets = partial(socket_loop.measure, work, ask, hosts, room)
    runs.append(_Run(work, Source.SOCKET, PathName.TCP.value, sockets))
    rows = []
    for run in runs:
        tell(run.source)
        rows.append(await run.row())
    return rows


class _Run(NamedTuple):
    work: Work
    source: Source
    path: str
    measure: Callable[[], Awaitable[Measured]]

    async def row(self) -> Row:
        try:
            return row_of(self.work, self.source, self.path, await self.measure())
        except OrbitError as error:
            return failed_row(self.work, self.source, self.path, error)


async def _perftest(
    work: Work, ask: Ask, hosts: Sequence[str], rail: RailHint | None, *, there: bool
) -> Measured:
    """`there`: the server has it. Raises OrbitError."""
    if rail is None:
        raise UsageError("perftest measures RDMA, which did not run")
    if not (there and perftest_tools.installed()):
        raise UsageError(f"perftest is not installed at the {'client' if there else 'server'}")
    return await perftest_tools.measure(work, ask, hosts, rail)


def rail_that_ran(path: str, rails: Sequence[RailHint]) -> RailHint | None:
    """The best of this end's rails that a row's path names. None: it was not RDMA."""
    if transport_of(path) != PathName.RDMA or not rails:
        return None
    ran = rails_of(path)
    found = (rail for rail in rails if rail.device in ran or _words(rail) in ran)
    return next(found, rails[0])


def _words(rail: RailHint) -> str:
    return rail_words(rail.device, rail.port, rail.gid_index)
