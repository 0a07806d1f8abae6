"""`orbit bench` between the lab's two hosts: by real verbs, beside a chain of plain READs or WRITEs
on the same rail.
"""

from __future__ import annotations

import json
import sys

from orbit.bench.plan import Verb
from orbit.bench.report import Report, Source, reports_from_json
from tests.softroce.conftest import Lab

SIZE, OPS, WARMUP = 1 << 20, 4, 1
BENCH = (sys.executable, "-m", "orbit", "bench")
PATH_MTU_MAX = 4096


def measure(lab: Lab) -> tuple[Report, ...]:
    """A get into memory, and an engine's write, from B against a server on A."""
    listen = f"{lab.addresses['A']}:0"
    serve = [*BENCH, "serve", "--json", "--listen", listen, "--device", "rxa1"]
    server = lab.run_on("A", serve)
    assert server.stdout is not None
    address = json.loads(server.stdout.readline())["address"]
    what = ["--op", "get_into,write", "--size", str(SIZE), "--iterations", str(OPS)]
    where = ["--transport", "rdma", "--device", "rxb1", "--listen", f"{lab.addresses['B']}:0"]
    more = ["--warmup", str(WARMUP), "--verify", "full", "--json"]
    done = lab.call_on("B", [*BENCH, "run", address, *what, *where, *more])
    assert done.returncode == 0, done.stderr
    server.terminate()
    _, complaints = server.communicate(timeout=60)
    assert server.returncode == 0, complaints
    return reports_from_json(done.stdout)


def test_orbit_and_a_bare_chain_between_two_hosts(lab: Lab) -> None:
    before = {device: lab.sent_pkts(device) for device in ("rxa1", "rxb1")}
    reports = measure(lab)
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
    # Each rail carried one verb's payload, by orbit and by the chain: the devices say so.
    payload = 2 * (OPS + WARMUP) * SIZE
    for device, sent in before.items():
        assert lab.sent_pkts(device) - sent >= payload // PATH_MTU_MAX
