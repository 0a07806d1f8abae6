"""C25 with whole nodes: an endpoint is read in one way or refused with its text, every address of a
name is tried, and no peer is told a wildcard, nor loopback without a warning.

Spellings are tests/unit/protocol/test_endpoint.py's. What is resolved here is a private /etc/hosts
in namespaces of its own.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.protocol.address import NodeAddress
from tests.integration.cases.namespaces import unshared
from tests.integration.cli import ORBIT, environment
from tests.integration.cli import orbit as run_orbit

Run = Callable[[Any], Any]
IPV4_FIRST = "precedence ::ffff:0:0/96 100\n"
WORKER = (sys.executable, "-W", "error", "-m", "tests.integration.cases.address_worker")
LOOPBACK_WARNING = "which leads other hosts to themselves"
needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("::1", "[::1]:{port}"),
        ("[::1]", "[::1]:{port}"),
        ("[::1]:7000", "[::1]:7000"),
        ("fe80::1%lo", "[fe80::1%lo]:{port}"),
        ("host", "host:{port}"),
        ("::1:7000", None),
        ("host:0", None),
        (":7000", None),
        ("127.0.0.1:70000", None),
        ("0.0.0.0:7000", None),
        ("[::]:7000", None),
    ],
)
def test_what_may_be_advertised(run_async: Run, text: str, told: str | None) -> None:
    async def main() -> None:
        config = orbit.NodeConfig(advertise=(text,), transport="tcp")
        if told is None:
            with pytest.raises((orbit.ConfigError, orbit.UsageError)) as caught:
                await orbit.Node(config).open()
            assert text in str(caught.value)
            assert caught.value.hint
            return
        async with orbit.Node(config) as node, orbit.Node(orbit.NodeConfig()) as other:
            (endpoint,) = node.address.endpoints
            assert str(endpoint) == told.format(port=endpoint.port)
            again = NodeAddress.parse(str(node.address))
            assert again.endpoints == (endpoint,)
            other.add_peer(again)

    run_async(main())


@pytest.mark.parametrize("text", ["::1:7000", "host", ""])
def test_what_a_command_is_told(text: str) -> None:
    done = run_orbit("bench", "run", text, "--json")
    assert done.status == 2
    assert repr(text) in done.error["message"]
    assert done.error["hint"]


def found(tmp_path: Path, hosts: str, *words: str, order: str = "") -> dict[str, Any]:
    names, preference = tmp_path / "hosts", tmp_path / "gai.conf"
    names.write_text(hosts)
    preference.write_text(order)
    said: dict[str, Any] = json.loads(unshared("-rmn", [*WORKER, names, preference, *words]))
    assert said["same"]
    return said


@needs_ipv6
def test_a_server_on_ipv6_alone_and_a_name_with_ipv4_first(tmp_path: Path) -> None:
    hosts = "127.0.0.1 localhost\n::1 localhost\n"
    said = found(tmp_path, hosts, "[::1]:7000", "localhost", order=IPV4_FIRST)
    assert said["order"] == ["127.0.0.1", "::1"]
    assert said["told"] == ["localhost:7000"]
    assert said["warnings"] == []  # it listens for nobody else


@pytest.mark.parametrize("wildcard", ["0.0.0.0:7000", "[::]:7000"])
def test_a_wildcard_without_an_address_that_others_reach(tmp_path: Path, wildcard: str) -> None:
    said = found(tmp_path, "127.0.0.1 localhost\n", wildcard)
    assert said["told"][0] == "127.0.0.1:7000"
    (warning,) = said["warnings"]
    assert LOOPBACK_WARNING in warning


def test_a_wildcard_tells_the_addresses_of_this_host(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(orbit.NodeConfig(listen="0.0.0.0:0", transport="tcp")) as node:
            told = node.address.endpoints
        assert told
        assert not any(endpoint.is_wildcard for endpoint in told)
        assert len({endpoint.is_loopback for endpoint in told}) == 1  # only if there is no other

    run_async(main())


def test_a_name_that_is_loopback(tmp_path: Path) -> None:
    said = found(tmp_path, "127.0.1.1 thishost\n127.0.0.1 localhost\n", "thishost:7000")
    assert said["told"] == ["127.0.1.1:7000"]
    (warning,) = said["warnings"]
    assert LOOPBACK_WARNING in warning


def test_doctor_warns_of_a_host_name_that_is_loopback(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.1.1 {socket.gethostname()}\n")
    words = ("doctor", "--json", "--no-grant", "--listen", f"{socket.gethostname()}:0")
    script = f"mount --bind {hosts} /etc/hosts && {' '.join((*ORBIT, *words))} || true"
    report = json.loads(unshared("-rm", ["sh", "-c", script], **environment()))
    (warning,) = (f for f in report["findings"] if f["code"] == "hostname_loopback")
    assert warning["level"] == "warn"
    assert "127.0.1.1" in warning["text"]
    assert "--advertise" in warning["fix"]
