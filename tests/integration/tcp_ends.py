"""The ends of a TCP bulk transfer as processes: `python -m tests.integration.tcp_ends ROLE ...`.

owner NBYTES                     prints "PORT TRANSFER_ID", serves until its input ends
taker NBYTES                     the same, but its memory is there to be written
consumer PORT TRANSFER_ID NBYTES prints "moving" at the first bytes, and then takes no more
pusher PORT TRANSFER_ID NBYTES   the same, and then sends no more
"""

from __future__ import annotations

import asyncio
import sys
import time

from orbit.model import Direction, LeaseId
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession, make_hello
from orbit.transport.interface import Exposure, Span, Target
from orbit.transport.tcp_incoming import admit_all
from orbit.transport.tcp_listener import TcpListener
from orbit.transport.tcp_path import TcpPath


async def own(nbytes: int, direction: Direction) -> None:
    path = TcpPath()
    listener = TcpListener(
        lambda: make_hello(2, 0, bytes(16)), None, admit_all(lambda link: link.link.abort()), path
    )
    await listener.open("127.0.0.1", 0)
    span = Span(memoryview(bytearray(pattern(nbytes))))
    session = StubSession(1, dialer=False)
    exposure = await path.expose(session, span, LeaseId(1), direction=direction)
    print(listener.endpoints[0][1], exposure.transfer_id, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await path.close()
    await listener.close()


async def consume(port: int, transfer_id: int, nbytes: int, direction: Direction) -> None:
    def stop(moved: int) -> None:
        print("moving", flush=True)
        time.sleep(600)

    session = StubSession(1, dialer=True, endpoint=("127.0.0.1", port))
    view, exposure = memoryview(bytearray(nbytes)), Exposure(transfer_id)
    if direction is Direction.READ:
        await TcpPath().pull(session, exposure, LeaseId(1), Target(view), stop)
    else:
        await TcpPath().push(session, exposure, LeaseId(1), Span(view), stop)


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    writes = role in ("taker", "pusher")
    direction = Direction.WRITE if writes else Direction.READ
    if role in ("owner", "taker"):
        asyncio.run(own(int(numbers[0]), direction))
    else:
        port, transfer_id, nbytes = map(int, numbers)
        asyncio.run(consume(port, transfer_id, nbytes, direction))
