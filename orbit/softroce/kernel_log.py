"""Reads a guest's console and finds what makes a run worthless: panics, Oopses, BUGs, lockups,
WARNs in rdma code.

Fed with bytes as they come, split anywhere; keeps the last lines for an excerpt. Takes no decision
about the run.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from enum import Enum

EXCERPT_LINES = 40
_TRACE_LINES_MAX = 80


class FaultKind(Enum):
    """What a kernel fault means for the run."""

    PANIC = "panic"
    OOPS = "oops"
    WARNING = "warning"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class KernelFault:
    """One finding. `line` is the log line that told it."""

    kind: FaultKind
    line: str


# Stalls come first: "watchdog: BUG: soft lockup" has BUG in it, and may be nothing but a busy host.
_STALL = re.compile(
    r"soft lockup|hard LOCKUP|workqueue lockup"
    r"|rcu:? .*(detected stall|self-detected stall|kthread starved)"
    r"|rcu_(sched|preempt|tasks).*stall"
)
_PANIC = re.compile(r"Kernel panic - not syncing")
_OOPS = re.compile(
    r"\bBUG: |\bkernel BUG at |\bOops: |\bOops\b.*#|general protection fault|double fault"
    r"|Unable to handle kernel|Internal error: "
)
_WARNING = re.compile(r"\bWARNING: CPU: \d+")
_RDMA_CODE = re.compile(r"drivers/infiniband/|\[(rdma_|ib_|rxe|iw_)\w*\]")
_TRACE_END = re.compile(r"---\[ end trace")
_TIMESTAMP = re.compile(r"^(<\d+>)?\[\s*\d+\.\d+\](\[\s*[TC]\d+\])?\s*")


class KernelLog:
    """The console of one machine."""

    def __init__(self) -> None:
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=400)
        self._warning: list[str] = []
        self.faults: list[KernelFault] = []

    def feed(self, data: bytes) -> list[KernelFault]:
        """Take what the console wrote; returns the faults that became known by it."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        known = len(self.faults)
        for raw in lines:
            self._line(raw.decode("utf-8", "replace").rstrip("\r"))
        return self.faults[known:]

    def finish(self) -> list[KernelFault]:
        """The machine is gone: judge what is still open."""
        known = len(self.faults)
        if self._partial:
            self.feed(b"\n")
        self._close_warning()
        return self.faults[known:]

    def excerpt(self) -> list[str]:
        """The lines around the worst fault, or the last ones."""
        lines = list(self._lines)
        for fault in self.faults:
            if fault.line in lines:
                start = max(0, lines.index(fault.line) - 2)
                return lines[start : start + EXCERPT_LINES]
        return lines[-EXCERPT_LINES:]

    def _line(self, line: str) -> None:
        self._lines.append(line)
        text = _TIMESTAMP.sub("", line)
        if _STALL.search(text):
            self._add(FaultKind.STALL, line)
        elif _PANIC.search(text):
            self._add(FaultKind.PANIC, line)
        elif _OOPS.search(text):
            self._add(FaultKind.OOPS, line)
        elif _WARNING.search(text):
            self._close_warning()
            self._warning = [line]
            if _RDMA_CODE.search(text):
                self._close_warning()
        elif self._warning:
            # A WARN elsewhere counts when rdma code is in its call trace.
            self._warning.append(line)
            if _TRACE_END.search(text) or len(self._warning) > _TRACE_LINES_MAX:
                self._close_warning()

    def _close_warning(self) -> None:
        lines, self._warning = self._warning, []
        if any(_RDMA_CODE.search(line) for line in lines):
            self._add(FaultKind.WARNING, lines[0])

    def _add(self, kind: FaultKind, line: str) -> None:
        self.faults.append(KernelFault(kind, line))
