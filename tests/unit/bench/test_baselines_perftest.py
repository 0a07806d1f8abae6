"""perftest's command lines and output, as recorded of version 6.06 on rdma_rxe, and its processes
with a program in its place.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orbit.bench.baselines import perftest
from orbit.bench.baselines.asking import Work, rail_to_wire
from orbit.bench.baselines.perftest import PerftestServer
from orbit.bench.baselines.perftest_commands import Run
from orbit.bench.plan import Verb
from orbit.errors import DeadlineExceeded, OrbitError, PathUnavailable, UsageError
from orbit.protocol.messages import RailHint

MINE = RailHint("rxb1", 1, "::ffff:198.18.1.2", 1, 4096)
HOST = "10.9.0.1"
THEIRS = RailHint("rxa1", 1, "::ffff:198.18.1.1", 1, 4096)

BANDWIDTH = """\
---------------------------------------------------------------------------------------
                    RDMA_Read BW Test
 TX depth        : 2
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0019 PSN 0x130e54 OUT 0x80 RKey 0x000a37 VAddr 0x007f9e900ef000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    6                109.65             93.03  \t\t   0.000093
---------------------------------------------------------------------------------------
"""
LATENCY = """\
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]
#, usec
1, 5081.57
2, 2026.12
3, 1421.71
4, 1551.56
5, 1976.2
---------------------------------------------------------------------------------------
 4096    6          1421.71        2026.12      1551.56  \t       1649.82     \t236.55
---------------------------------------------------------------------------------------
"""


def work(verb: Verb, **more: int) -> Work:
    values = {"size": 1 << 20, "batch": 1, "inflight": 1, "ops": 6, "warmup": 3} | more
    return Work(verb=verb, **values)


def test_the_command_names_the_rail_that_ran() -> None:
    run = Run.of(work(Verb.GET_INTO, batch=3, inflight=2))
    server = "ib_read_bw -F -d rxa1 -i 1 -x 1 -s 1048576 -n 18 -p 18515 -t 6".split()
    assert run.command(THEIRS, 18_515) == server
    client = run.command(MINE, 18_515, HOST)
    assert (client[3], client[-1]) == ("rxb1", HOST)


@pytest.mark.parametrize(
    ("verb", "tool"),
    [(Verb.READ, "ib_read_bw"), (Verb.PUT, "ib_write_bw"), (Verb.UNARY, "ib_send_lat")],
)
def test_each_verb_has_its_tool(verb: Verb, tool: str) -> None:
    assert Run.of(work(verb)).tool == tool


@pytest.mark.parametrize(
    "values",
    [
        ("ib_read_bw; true", 1, 5, 1),
        ("ib_read_bw", 0, 5, 1),
        ("ib_read_bw", 1, 4, 1),
        ("ib_read_bw", 1, 5, True),
    ],
)
def test_nothing_else_gets_into_a_command(values: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError):
        Run(*values)


def test_a_bandwidth_is_in_mebibytes() -> None:
    job = work(Verb.READ, batch=2, inflight=2, ops=3)
    found = Run.of(job).measured(job, BANDWIDTH)
    assert found is not None
    assert found.ops == 3
    assert found.seconds == pytest.approx(6 * (1 << 20) / (93.03 * (1 << 20)))
    assert found.latency.max == 0  # it tells none


def test_a_latency_is_half_of_a_round_trip() -> None:
    job = work(Verb.UNARY, size=4096)
    found = Run.of(job).measured(job, LATENCY)
    assert found is not None
    assert (found.ops, found.latency.max) == (5, pytest.approx(2 * 5081.57))
    assert found.latency.p50 == pytest.approx(2 * 1976.2)
    assert found.seconds == pytest.approx(2e-6 * (5081.57 + 2026.12 + 1421.71 + 1551.56 + 1976.2))


@pytest.mark.parametrize("verb", [Verb.READ, Verb.MSG])
def test_no_result_is_none(verb: Verb) -> None:
    assert Run.of(work(verb)).measured(work(verb), "Couldn't connect to 10.9.0.1:18515\n") is None


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """A program of that name first on the path. A server waits, as the real one does when nobody
    reaches it; a client does as it is told once there is a server.
    """
    tool = folder / "ib_read_bw"
    tool.write_text(
        f"""#!/bin/sh
cd {folder}
for last; do :; done
[ "$last" = {HOST} ] || {{ echo $$ > pid; mv pid server; exec sleep 60; }}
echo $$ >> clients
until [ -e server ]; do sleep 0.01; done
{client}
"""
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def measure() -> Any:
    async def run() -> Any:
        server = PerftestServer("127.0.0.1", [THEIRS])

        async def ask(kind: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
            if kind == "perftest.start":
                return await server.start(request)
            await server.close()
            return {}

        return await perftest.measure(work(Verb.READ), ask, [HOST], MINE)

    return asyncio.run(run())


def check_ended(folder: Path, clients: int) -> None:
    pids = (folder / "clients").read_text().split()
    assert len(pids) == clients
    for pid in (*pids, (folder / "server").read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_both_ends_run_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perftest, "_BETWEEN_S", 0.05)
    (tmp_path / "output").write_text(BANDWIDTH)
    stand_in(tmp_path, monkeypatch, "cat output")
    assert measure().ops == 6
    check_ended(tmp_path, 1)


def test_a_server_that_nobody_reaches_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perftest, "_BETWEEN_S", 0.01)
    monkeypatch.setattr(perftest, "_TRIES", 2)
    stand_in(tmp_path, monkeypatch, "echo 'Failed to connect'; exit 1")
    with pytest.raises(PathUnavailable, match="Failed to connect"):
        measure()
    check_ended(tmp_path, 2)


def test_a_client_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perftest, "_BETWEEN_S", 0.05)
    monkeypatch.setattr(perftest, "RUN_S", 1.0)
    stand_in(tmp_path, monkeypatch, "exec sleep 60")
    with pytest.raises(DeadlineExceeded):
        measure()
    check_ended(tmp_path, 1)


def test_a_tool_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not perftest.installed()
    request = {"tool": "ib_read_bw", "size": 1, "iterations": 5, "depth": 1}

    async def start() -> None:
        await PerftestServer("127.0.0.1", [THEIRS]).start({**request, "rail": rail_to_wire(MINE)})

    with pytest.raises(OrbitError) as raised:
        asyncio.run(start())
    assert "perftest" in raised.value.hint
