"""The ends of a TCP bulk transfer as processes: `python -m tests.integration.tcp_ends ROLE ...`.

owner NBYTES                     prints "PORT TRANSFER_ID", serves until its input ends
consumer PORT TRANSFER_ID NBYTES prints "moving" at the first bytes, and then takes no more
"""

from __future__ import annotations

import asyncio
import sys
import time

from orbit.model import LeaseId
from orbit.testing.pattern import pattern
from orbit.testing.sessions import StubSession, make_hello
from orbit.transport.interface import Exposure, Span, Target
from orbit.transport.tcp_incoming import admit_all
from orbit.transport.tcp_listener import TcpListener
from orbit.transport.tcp_path import TcpPath


async def own(nbytes: int) -> None:
    path = TcpPath()
    listener = TcpListener(
        lambda: make_hello(2, 0, bytes(16)), None, admit_all(lambda link: link.link.abort()), path
    )
    await listener.open("127.0.0.1", 0)
    span = Span(memoryview(pattern(nbytes)))
    exposure = await path.expose(StubSession(1, dialer=False), span, LeaseId(1))
    print(listener.endpoints[0][1], exposure.transfer_id, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await path.close()
    await listener.close()


async def consume(port: int, transfer_id: int, nbytes: int) -> None:
    def stop(arrived: int) -> None:
        print("moving", flush=True)
        time.sleep(600)

    session = StubSession(1, dialer=True, endpoint=("127.0.0.1", port))
    target = Target(memoryview(bytearray(nbytes)))
    await TcpPath().pull(session, Exposure(transfer_id), LeaseId(1), target, stop)


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    if role == "owner":
        asyncio.run(own(int(numbers[0])))
    else:
        asyncio.run(consume(*map(int, numbers)))
