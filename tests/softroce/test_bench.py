"""`orbit bench` between the devices of the lab's two hosts, beside a chain of plain READs or WRITEs
on the same rail.

The server is a process of its own; the client is this one, since starting Python costs seconds on
an emulated processor.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from orbit.bench.plan import Verb
from orbit.bench.report import Source, reports_from_json
from orbit.cli.failures import ExitStatus
from orbit.cli.main import main
from tests.softroce.conftest import Lab

SIZE, OPS, WARMUP = 1 << 20, 4, 1
PATH_MTU_MAX = 4096
HANG_S = 120.0


@pytest.fixture
def server() -> Iterator[str]:
    """Its address. It ends well, with nothing left on its device."""
    serve = [sys.executable, *"-m orbit bench serve --json --device rxa1".split()]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
            process.terminate()
            assert process.wait(HANG_S) == ExitStatus.OK
        finally:
            process.kill()


def test_orbit_and_a_bare_chain_on_one_rail(
    lab: Lab, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {device: lab.sent_pkts(device) for device in ("rxa1", "rxb1")}
    words = (
        f"bench run {server} --transport rdma --device rxb1 --op get_into,write --size {SIZE}"
        f" --iterations {OPS} --warmup {WARMUP} --verify full --json"
    )
    assert main(words.split()) == ExitStatus.OK
    reports = reports_from_json(capsys.readouterr().out)
    assert [report.plan.verb for report in reports] == [Verb.GET_INTO, Verb.WRITE]
    for report in reports:
        assert report.problems == ()
        orbit, chain, sockets = report.rows
        sources = [row.source for row in report.rows]
        assert sources == [Source.ORBIT, Source.READ_CHAIN, Source.SOCKET]
        for row in (orbit, chain):
            assert dict(row.paths) == {"rdma/rxb1:1 gid 1": OPS}, row.reason
            assert row.client.crossings
        assert dict(sockets.paths) == {"tcp": OPS}
        assert (orbit.verified, orbit.client.copied_bytes) == (OPS, 0)
    # Each device sent one verb's payload, for orbit and for the chain.
    payload = 2 * (OPS + WARMUP) * SIZE
    for device, sent in before.items():
        assert lab.sent_pkts(device) - sent >= payload // PATH_MTU_MAX
