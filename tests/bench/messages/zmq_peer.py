"""Round trips and one-way messages by pyzmq over TCP: blocking calls, or its asyncio sockets."""

from __future__ import annotations

import asyncio
import sys
import time

import zmq
import zmq.asyncio
from figures import report


def serve() -> None:
    """Answers every message but those that begin with 1. Blocking: the faster echo."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVHWM, 0)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        message = socket.recv()
        if message[:1] != b"\1":
            socket.send(message)


async def serve_async() -> None:
    """The same within asyncio, as a node is."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVHWM, 0)
    print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        message = await socket.recv()
        if message[:1] != b"\1":
            await socket.send(message)


def run(port: int, size: int, rounds: int, messages: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(f"tcp://127.0.0.1:{port}")
    payload = bytes(size)
    times = []
    for _ in range(rounds + rounds // 10):
        begin = time.perf_counter()
        socket.send(payload)
        socket.recv()
        times.append(time.perf_counter() - begin)
    quiet = b"\1" + bytes(size - 1)
    begin = time.perf_counter()
    for _ in range(messages):
        socket.send(quiet)
    socket.send(payload)
    socket.recv()
    report(times[rounds // 10 :], messages / (time.perf_counter() - begin))


async def run_async(port: int, size: int, rounds: int, messages: int) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(f"tcp://127.0.0.1:{port}")
    payload = bytes(size)
    times = []
    for _ in range(rounds + rounds // 10):
        begin = time.perf_counter()
        await socket.send(payload)
        await socket.recv()
        times.append(time.perf_counter() - begin)
    quiet = b"\1" + bytes(size - 1)
    begin = time.perf_counter()
    for _ in range(messages):
        await socket.send(quiet)
    await socket.send(payload)
    await socket.recv()
    report(times[rounds // 10 :], messages / (time.perf_counter() - begin))


def main() -> None:
    role, *numbers = sys.argv[1:]
    values = [int(n) for n in numbers]
    match role:
        case "serve":
            serve()
        case "serve-async":
            asyncio.run(serve_async())
        case "run":
            run(*values)
        case "run-async":
            asyncio.run(run_async(*values))
        case _:
            raise SystemExit("zmq_peer.py serve | serve-async | run | run-async PORT SIZE ...")


if __name__ == "__main__":
    main()
