"""The measuring end: a plan is carried out against a server, size by size, and becomes a report.

Each size: the server offers what the operations work with, warm-up, the operations on the clock,
then the baselines, so that what changes on the machine changes for both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from ..errors import OrbitError, PathUnavailable, PeerProtocolError, PeerRefused, Unquiesced
from ..model import PathName, PathReason, PeerIdentity, Transport
from ..protocol.address import NodeAddress
from ..protocol.endpoint import Endpoint
from .baselines import baseline_rows
from .endings import Tally
from .ends import End, NodeSettings
from .figures import latency_of
from .header import circumstances
from .measuring import Measuring, Progress, ProgressSink
from .plan import Plan
from .problems import path_of
from .report import Report, Row, Source
from .server import ALIVE_EVERY_S, ASK
from .slots import bytes_needed
from .usage import Usage, Work
from .workloads import Bench, workload_of

__all__ = ["Desk", "Progress", "run_plan"]

_ASK_TIMEOUT_S: Final = 60.0
_BASELINE_TIMEOUT_S: Final = 240.0


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
    server is not there, busy, or was lost), UsageError (it refuses the plan), ConfigError.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    room = max(settings.buffer_bytes, bytes_needed(plan))
    settings = replace(settings, transport=plan.transport, buffer_bytes=room)
    end = End(settings, of_engine=plan.verb.of_engine)
    try:
        async with end:
            return await _run(plan, server, end, started, perftest, progress)
    except Unquiesced as error:  # of the end itself: what was measured is lost with it
        return Report(plan=plan, rows=(), problems=(f"unquiesced: {error}",), started=started)


async def _run(
    plan: Plan,
    server: NodeAddress | Endpoint,
    end: End,
    started: str,
    perftest: bool,
    progress: ProgressSink,
) -> Report:
    node = end.node
    address = server if isinstance(server, NodeAddress) else await node.find(str(server))
    node.add_peer(address)
    async with _served(Desk(end, address.identity), plan) as (desk, hello):
        rows: list[Row] = []
        problem = ""
        for size in plan.sizes:
            row, problem = await _measure(plan, size, desk, hello, progress)
            rows.append(row)
            if problem:
                break
            if plan.baseline and row.ops:
                rows += await _baselines(plan, row, desk, perftest, progress)
        return Report(
            plan=plan,
            rows=tuple(rows),
            client=circumstances(node.address.rails, rdma=str(node.statistics().rdma_reason)),
            server=hello["circumstances"],
            problems=(problem,) if problem else (),
            started=started,
        )


class Desk:
    """Where a client asks its server; over TCP always, so that asking costs no crossing."""

    def __init__(self, end: End, server: PeerIdentity) -> None:
        self.end = end
        self.server = server

    async def ask(self, kind: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Raises PeerRefused (the server's no), and as a call."""
        timeout = _BASELINE_TIMEOUT_S if kind == "baseline" else _ASK_TIMEOUT_S
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
    workload = workload_of(plan, Bench(desk.end, desk.server, desk.ask, size, offer))
    try:
        await workload.open()
        measuring = Measuring(plan, size, workload, desk.end.path_text, progress)
        warm = await measuring.warm_up()
        if warm.problem:
            return _row(plan, size, Tally(desk.end.path_text)), warm.problem
        there = await desk.usage()
        here = Usage.of(desk.end.node, measuring.aside_s)
        tally = await measuring.run()
        here = Usage.of(desk.end.node, measuring.aside_s).since(here)
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
    found = {path_of(path) for path in tally.paths}
    return PathName(found.pop()) if len(found) == 1 and found <= set(PathName) else None


async def _baselines(
    plan: Plan, row: Row, desk: Desk, perftest: bool, progress: ProgressSink
) -> list[Row]:
    progress(Progress(row.size, Source.SOCKET, 0.0, 0.0))
    return await baseline_rows(
        plan,
        row.size,
        row.ops,
        desk.ask_baseline,
        desk.end.settings,
        perftest=perftest,
        rails=desk.end.node.address.rails,
        path=row.path,
    )
