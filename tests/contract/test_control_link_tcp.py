"""TcpLink against the contract of ControlLink, on both event loops, plain and over TLS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from orbit.testing.contracts import LINK_CASES, check_control_link
from tests.contract.tcp_pairs import tcp_link_pair
from tests.contract.tls_contexts import client_context, server_context

Run = Callable[[Any], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("case", LINK_CASES)
def test_plain(case: str, run_async: Run) -> None:
    run_async(check_control_link(case, tcp_link_pair))


@pytest.mark.parametrize("case", LINK_CASES)
def test_tls(case: str, run_async: Run) -> None:
    pair = functools.partial(tcp_link_pair, server_context(), client_context())
    run_async(check_control_link(case, pair))
