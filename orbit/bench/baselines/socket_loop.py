"""The same bytes by blocking sockets: one thread and one connection for each operation in flight,
preallocated buffers, no copy in Python.

In one operation the client sends `out` bytes and waits for `back` bytes, which the server sends
when it has all of the former; a direction without payload carries one byte.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ...errors import OrbitError, PeerLost
from ..figures import latency_of
from ..plan import Verb
from ..report import EndUsage
from .asking import RUN_S, Ask, Measured, Work, integer, octets
from .crew import Crew
from .socket_server import TOKEN_BYTES
from .sockets import connect, end, receive


@dataclass(slots=True)
class _Spent:
    """What one thread measured, in seconds; instants are of `time.perf_counter`."""

    samples: list[float]
    began: float
    ended: float
    cpu_s: float


class _Connection:
    """One of the client's; blocking, and used by one thread at a time."""

    def __init__(self, connection: socket.socket, out: int, back: int) -> None:
        self.socket = connection
        self._message = memoryview(bytearray(out))
        self._target = memoryview(bytearray(back))

    def exchange(self, operations: Iterator[int], limit_s: float) -> _Spent:
        """As many as `operations` has; other threads may take from it, too. Raises OSError."""
        samples: list[float] = []
        cpu_s = time.thread_time()
        began = now = time.perf_counter()
        limit = began + limit_s
        for _ in operations:
            before = now
            self.socket.sendall(self._message)
            if not receive(self.socket, self._target):
                raise ConnectionResetError("the server ended the connection")
            now = time.perf_counter()
            samples.append(now - before)
            if now > limit:
                break
        return _Spent(samples, began, now, time.thread_time() - cpu_s)


def bytes_out_back(work: Work) -> tuple[int, int]:
    if work.verb is Verb.UNARY:
        return work.nbytes, work.nbytes
    return (work.nbytes, 1) if work.to_server else (1, work.nbytes)


async def measure(work: Work, ask: Ask, hosts: Sequence[str], room: int) -> Measured:
    """Raises OrbitError. Every connection is closed on every way out."""
    work.check_room(room)
    out, back = bytes_out_back(work)
    shape = {"out": out, "back": back, "connections": work.inflight, "warmup": work.warmup}
    told = await ask("socket.open", shape)
    port, token = integer(told, "port", 1, 65_535), octets(told, "token", TOKEN_BYTES)
    made: list[_Connection] = []

    def open_one() -> None:
        made.append(_Connection(connect(hosts, port), out, back))
        made[-1].socket.sendall(token)

    crew = Crew(work.inflight, "orbit-socket-loop")
    try:
        await crew.run([open_one] * work.inflight, RUN_S)
        warm = [partial(one.exchange, iter(range(work.warmup)), work.limit_s) for one in made]
        await crew.run(warm, RUN_S)
        operations = iter(range(work.ops))
        spent = await crew.run(
            [partial(one.exchange, operations, work.limit_s) for one in made], RUN_S
        )
    except OSError as error:
        if isinstance(error, OrbitError):  # a deadline is both
            raise
        raise PeerLost("the server of the socket loop", str(error)) from error
    finally:
        for one in made:
            end(one.socket)
        await crew.close()
        for one in made:  # what was still being opened
            end(one.socket)
    answer = await ask("socket.finish", {})
    samples = [seconds for one in spent for seconds in one.samples]
    seconds = max(one.ended for one in spent) - min(one.began for one in spent)
    return Measured(
        seconds,
        latency_of(samples),
        len(samples),
        EndUsage(cpu_s=sum(one.cpu_s for one in spent)),
        EndUsage(cpu_s=float(answer["cpu_s"])),
    )
