"""C13 with real devices: a program that ends with everything open, and one that Ctrl-C ends in the
middle of a call, leave the kernel without a queue pair, a registration or anything else of theirs.
"""

from __future__ import annotations

import re
import signal
import subprocess

from tests.integration.cases.exits import program
from tests.softroce.message_hosts import wait_until

KINDS = ("qp", "mr", "cq", "pd", "ctx")


def resources() -> dict[str, int]:
    """Of all processes, over all devices."""
    words = ["rdma", "resource", "show"]
    text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    return {kind: sum(map(int, re.findall(rf"\b{kind} (\d+)", text))) for kind in KINDS}


def test_programs_that_end_leave_nothing_in_the_kernel() -> None:
    before = resources()
    # Side by side: starting Python costs seconds here.
    falling = program("falls_off", 1, "rdma", debug=False)
    waiting = program("waits_for_an_answer", 1, "rdma", debug=False)
    assert falling.heard() == waiting.heard() == {"path": "rdma"}
    assert waiting.heard() == {"waiting": True}
    during = resources()
    assert all(during[kind] > before[kind] for kind in KINDS), (before, during)
    waiting.send(signal.SIGINT)
    for running, statuses in ((falling, (0,)), (waiting, (-signal.SIGINT, 130))):
        ended = running.end()
        ended.check(*statuses)
        assert ended.said == [{"left": []}]
    wait_until(lambda: resources() == before)
