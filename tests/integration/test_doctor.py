"""`orbit doctor` as a user runs it: its statuses, its JSON, and the stages towards a peer."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orbit.cli.failures import ExitStatus
from orbit.protocol.ticket import Ticket
from tests.integration.cli import orbit, serving, start

LOOK = ("doctor", "--json", "--no-grant")


def by_code(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["code"]: finding for finding in report["findings"]}


def peer(target: str, *words: str | Path) -> dict[str, dict[str, Any]]:
    """The findings about a peer, by code."""
    done = orbit(*LOOK, "--peer", target, *words)
    assert done.status in (ExitStatus.WARNINGS, ExitStatus.UNFIT), done.err
    found = by_code(done.report)
    return {code: finding for code, finding in found.items() if finding["area"] == "peer"}


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 300)
    return path


@pytest.mark.parametrize(
    ("transport", "status", "level"),
    [("auto", ExitStatus.WARNINGS, "warn"), ("rdma", ExitStatus.UNFIT, "fail")],
)
def test_without_rdma(transport: str, status: ExitStatus, level: str) -> None:
    """The kill switch is set: so it is on every machine."""
    done = orbit("doctor", "--json", "--transport", transport)
    assert done.status == status, done.out
    report = done.report
    assert report["level"] == level
    found = by_code(report)
    assert found["tcp_works"]["level"] == "ok"
    assert found["rdma_missing"]["level"] == level
    assert found["rdma_missing"]["fix"]
    assert report["summary"].startswith("TCP works; RDMA: not usable: ")
    for finding in report["findings"]:
        assert finding["level"] in ("ok", "skip", "warn", "fail")
        assert finding["fix"] or finding["level"] in ("ok", "skip"), finding


def test_the_page_of_a_pipe() -> None:
    done = orbit("doctor", "--transport", "tcp")
    lines = done.out.splitlines()
    assert lines[-1] == "TCP works; RDMA: not asked for"
    assert "transfer over tcp" in lines
    assert "\x1b" not in done.out
    assert done.err == ""
    assert len(lines) < 50


def test_a_peer_that_serves(payload: Path) -> None:
    """Every stage over TCP passes; RDMA says what it lacks, and what comes after it is skipped."""
    with serving(payload) as server:
        found = peer(server.ticket, "--transport", "rdma")
        by_place = peer(str(Ticket.parse(server.ticket).address.endpoints[0]))
    for code in ("peer_resolve", "peer_connect", "peer_handshake", "peer_messages", "peer_tcp"):
        assert found[code]["level"] == "ok", found
    assert found["peer_messages"]["data"]["rtt_s"] > 0
    assert found["peer_rails_missing"]["level"] == "fail"
    assert found["peer_rails_missing"]["fix"]
    assert found["peer_grant_skipped"]["level"] == "skip"
    assert by_place["peer_messages"]["level"] == "ok"
    assert "peer_tcp" not in by_place  # it names no payload
    assert by_place["peer_rails_missing"]["level"] == "warn"


def test_the_payload_that_doctor_offers(tmp_path: Path) -> None:
    with start("doctor", "--serve", "--json") as server:
        assert server.stdout is not None
        offer = json.loads(server.stdout.readline())
        found = peer(offer["ticket"])
        server.terminate()
        assert server.wait(10) == ExitStatus.OK
    assert "4096 bytes" in found["peer_tcp"]["text"]


def test_a_wrong_secret(payload: Path, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    with serving(payload, "--secret-file", right) as server:
        found = peer(server.ticket, "--secret-file", wrong)
    assert found["peer_secret"]["level"] == "fail"
    assert "--secret-file" in found["peer_secret"]["fix"]
    assert found["peer_rest_skipped"]["level"] == "skip"


@contextlib.contextmanager
def web_server() -> Iterator[str]:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_stranger_at_the_port() -> None:
    with web_server() as place:
        found = peer(place)
    assert found["peer_connect"]["level"] == "ok"
    assert "not an orbit peer" in found["peer_not_orbit"]["text"]


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    found = peer(place)
    assert found["peer_connect_failed"]["data"]["reason"] == "refused"
    assert set(found) == {"peer_resolve", "peer_connect_failed", "peer_rest_skipped"}


@pytest.mark.parametrize(
    "words",
    [
        ("--peer", "hello"),
        ("--peer", "10.0.0.1:0"),
        ("--secret-file", "/nowhere/absent"),
        ("--serve", "--peer", "127.0.0.1:7000"),
        ("--sysfs", "/nowhere/absent"),
    ],
    ids=" ".join,
)
def test_words_that_make_no_sense(words: tuple[str, ...]) -> None:
    assert orbit("doctor", *words).status == ExitStatus.USAGE
