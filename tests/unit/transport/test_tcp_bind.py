"""Binding: what is published is what was bound, and a taken port is an error."""

from __future__ import annotations

import contextlib
import socket

import pytest

from orbit.errors import ConfigError
from orbit.transport import tcp_bind
from orbit.transport.tcp_bind import bind
from orbit.transport.tcp_wire import endpoint_of

has_ipv6 = socket.has_dualstack_ipv6()


@contextlib.contextmanager
def bound(host: str, port: int = 0):  # type: ignore[no-untyped-def]
    sockets = bind(host, port, 16)
    try:
        yield [endpoint_of(sock.getsockname()) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def test_port_zero_is_chosen_by_the_kernel() -> None:
    with bound("127.0.0.1") as endpoints:
        assert endpoints[0][0] == "127.0.0.1"
        assert endpoints[0][1] > 0


def test_many_at_once_get_ports_of_their_own() -> None:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(bound("127.0.0.1"))[0][1] for _ in range(64)]
        assert len(set(ports)) == 64


def test_a_taken_port_is_named() -> None:
    with bound("127.0.0.1") as endpoints:
        port = endpoints[0][1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use") as caught:
            bind("127.0.0.1", port, 16)
        assert caught.value.knob == "listen"
        assert caught.value.hint


def test_quick_restart_beside_time_wait() -> None:
    with bound("127.0.0.1") as endpoints:
        pass
    sockets = bind("127.0.0.1", endpoints[0][1], 16)
    client = socket.create_connection(endpoints[0])
    server, _ = sockets[0].accept()
    server.close()  # closing first leaves TIME_WAIT on the listener's port
    client.close()
    sockets[0].close()
    with bound("127.0.0.1", endpoints[0][1]) as again:
        assert again == endpoints


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_host(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        bind(host, 0, 16)


@pytest.mark.skipif(not has_ipv6, reason="this host has no IPv6")
@pytest.mark.parametrize("host", ["", "::", "*"])
def test_wildcard_takes_both_families(host: str) -> None:
    with bound(host) as endpoints:
        assert [e[0] for e in endpoints] == ["::"]
        for loopback in ("127.0.0.1", "::1"):
            socket.create_connection((loopback, endpoints[0][1])).close()


def test_two_addresses_share_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET, ("127.0.0.2", 0))]
    monkeypatch.setattr(tcp_bind, "_resolve", lambda host, port: addresses)
    with bound("name") as endpoints:
        assert [e[0] for e in endpoints] == ["127.0.0.1", "127.0.0.2"]
        assert endpoints[0][1] == endpoints[1][1]


def test_a_missing_family_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [(socket.AF_INET, ("192.0.2.1", 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    monkeypatch.setattr(tcp_bind, "_resolve", lambda host, port: addresses)
    with bound("name") as endpoints:
        assert [e[0] for e in endpoints] == ["127.0.0.1"]
