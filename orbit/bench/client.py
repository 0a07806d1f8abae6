"""The measuring end: a plan is carried out against a server, size by size, and becomes a report.

Each size: the server offers what the operations work with, warm-up, the operations on the clock,
then the baselines, so that what changes on the machine changes for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from ..errors import OrbitError, PathUnavailable, PeerProtocolError, PeerRefused, Unquiesced
from ..model import PathName, PathReason, PeerIdentity, Transport
from ..protocol.address import NodeAddress
from ..protocol.endpoint import Endpoint
from .baselines import ANSWER_S, baseline_rows
from .endings import Tally
from .ends import End, NodeSettings
from .figures import latency_of
from .header import circumstances
from .measuring import Measuring, Progress, ProgressSink
from .paths import transport_of
from .plan import Plan
from .report import Report, Row, Source
from .server import ALIVE_EVERY_S, ASK
from .slots import bytes_needed, check_memory
from .usage import Usage, Work
from .workloads import Bench, workload_of

__all__ = ["Desk", "Incomplete", "Progress", "run_plan"]

_ASK_TIMEOUT_S: Final = 60.0


class Incomplete(OrbitError):
    """A run that ended early with sizes measured. `report` has these, and why it ended among its
    problems; the cause is the error that ended it, or a cancellation.
    """

    code = "bench_incomplete"

    def __init__(self, report: Report, cause: BaseException) -> None:
        super().__init__(report.problems[-1])
        self.report = report
        self.cause = cause


@dataclass
class _Found:
    """What a run has come to so far."""

    plan: Plan
    started: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    client: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)

    def report(self) -> Report:
        return Report(
            plan=self.plan,
            rows=tuple(self.rows),
            client=self.client,
            server=self.server,
            problems=tuple(self.problems),
            started=self.started,
        )


def _nobody(progress: Progress) -> None:
    """Nobody watches."""


async def run_plan(
    plan: Plan,
    server: NodeAddress | Endpoint,
    settings: NodeSettings,
    *,
    perftest: bool = False,
    progress: ProgressSink = _nobody,
) -> Report:
    """Measure, and tell `progress` how far it is. Whatever went wrong with bytes or memory is among
    the report's problems, and ends the run.

    Raises PathUnavailable (a demanded transport, before anything is measured), PeerError (the
    server is not there, busy, or was lost), UsageError (it refuses the plan), ConfigError;
    Incomplete for each of them, and for a cancellation, once a size has been measured.
    """
    found = _Found(plan, datetime.now(UTC).isoformat(timespec="seconds"))
    check_memory(plan)
    room = max(settings.buffer_bytes, bytes_needed(plan))
    settings = replace(settings, transport=plan.transport, buffer_bytes=room)
    try:
        async with End(settings, of_engine=plan.verb.of_engine) as end:
            await _run(found, server, end, perftest, progress)
    except Unquiesced as error:  # of this end, as it closed
        found.problems.append(f"unquiesced: {error}")
    except (OrbitError, asyncio.CancelledError) as error:
        if not found.rows:
            raise
        why = str(error) or "stopped"
        found.problems.append(f"{plan.verb}: ended early: {why}")
        raise Incomplete(found.report(), error) from error
    return found.report()


async def _run(
    found: _Found,
    server: NodeAddress | Endpoint,
    end: End,
    perftest: bool,
    progress: ProgressSink,
) -> None:
    plan, node = found.plan, end.node
    address = server if isinstance(server, NodeAddress) else await node.find(str(server))
    node.add_peer(address)
    async with _served(Desk(end, address.identity), plan) as (desk, hello):
        found.client = circumstances(node.address.rails, rdma=str(node.statistics().rdma_reason))
        found.server = hello["circumstances"]
        for size in plan.sizes:
            row, problem = await _measure(plan, size, desk, hello, progress)
            found.rows.append(row)
            if problem:
                found.problems.append(problem)
                return
            if plan.baseline and row.ops:
                found.rows += await _baselines(plan, row, desk, perftest, progress)


class Desk:
    """Where a client asks its server; over TCP always, so that asking costs no crossing."""

    def __init__(self, end: End, server: PeerIdentity) -> None:
        self.end = end
        self.server = server

    async def ask(self, kind: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Raises PeerRefused (the server's no), and as a call."""
        timeout = ANSWER_S if kind == "baseline" else _ASK_TIMEOUT_S
        answer = await self.end.node.typed_unary(
            self.server,
            ASK,
            {"kind": kind, **(request or {})},
            transport=Transport.TCP,
            timeout=timeout,
        )
        if not isinstance(answer, dict):
            raise PeerProtocolError("the server of orbit bench answers with no mapping")
        if "refused" in answer:
            raise PeerRefused(
                str(answer["refused"]), str(answer["detail"]), hint=str(answer["hint"])
            )
        return answer

    async def ask_baseline(self, what: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self.ask("baseline", {"what": what, "request": dict(request)})

    async def usage(self) -> Usage:
        return Usage.from_wire(await self.ask("usage"))


@contextlib.asynccontextmanager
async def _served(desk: Desk, plan: Plan) -> AsyncIterator[tuple[Desk, dict[str, Any]]]:
    """The server is this client's within."""
    hello = await desk.ask("begin", {"plan": plan.to_json()})
    if plan.transport is Transport.RDMA and hello["rdma"] != PathReason.OK:
        raise PathUnavailable("rdma", hello["rdma"], f"at the server: {hello['rdma_detail']}")
    alive = asyncio.get_running_loop().create_task(_say_alive(desk))
    try:
        yield desk, hello
    finally:
        alive.cancel()
        await asyncio.wait([alive])
        with contextlib.suppress(OrbitError):  # the end of the connection says it, too
            await desk.ask("end")


async def _say_alive(desk: Desk) -> None:
    while True:
        await asyncio.sleep(ALIVE_EVERY_S)
        with contextlib.suppress(OrbitError):  # operations will hear of it
            await desk.ask("alive")


async def _measure(
    plan: Plan, size: int, desk: Desk, hello: Mapping[str, Any], progress: ProgressSink
) -> tuple[Row, str]:
    """One size: the row, and what ended the run."""
    offer = await desk.ask("offer", {"size": size})
    bench = Bench(desk.end, desk.server, desk.ask, size, offer)
    workload = workload_of(plan, bench)
    try:
        await workload.open()
        measuring = Measuring(plan, bench, workload, progress)
        warm = await measuring.warm_up()
        if warm.problem:
            return _row(plan, size, Tally(desk.end.path_text)), warm.problem
        there = await desk.usage()
        here = Usage.of(desk.end.node, measuring.aside.cpu_s)
        tally = await measuring.run()
        here = Usage.of(desk.end.node, measuring.aside.cpu_s).since(here)
        there = (await desk.usage()).since(there)
        by = workload.went_by(here, there)
        if by is not None and tally.ops:
            tally.paths = Counter({by: tally.ops})
    finally:
        await workload.close()
    work = Work(plan.verb, size, tally.ops * plan.batch, _one_path(tally))
    staged = desk.end.settings.host_memory == "staged"
    row = replace(
        _row(plan, size, tally),
        client=work.end_usage(here, staged=staged),
        server=work.end_usage(there, staged=hello["host_memory"] == "staged"),
    )
    return row, tally.problem


def _row(plan: Plan, size: int, tally: Tally) -> Row:
    return Row(
        source=Source.ORBIT,
        size=size,
        batch=plan.batch,
        inflight=plan.inflight,
        ops=tally.ops,
        errors=tally.errors,
        seconds=tally.clock.seconds(0.0),
        latency=latency_of(tally.latencies),
        path=tally.path,
        reason=tally.reason,
        paths=dict(tally.paths),
        phases=tally.phases(),
        verify=plan.verify,
        verified=tally.verified,
    )


def _one_path(tally: Tally) -> PathName | None:
    found = {transport_of(path) for path in tally.paths}
    return PathName(found.pop()) if len(found) == 1 and found <= set(PathName) else None


async def _baselines(
    plan: Plan, row: Row, desk: Desk, perftest: bool, progress: ProgressSink
) -> list[Row]:
    def tell(source: Source) -> None:
        progress(Progress(row.size, source, 0.0, 0.0))

    return await baseline_rows(
        plan,
        row.size,
        row.ops,
        desk.ask_baseline,
        desk.end.settings,
        perftest=perftest,
        rails=desk.end.node.address.rails,
        path=row.path,
        tell=tell,
    )
