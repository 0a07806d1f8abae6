"""Endpoints: every spelling to one pair, and nothing that could be read in two ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import UsageError
from orbit.protocol.endpoint import Endpoint


@pytest.mark.parametrize(
    ("text", "host", "port", "canonical"),
    [
        ("[::1]:7000", "::1", 7000, "[::1]:7000"),
        ("127.0.0.1:7000", "127.0.0.1", 7000, "127.0.0.1:7000"),
        ("host:7000", "host", 7000, "host:7000"),
        ("Host.Example.:7000", "host.example", 7000, "host.example:7000"),
        ("host:0", "host", 0, "host:0"),
        ("0.0.0.0:0", "0.0.0.0", 0, "0.0.0.0:0"),
        ("[FE80::0:1%lo]:7000", "fe80::1%lo", 7000, "[fe80::1%lo]:7000"),
        ("[fe80::1%eth0.100]:1", "fe80::1%eth0.100", 1, "[fe80::1%eth0.100]:1"),
        ("[2001:DB8:0:0::1]:65535", "2001:db8::1", 65535, "[2001:db8::1]:65535"),
        ("[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1", 1, "[::ffff:10.0.0.1]:1"),
        ("[::ffff:a00:1]:1", "::ffff:10.0.0.1", 1, "[::ffff:10.0.0.1]:1"),
        ("my_host-1:07000", "my_host-1", 7000, "my_host-1:7000"),
    ],
)
def test_with_a_port(text: str, host: str, port: int, canonical: str) -> None:
    endpoint = Endpoint.parse(text)
    assert endpoint.pair == (host, port)
    assert str(endpoint) == canonical
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("host", "host"),
        ("10.0.0.1", "10.0.0.1"),
        ("fe80::1%lo", "fe80::1%lo"),
        ("fe80::1", "fe80::1"),
        ("1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8"),
    ],
)
def test_without_a_port_a_default_is_needed(text: str, host: str) -> None:
    assert Endpoint.parse(text, default_port=7000).pair == (host, 7000)
    with pytest.raises(UsageError, match="no port"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        (" host:1", "spaces"),
        ("::1:7000", "two ways"),
        ("2001:db8::5:80", "two ways"),
        ("fe80::1%lo:7000", "two ways"),
        (":7000", "no host"),
        ("[]:7000", "brackets"),
        ("[::1", "brackets"),
        ("[::1]7000", "brackets"),
        ("[[::1]]:7000", "brackets"),
        ("[host]:7000", "brackets"),
        ("[10.0.0.1]:7000", "brackets"),
        ("127.0.0.1:70000", "not a port"),
        ("127.0.0.1:-1", "not a port"),
        ("127.0.0.1:+1", "not a port"),
        ("127.0.0.1:", "not a port"),
        ("127.0.0.1:7 0", "not a port"),
        ("127.0.0.1:\u0667\u0660", "not a port"),
        ("127.0.0.1:999999999999", "not a port"),
        ("127.0.0.256:1", "neither"),
        ("127.1:1", "neither"),
        ("-host:1", "neither"),
        ("ho st:1", "neither"),
        ("host..x:1", "neither"),
        ("hôte:1", "neither"),
        ("a" * 64 + ":1", "neither"),
        ("[fe80::1%a/b]:1", "neither"),
        ("[fe80::1%]:1", "neither"),
        ("user@host:1", "neither"),
        ("http://host:1", "neither"),
        ("1:2:3:4:5:6:7:8:9", "two ways|neither"),
    ],
)
def test_the_error_says_what_is_wrong_with_which_text(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        Endpoint.parse(text, default_port=7000)
    assert repr(text)[1:20] in str(caught.value) or len(text) > 40
    assert caught.value.hint


@given(st.text(max_size=40))
def test_any_text_parses_to_a_fixed_point_or_is_refused(text: str) -> None:
    try:
        endpoint = Endpoint.parse(text, default_port=1)
    except UsageError:
        return
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize("port", [-1, 65536, True])
def test_ports_are_checked_in_code_too(port: int) -> None:
    with pytest.raises(UsageError, match="port"):
        Endpoint("host", port)


@pytest.mark.parametrize(
    ("host", "wildcard", "loopback"),
    [
        ("0.0.0.0", True, False),
        ("::", True, False),
        ("127.0.0.1", False, True),
        ("127.9.9.9", False, True),
        ("::1", False, True),
        ("localhost", False, True),
        ("10.0.0.1", False, False),
        ("host", False, False),
    ],
)
def test_what_may_be_advertised(host: str, wildcard: bool, loopback: bool) -> None:
    endpoint = Endpoint(host, 1)
    assert endpoint.is_wildcard is wildcard
    assert endpoint.is_loopback is loopback
