"""Workers as seen by a test: started, asked, stopped, killed, and ended with nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]
_LINE_BYTES_MAX = 1 << 24
ANSWER_S = 60.0  # generous for a busy machine: what is tested is that an answer comes


class Process:
    """One worker. `address` is its node's."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._stopped = False
        self.address = ""

    async def heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        assert line, "the worker ended"
        return dict(json.loads(line))

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self._tell(json.dumps({"op": op, **arguments}))
        return await self.heard()

    async def asked_until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Its statistics, once they are as wanted."""
        async with asyncio.timeout(ANSWER_S):
            while not holds(found := await self.ask("statistics")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    def stop(self) -> None:
        """SIGSTOP: alive, and deaf."""
        self._stopped = True
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._stopped = False
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def begin(self) -> None:
        await self.heard()
        self._tell("")
        self.address = (await self.heard())["address"]

    async def end(self) -> None:
        """In order, if it lives: it checks itself that nothing is left."""
        if self._process.returncode is None:
            assert not self._stopped
            assert self._process.stdin is not None
            self._process.stdin.close()
            assert await self.heard() == {"closed": True}
            await self._process.wait()
            assert self._process.returncode == 0

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")


@contextlib.asynccontextmanager
async def worker(
    module: str = "tests.integration.messages.worker", **config: Any
) -> AsyncIterator[Process]:
    """`config` as worker.config_of takes it; `module`: what the process runs, a worker too."""
    with tempfile.TemporaryFile() as errors:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", module),
            json.dumps(config),
            cwd=_ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LINE_BYTES_MAX,
        )
        process = Process(started)
        try:
            await process.begin()
            yield process
            await process.end()
        except BaseException as error:
            errors.seek(0)
            text = errors.read().decode(errors="replace")
            error.add_note(f"the worker said: {text[-4000:]}")
            raise
        finally:
            await process.kill()
            # The transport closes its pipes a turn of the loop after the process has ended.
            transport = getattr(started, "_transport")  # noqa: B009
            transport.close()
            await asyncio.sleep(0)
        errors.seek(os.SEEK_SET)
        assert b"Traceback" not in errors.read()
