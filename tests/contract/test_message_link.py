"""PacketLink against the contract of MessageLink, over simulated wires and over TCP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from orbit.testing.clock import run_virtual
from orbit.testing.message_link_contract import MESSAGE_LINK_CASES, check_message_link
from orbit.testing.packet_network import WireFaults
from tests.conftest import LOOP_KINDS
from tests.contract.message_rigs import sim_rig, tcp_rig

FAULTS = {
    "plain": WireFaults(),
    "one at a time": WireFaults(pass_packets_max=1, room=1),
    "jitter": WireFaults(delay_min_s=0, delay_max_s=0.01, pass_packets_max=64, room=5),
}


@pytest.mark.parametrize("case", MESSAGE_LINK_CASES)
@pytest.mark.parametrize("faults", FAULTS)
def test_simulated(case: str, faults: str) -> None:
    run_virtual(check_message_link(case, functools.partial(sim_rig, 1, FAULTS[faults])))


class TestTcp:
    @pytest.fixture(params=LOOP_KINDS)
    def loop_kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.mark.parametrize("case", MESSAGE_LINK_CASES)
    def test_loopback(self, case: str, run_async: Callable[[Any], Any]) -> None:
        run_async(check_message_link(case, tcp_rig))
