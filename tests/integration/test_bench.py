"""orbit bench: real nodes that measure each other, the command, and who is served when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.bench import server as bench_server
from orbit.bench.client import Desk, Incomplete, Progress, run_plan
from orbit.bench.ends import End, NodeSettings
from orbit.bench.offers import Offer, offer_for
from orbit.bench.plan import Plan, Verb, Verify
from orbit.bench.problems import problems_of
from orbit.bench.report import Report, Source
from orbit.bench.server import BenchServer
from orbit.errors import PeerLost, PeerRefused
from orbit.model import Transport
from orbit.protocol.address import NodeAddress
from orbit.testing import waiting
from tests.integration import cli
from tests.scenarios.scripted_rails import scripted_rails

Run = Callable[[Any], Any]
LARGE = 300 << 10  # more than one message may carry
HERE = NodeSettings()


def plan_of(verb: Verb, *sizes: int, **changes: Any) -> Plan:
    more = {"iterations": 6, "transport": Transport.TCP, "baseline": False, **changes}
    return Plan(verb=verb, sizes=sizes, **more)


def check(report: Report) -> None:
    assert problems_of(report, {}) == report.problems == ()
    for row in report.rows:
        assert (row.ops, row.errors, row.verified) == (6, 0, 6)
        assert row.latency.p50 > 0


@pytest.mark.parametrize("verb", Verb)
def test_every_verb_by_tcp(run_async: Run, verb: Verb) -> None:
    async def main() -> None:
        async with BenchServer(HERE) as server:
            plan = plan_of(verb, 1, 4096, LARGE, batch=2, inflight=2, verify=Verify.FULL)
            report = await run_plan(plan, server.address, HERE)
            check(report)
            assert [dict(row.paths) for row in report.rows] == [{"tcp": 6}] * 3
            if not verb.of_messages:
                assert {"acquire", "total"} <= set(report.rows[2].phases)
                assert report.rows[2].client.copied_bytes == 0
            if verb is Verb.GET_INTO:
                phases = report.rows[2].phases
                assert 0 < phases["release"] < phases["total"]

    run_async(main())


@pytest.mark.parametrize(
    ("verb", "host_memory"),
    [
        (Verb.MSG, "direct"),
        (Verb.GET_INTO, "direct"),
        (Verb.READ, "direct"),
        (Verb.READ, "staged"),
    ],
)
def test_the_rails_that_ran(run_async: Run, verb: Verb, host_memory: str) -> None:
    """Two devices a side; the names are those of the client's."""
    staged = host_memory == "staged"

    async def main() -> None:
        theirs = replace(HERE, devices=("a0", "a1"), host_memory=host_memory)
        ours = replace(HERE, devices=("b0", "b1"), host_memory=host_memory)
        async with BenchServer(theirs) as server:
            plan = plan_of(verb, LARGE, transport=Transport.RDMA)
            report = await run_plan(plan, server.address, ours)
        check(report)
        (row,) = report.rows
        if verb is Verb.MSG:  # the payload was fetched: by RDMA, nobody says over which of both
            assert row.path == "rdma"
        elif verb is Verb.READ:
            assert row.path == "rdma/b0:1 gid 1 + b1:1 gid 1"
            assert row.client.copied_bytes == (6 * LARGE if staged else 0)
        else:
            assert row.path == "rdma/b0:1 gid 1"
            assert row.client.copied_bytes == 0
        assert row.client.crossings
        assert row.server.crossings

    with scripted_rails(("a0", "a1", "b0", "b1"), lambda config: config.device.split(",")):
        run_async(main())


