"""perftest on the rail that orbit used, where both ends have it installed.

Its server listens without any authentication, so one runs only while a client asks for it, and has
a deadline: after a connection that failed it would wait for ever. Only what was started here is
killed.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ...errors import DeadlineExceeded, PathUnavailable, PeerProtocolError, UsageError
from ...model import PathName, PathReason
from ...protocol.messages import RailHint
from .asking import (
    RUN_S,
    Ask,
    Measured,
    Request,
    Work,
    integer,
    rail_of,
    rail_to_wire,
    text,
)
from .perftest_commands import DEPTH_MAX, ITERATIONS_MAX, ITERATIONS_MIN, SIZE_MAX, TOOLS, Run
from .read_chain import rail_for

_TRIES: Final = 20  # of the client, while the server starts
_BETWEEN_S: Final = 0.2
# perftest's own port and those above. Ephemeral ports, from 32768 on, would collide with others'.
_PORTS: Final = range(18_515, 18_615)


class PerftestServer:
    """One process at a time."""

    def __init__(self, host: str, rails: Sequence[RailHint]) -> None:
        self._host = host
        self._rails = rails
        self._process: asyncio.subprocess.Process | None = None
        self._deadline: asyncio.TimerHandle | None = None

    async def start(self, request: Request) -> dict[str, Any]:
        """Raises UsageError, PeerProtocolError, PathUnavailable."""
        await self.close()
        run = Run(
            text(request, "tool"),
            integer(request, "size", 1, SIZE_MAX),
            integer(request, "iterations", ITERATIONS_MIN, ITERATIONS_MAX),
            integer(request, "depth", 1, DEPTH_MAX),
        )
        rail = rail_for(self._rails, rail_of(request, "rail"))
        port = _free_port(self._host)
        self._process = await _start(run.command(rail, port), asyncio.subprocess.DEVNULL)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(RUN_S, _kill, self._process)
        return {"port": port}

    async def close(self) -> None:
        process, self._process = self._process, None
        if self._deadline is not None:
            self._deadline.cancel()
        if process is not None:
            _kill(process)
            await process.wait()


async def measure(work: Work, ask: Ask, hosts: Sequence[str], rail: RailHint) -> Measured:
    """Raises OrbitError. No process is left on any way out."""
    run = Run.of(work)
    request = {
        "tool": run.tool,
        "size": run.size,
        "iterations": run.iterations,
        "depth": run.depth,
        "rail": rail_to_wire(rail),
    }
    port = integer(await ask("perftest.start", request), "port", 1024, 32_767)
    try:
        printed = ""
        for attempt in range(_TRIES):
            await asyncio.sleep(_BETWEEN_S)
            host = hosts[attempt % len(hosts)]
            printed = await _printed(run.command(rail, port, host))
            if (found := run.measured(work, printed)) is not None:
                return found
    finally:
        await ask("perftest.stop", {})
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "no output")
    raise PathUnavailable(PathName.RDMA, PathReason.CONNECT_FAILED, f"{run.tool}: {last.strip()}")


def installed() -> bool:
    """All tools that are used here."""
    return all(map(shutil.which, TOOLS))


async def _printed(command: Sequence[str]) -> str:
    """Raises DeadlineExceeded."""
    process = await _start(command, asyncio.subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), RUN_S)
    except TimeoutError as error:
        raise DeadlineExceeded(command[0], RUN_S) from error
    finally:
        _kill(process)
        await process.wait()
    return output.decode("utf-8", "replace")


async def _start(command: Sequence[str], output: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output if output == asyncio.subprocess.DEVNULL else asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be started: {error}", hint="install the package perftest"
        ) from error


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _free_port(host: str) -> int:
    """Raises PeerProtocolError: all are taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in _PORTS:
        with socket.socket(family, socket.SOCK_STREAM) as trial, suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
            return port
    raise PeerProtocolError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")
