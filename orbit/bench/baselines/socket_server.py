"""The socket loop's end at the server: it listens on a port of its own for one run at a time.

Only connections that begin with the run's token are served, as many as the run has; then nobody
listens any more.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final

from ...errors import OrbitError, PeerLost, PeerProtocolError, PeerUnreachable
from ..plan import SIZE_MAX
from .asking import CONNECTIONS_MAX, OPS_MAX, RUN_S, STALL_S, Request, integer
from .crew import Crew
from .sockets import end, receive, set_up

TOKEN_BYTES: Final = 32


class SocketLoopServer:
    """A new run ends the one before."""

    def __init__(self, host: str, room: int) -> None:
        self._host = host
        self._room = room
        self._run: _Run | None = None

    async def open(self, request: Request) -> dict[str, Any]:
        """In each operation `out` bytes come and `back` bytes go. Raises PeerProtocolError."""
        await self.close()
        out, back = (integer(request, name, 1, SIZE_MAX) for name in ("out", "back"))
        connections = integer(request, "connections", 1, CONNECTIONS_MAX)
        if connections * out + back > self._room:
            raise PeerProtocolError(
                f"baseline: {connections} connections that bring {out} bytes and take {back} "
                f"need more than the {self._room} bytes that this end may use"
            )
        warmup = integer(request, "warmup", 0, OPS_MAX)
        self._run = _Run(self._host, out, back, connections, warmup)
        return {"port": self._run.port, "token": self._run.token}

    async def finish(self) -> dict[str, Any]:
        """The client is done: `cpu_s`, processor seconds after the warm-up. Raises PeerLost."""
        if self._run is None:
            raise PeerProtocolError("baseline: no socket loop is open")
        try:
            return {"cpu_s": await self._run.finish()}
        except OSError as error:
            if isinstance(error, OrbitError):  # a deadline is both
                raise
            raise PeerLost("the client of the socket loop", str(error)) from error
        finally:
            await self.close()

    async def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            await run.close()


class _Run:
    def __init__(self, host: str, out: int, back: int, connections: int, warmup: int) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._out = out
        self._answer = memoryview(bytearray(back))
        self._warmup = warmup
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._missing = connections
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=connections)
        self._listener.settimeout(STALL_S)
        self.port = int(self._listener.getsockname()[1])
        self._crew = Crew(connections, "orbit-socket-loop")
        self._serving = self._crew.start([self._serve] * connections)

    async def finish(self) -> float:
        return sum(await self._crew.results(self._serving, RUN_S))

    async def close(self) -> None:
        with self._lock:
            self._missing = 0
            for connection in (self._listener, *self._open):
                end(connection)
        await self._crew.close()

    def _serve(self) -> float:
        """One connection to its end."""
        target = memoryview(bytearray(self._out))
        connection = self._accept()
        since = time.thread_time()
        for served in itertools.count(1):
            if not receive(connection, target):
                break
            connection.sendall(self._answer)
            if served == self._warmup:
                since = time.thread_time()
        return time.thread_time() - since

    def _accept(self) -> socket.socket:
        """The next one that knows the token; others are closed."""
        deadline = time.monotonic() + STALL_S
        while time.monotonic() < deadline and self._missing:
            with suppress(OSError):  # of the listener: a timeout, or closed
                connection, _ = self._listener.accept()
                if self._admit(connection):
                    return connection
        raise PeerUnreachable("the socket loop", "silent", "the client did not connect")

    def _admit(self, connection: socket.socket) -> bool:
        with self._lock:
            if not self._missing:
                connection.close()
                return False
            self._open.append(set_up(connection))
        shown = bytearray(TOKEN_BYTES)
        try:
            known = receive(connection, memoryview(shown))
        except OSError:
            known = False
        if not known or not hmac.compare_digest(shown, self.token):
            end(connection)
            return False
        with self._lock:
            self._missing -= 1
            if not self._missing:
                end(self._listener)
        return True