@pytest.mark.parametrize("verb", [Verb.GET, Verb.READ, Verb.PUT, Verb.MSG])
def test_wrong_bytes_end_the_run(
    run_async: Run, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    """The server has, or expects, those of another seed."""

    def offer_wrong(plan: Plan, size: int, end: End) -> Offer:
        return offer_for(replace(plan, seed=plan.seed + 1), size, end)

    monkeypatch.setattr(bench_server, "offer_for", offer_wrong)

    async def main() -> None:
        async with BenchServer(HERE) as server:
            plan = plan_of(verb, 5000, 6000)
            report = await run_plan(plan, server.address, HERE)
        assert len(report.rows) == 1
        (problem,) = report.problems
        assert problem.startswith(f"bytes differ: {verb} of 5000 bytes")

    run_async(main())


def test_a_server_takes_one_client_and_no_larger_plan(run_async: Run) -> None:
    async def main() -> None:
        async with BenchServer(replace(HERE, buffer_bytes=1 << 20)) as server:
            endpoint = server.address.endpoints[0]
            long = plan_of(Verb.GET_INTO, 64, iterations=None, duration=60.0)
            first = asyncio.ensure_future(run_plan(long, endpoint, HERE))
            await waiting.until(lambda: server.busy)
            with pytest.raises(PeerRefused, match="busy"):
                await run_plan(plan_of(Verb.GET, 64), endpoint, HERE)
            first.cancel()
            await asyncio.wait([first])
            check(await run_plan(plan_of(Verb.GET, 64), endpoint, HERE))
            with pytest.raises(PeerRefused, match="the plan needs 4194304 bytes"):
                await run_plan(plan_of(Verb.GET, 2 << 20), endpoint, HERE)

    run_async(main())


def test_a_killed_client_frees_its_server(run_async: Run) -> None:
    words = ("run", "--op", "get_into", "--size", "4K", "--duration", "60", "--transport", "tcp")

    async def main(text: str) -> None:
        server = NodeAddress.parse(text)
        async with End(HERE, of_engine=False) as end:
            end.node.add_peer(server)
            desk = Desk(end, server.identity)
            with cli.start("bench", *words, text) as client:
                await refused(desk, "busy")
                client.kill()
                await refused(desk, "not_served")  # far sooner than by its silence
            check(await run_plan(plan_of(Verb.GET, 64), server, HERE))

    async def refused(desk: Desk, reason: str) -> None:
        async with asyncio.timeout(20):
            while await refusal(desk) != reason:  # noqa: ASYNC110  (only asking tells)
                await asyncio.sleep(0.02)

    async def refusal(desk: Desk) -> str:
        with pytest.raises(PeerRefused) as caught:
            await desk.ask("alive")
        return caught.value.reason

    with cli.start("bench", "serve", "--json") as process:
        assert process.stdout is not None
        run_async(main(json.loads(process.stdout.readline())["address"]))


def test_a_server_that_dies_costs_the_sizes_that_follow_only(run_async: Run) -> None:
    async def main(text: str, kill: Callable[[], None]) -> None:
        def step(progress: Progress) -> None:
            if progress.size == 4096:
                kill()

        plan = plan_of(Verb.GET_INTO, 64, 4096, iterations=None, duration=0.2)
        with pytest.raises(Incomplete) as raised:
            await run_plan(plan, NodeAddress.parse(text), HERE, progress=step)
        report = raised.value.report
        assert [row.size for row in report.rows] == [64]
        assert isinstance(raised.value.cause, PeerLost)
        (problem,) = report.problems
        assert problem.startswith("get_into: ended early: ")
        assert "get_into 4096 bytes: not measured" in problems_of(report, {})

    with cli.start("bench", "serve", "--json") as process:
        assert process.stdout is not None
        run_async(main(json.loads(process.stdout.readline())["address"], process.kill))


def test_a_run_that_is_stopped_keeps_its_sizes(run_async: Run) -> None:
    async def main() -> None:
        seen = asyncio.Event()
        async with BenchServer(HERE) as server:
            plan = plan_of(Verb.GET_INTO, 64, 4096, iterations=None, duration=0.2)

            def step(progress: Progress) -> None:
                if progress.size == 4096:
                    seen.set()

            run = asyncio.ensure_future(run_plan(plan, server.address, HERE, progress=step))
            await seen.wait()
            run.cancel()
            with pytest.raises(Incomplete) as raised:
                await run
            assert isinstance(raised.value.cause, asyncio.CancelledError)
            assert raised.value.report.problems == ("get_into: ended early: stopped",)
            await waiting.until(lambda: not server.busy)

    run_async(main())


def test_a_server_ends_with_whoever_reads_its_line() -> None:
    with cli.start("bench", "serve", "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(cli.TIMEOUT_S) == 0


def test_the_command_measures_between_two_processes() -> None:
    words = (
        "--op",
        "get_into,unary",
        "--size",
        "4K,64K",
        "--iterations",
        "5",
        "--transport",
        "tcp",
    )
    done = cli.orbit("bench", "loop", *words, "--json")
    assert done.status == 0, done.err
    reports = [Report.from_json(line) for line in done.out.splitlines()]
    assert [report.plan.verb for report in reports] == [Verb.GET_INTO, Verb.UNARY]
    for report in reports:
        sources = [row.source for row in report.rows]
        assert sources == [Source.ORBIT, Source.SOCKET] * 2
        assert {row.path for row in report.rows} == {"tcp"}
        assert report.client["kernel"] == report.server["kernel"]


def test_a_path_that_is_not_there_is_told_at_once() -> None:
    done = cli.orbit("bench", "loop", "--transport", "rdma", "--json")
    assert (done.status, done.out, done.error["code"]) == (4, "", "path_unavailable")
    with cli.start("bench", "serve", "--json", "--transport", "tcp") as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        done = cli.orbit("bench", "run", address, "--transport", "rdma", "--json")
    assert (done.status, done.out, done.error["code"]) == (4, "", "path_unavailable")
