"""What the lab reads out of a guest's console."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.softroce.kernel_log import FaultKind, KernelLog

PANIC = "[   12.1] Kernel panic - not syncing: Fatal exception in interrupt"
OOPS = "[   12.0] BUG: kernel NULL pointer dereference, address: 0000000000000008"
WARN = (
    "[   52.4] WARNING: CPU: 1 PID: 311 at drivers/infiniband/sw/rxe/rxe_pool.c:255 rxe_x+0x1/0x2"
)
LOCKUP = "[   99.9] watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [python3:412]"
RCU_STALL = "[   80.0] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"
FOREIGN_WARN = [
    "[   5.0] WARNING: CPU: 0 PID: 1 at net/core/dev.c:100 f+0x1/0x2",
    "[   5.0] Modules linked in: rdma_rxe ib_uverbs ib_core",
    "[   5.0] RIP: 0010:f+0x1/0x2",
]
TRACE_END = "[   5.1] ---[ end trace 0000000000000000 ]---"


def kinds(*lines: str) -> list[FaultKind]:
    log = KernelLog()
    log.feed("".join(line + "\r\n" for line in lines).encode())
    log.finish()
    return [fault.kind for fault in log.faults]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (PANIC, FaultKind.PANIC),
        (OOPS, FaultKind.OOPS),
        ("[ 1.0] kernel BUG at mm/slub.c:1!", FaultKind.OOPS),
        ("[ 1.0] Oops: 0000 [#1] PREEMPT SMP NOPTI", FaultKind.OOPS),
        ("[ 1.0] general protection fault, probably for non-canonical", FaultKind.OOPS),
        (WARN, FaultKind.WARNING),
        (LOCKUP, FaultKind.STALL),
        (RCU_STALL, FaultKind.STALL),
        ("[ 1.0] rcu: \trcu_preempt kthread starved for 5250 jiffies!", FaultKind.STALL),
        ("[ 1.0] BUG: workqueue lockup - pool cpus=0", FaultKind.STALL),
    ],
)
def test_each_kind_of_fault_is_found(line: str, kind: FaultKind) -> None:
    assert kinds("[ 0.1] Linux version", line) == [kind]


@pytest.mark.parametrize(
    "line",
    [
        "[ 1.0] rdma_rxe: loaded",
        "[ 1.0] Failed sending ACK",
        "[ 1.0] hrtimer: interrupt took 1234567 ns",
        "[ 1.0] rxe_mr_init_user: Unable to pin memory region err = -14",
        "[ 1.0] Debug: BUGS are our food",
        "a user's WARNING: nothing",
    ],
)
def test_benign_lines_are_no_fault(line: str) -> None:
    assert kinds(line) == []


def test_a_warning_elsewhere_is_no_fault() -> None:
    assert kinds(*FOREIGN_WARN, "[ 5.0]  netdev_x+0x1/0x2", TRACE_END) == []


def test_a_warning_elsewhere_with_rdma_code_in_its_trace_is_one() -> None:
    assert kinds(*FOREIGN_WARN, "[ 5.0]  rxe_y+0x1/0x2 [rdma_rxe]", TRACE_END) == [
        FaultKind.WARNING
    ]
    assert kinds(*FOREIGN_WARN, "[ 5.0]  ib_y+0x1/0x2 [ib_core]") == [FaultKind.WARNING]


def test_the_excerpt_starts_before_the_fault() -> None:
    log = KernelLog()
    lines = [f"[ {n}.0] line {n}" for n in range(100)]
    log.feed("\n".join([*lines[:90], OOPS, *lines[90:], ""]).encode())
    excerpt = log.excerpt()
    assert excerpt[:3] == [lines[88], lines[89], OOPS]
    assert excerpt[-1] == lines[99]


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_the_bytes_may_be_split_anywhere(cuts: list[int]) -> None:
    data = "\r\n".join([OOPS, *FOREIGN_WARN, TRACE_END, WARN, LOCKUP, PANIC, ""]).encode()
    log = KernelLog()
    edges = [0, *sorted(cuts), len(data)]
    seen = []
    for start, end in itertools.pairwise(edges):
        seen += log.feed(data[start:end])
    seen += log.finish()
    assert [fault.kind for fault in seen] == [
        FaultKind.OOPS,
        FaultKind.WARNING,
        FaultKind.STALL,
        FaultKind.PANIC,
    ]
