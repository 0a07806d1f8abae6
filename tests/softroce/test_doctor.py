"""`orbit doctor` on real software devices: a grant with the device's own counters as proof, causes
told apart (C31), a link that is down (C12), packet sizes that differ (C36), and the way to a peer.

The command runs in this process: starting Python costs seconds on an emulated processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from orbit.cli.failures import ExitStatus
from orbit.cli.main import main
from orbit.config import NodeConfig, RdmaConfig
from orbit.doctor import seen
from orbit.doctor.finding import Finding, Level
from orbit.doctor.offer import serve_payload
from orbit.doctor.peer import peer_findings
from orbit.model import Transport
from tests.softroce import links
from tests.softroce.rails import discovered
from tests.softroce.test_engine_devices import closed_to_others, hidden, node_of

PLAIN_USER = 1000


@pytest.fixture(autouse=True)
def look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same state of ports and nodes: thousands of GID rows cost seconds here."""
    monkeypatch.setattr(seen, "discover", lambda **_: discovered())


def doctor(
    capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit status, and the findings by code and device."""
    status = main(["doctor", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    return status, {(f["code"], f["data"].get("device", "")): f for f in report["findings"]}


@contextlib.contextmanager
def plain_user() -> Iterator[None]:
    """For the question who may open what, which the kernel answers for the real user."""
    os.setresuid(PLAIN_USER, -1, -1)
    try:
        yield
    finally:
        os.setresuid(0, -1, -1)


def test_a_real_grant_and_what_the_device_counted(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = doctor(capsys, "--device", "rxb1", "--transport", "rdma")
    works = found["grant_works", "rxb1"]
    assert works["data"]["path"].startswith("rdma/rxb1:1 gid ")
    assert works["data"]["counter"] == "sent_pkts"
    assert works["data"]["counted"] >= 2  # at least the READ and the send that ends the grant
    steps = {"open", "probe", "bind", "connect", "acquire", "read", "receipt", "close"}
    assert steps <= set(works["data"]["seconds"])
    assert found["range_not_enforced", "rxb1"]["level"] == "warn"
    assert found["rdma_usable", ""]["data"]["devices"] == ["rxb1"]
    assert found["tcp_works", ""]["level"] == "ok"
    assert status == ExitStatus.WARNINGS, [f for f in found.values() if f["level"] == "fail"]


def test_causes_have_their_own_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """A node that is gone beside a link that is down, then a node that may not be opened beside a
    name that nothing has."""
    with hidden(node_of("rxb1")), links.down(2):
        status, found = doctor(capsys, "--no-grant", "--transport", "rdma")
    assert found["device_no_node", "rxb1"]["fix"]
    assert found["device_port_down", "rxb2"]["fix"]
    assert "ip link set" in found["device_port_down", "rxa2"]["fix"]
    assert "rxe_netdev_down" in {code for code, _ in found}
    assert found["rdma_untried", ""]["data"]["devices"] == ["rxa1"]
    assert status == ExitStatus.WARNINGS
    with closed_to_others(node_of("rxb1")), plain_user():
        status, found = doctor(capsys, "--no-grant", "--device", "rxb1,rxe9")
    assert "chmod" in found["device_permission", "rxb1"]["fix"]
    unknown = next(f for (code, _), f in found.items() if code == "device_unknown")
    assert "rxe9" in unknown["text"]
    assert "rxb2" in unknown["data"]["valid"]
    assert found["rdma_missing", ""]["level"] == "fail"
    assert status == ExitStatus.UNFIT


async def between_hosts() -> dict[str, Finding]:
    """What host B's rail finds about host A's, by code."""
    owner, asker = (
        NodeConfig(transport=transport, rdma=RdmaConfig(device=device, device_timeout_s=20.0))
        for device, transport in (("rxa1", Transport.AUTO), ("rxb1", Transport.RDMA))
    )
    async with serve_payload(owner) as offer:
        assert offer.memory == "pinned"
        return {f.code: f for f in await peer_findings(str(offer.ticket), asker)}


def test_the_way_to_a_peer() -> None:
    before = links.sent_pkts(1)[1]
    found = asyncio.run(between_hosts())
    bad = {code: f for code, f in found.items() if f.level >= Level.WARN}
    assert not bad
    stages = ("connect", "handshake", "messages", "tcp", "rails", "queue_pairs", "grant", "release")
    assert {f"peer_{stage}" for stage in stages} <= set(found)
    assert found["peer_messages"].data["transport"] == "rdma"
    assert "IPv4, path MTU 4096" in found["peer_rails"].text
    assert links.sent_pkts(1)[1] > before


def test_packet_sizes_that_differ_are_named_and_work() -> None:
    with links.mtu({links.netdev("B", 1): 1500}):
        found = asyncio.run(between_hosts())
    differs = found["peer_mtu_differs"]
    assert differs.level is Level.WARN
    assert "path MTU 1024 (of 1024 here and 4096 there)" in differs.text
    assert found["peer_grant"].level is Level.OK
