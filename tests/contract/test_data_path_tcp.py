"""TcpPath against the contract of DataPath, on both event loops, plain and over TLS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from orbit.testing.contracts import PATH_CASES, check_data_path
from tests.contract.tcp_pairs import tcp_path_pair
from tests.contract.tls_contexts import client_context, server_context

Run = Callable[[Any], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("case", PATH_CASES)
def test_plain(case: str, run_async: Run) -> None:
    run_async(check_data_path(case, tcp_path_pair))


@pytest.mark.parametrize("case", PATH_CASES)
def test_tls(case: str, run_async: Run) -> None:
    pair = functools.partial(
        tcp_path_pair, server_tls=server_context(), client_tls=client_context()
    )
    run_async(check_data_path(case, pair))
