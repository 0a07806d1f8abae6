"""C13 between processes: programs that end in every way with all of orbit open do so quickly and
quietly, with the status that they should have, and leave nothing behind. ORBIT_SOAK (`make soak`)
makes the count the case's own.

Over RDMA on scripted devices, which are empty at the end; on real ones in
tests/softroce/test_exits.py.
"""

from __future__ import annotations

import signal

import pytest

from tests.integration.cases.exit_worker import CALLBACK_STATUS, MIB
from tests.integration.cases.exits import program
from tests.integration.test_node_processes import process
from tests.soak import SOAK

ROUNDS = range(50 if SOAK else 1)
MODES = [True, False] if SOAK else [True]
INTERRUPTED = (-signal.SIGINT, 130)
TERMINATED = (-signal.SIGTERM, 143)


def end_of(name: str, path: str, status: int) -> None:
    for seed in ROUNDS:
        for debug in MODES:
            ended = program(name, seed, path, debug=debug).end()
            ended.check(status)
            assert ended.said[-1] == {"left": []}
            if name == "goes_on_in_a_thread":
                assert {"went_on": True} in ended.said


@pytest.mark.parametrize(
    ("path", "name", "status"),
    [
        ("scripted", "falls_off", 0),
        ("tcp", "in_a_cycle", 0),
        ("scripted", "drops", 0),
        ("tcp", "leaves_a_busy_handler", 0),
        ("scripted", "goes_on_in_a_thread", 0),
        ("scripted", "exits_in_a_callback", CALLBACK_STATUS),
        ("tcp", "exits_in_a_callback", CALLBACK_STATUS),
        ("tcp", "exits_in_a_handler", 1),  # its caller is told, and does not expect it
    ],
)
def test_a_synchronous_program(path: str, name: str, status: int) -> None:
    end_of(name, path, status)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("falls_off_async", 0),
        ("raises_in_a_task", 1),
        ("exits_in_an_async_callback", CALLBACK_STATUS),
    ],
)
def test_an_asynchronous_program(name: str, status: int) -> None:
    end_of(name, "tcp", status)


@pytest.mark.parametrize(
    ("name", "number", "statuses"),
    [
        ("waits", signal.SIGINT, INTERRUPTED),
        ("waits", signal.SIGTERM, TERMINATED),  # orbit installs no handler, so it just ends
        ("waits_and_takes_sigterm", signal.SIGTERM, TERMINATED),
    ],
)
def test_a_signal_during_a_transfer_from_a_peer_that_stands_still(
    name: str, number: signal.Signals, statuses: tuple[int, ...]
) -> None:
    for seed in ROUNDS:
        with process("owner", nbytes=64 * MIB) as owner:
            there = owner.heard()
            waiting = program(name, seed, "tcp")
            waiting.tell(**there, pid=owner.popen.pid, nbytes=64 * MIB)
            while "waiting" not in waiting.heard():
                pass
            waiting.send(number)
            waiting.end().check(*statuses)
