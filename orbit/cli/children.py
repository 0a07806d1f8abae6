"""Child processes that run the `orbit` command itself, with one JSON report a line on stdout.

Every child is ended on every way out, with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence

from ..errors import DeadlineExceeded
from .failures import ChildFailed

Report = dict[str, object]
_KILL_AFTER_S = 5.0


def lab_host(name: str) -> tuple[str, ...]:
    """What runs a command as one host of the lab."""
    return ("orbit-host", name)


class Child:
    """One running child. Its stderr is ours, so its own words reach the person."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name

    @classmethod
    @contextlib.asynccontextmanager
    async def orbit(cls, prefix: Sequence[str], arguments: Sequence[str]) -> AsyncIterator[Child]:
        """Start `orbit ARGUMENTS`, and end it on the way out."""
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "orbit",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # one group: what a wrapper started ends with it
        )
        child = cls(process, f"orbit {arguments[0]}")
        try:
            yield child
        finally:
            await child._end()

    async def read_report(self, timeout_s: float) -> Report:
        """The next line of its stdout. Raises ChildFailed, DeadlineExceeded."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"a report of {self._name}", timeout_s) from error
        if not line:
            await self.wait_success(_KILL_AFTER_S)
            raise ChildFailed(f"{self._name}, without a report,", 0)
        report = json.loads(line)
        assert isinstance(report, dict)
        return report

    async def wait_success(self, timeout_s: float) -> None:
        """Until it has ended by itself. Raises ChildFailed for any status but 0."""
        try:
            status = await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the end of {self._name}", timeout_s) from error
        if status != 0:
            raise ChildFailed(self._name, status)

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end, which it must do well."""
        self._signal(signal.SIGTERM)
        await self.wait_success(timeout_s)

    async def _end(self) -> None:
        if self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _KILL_AFTER_S)
        except (TimeoutError, asyncio.CancelledError):
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
