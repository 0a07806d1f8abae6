"""A program that uses orbit and ends in one of the ways in which programs end, with all open.

`NAME SEED PATH`, PATH being tcp, scripted or rdma. It says in JSON lines where it is. What must be
so at the very end is looked at by `at_the_end`, which runs after what orbit does at exit.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import orbit
import orbit.sync
from orbit.testing.pattern import pattern

NBYTES = 300_000
MIB = 1 << 20
RAILS = ("a0", "a1")
LAB_DEVICES = ("rxa1", "rxb1")  # of the SoftRoCE lab, one on either host
CALLBACK_STATUS = 3  # of who calls sys.exit in a callback
kept: Any = None  # a module's global outlives all else


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def at_the_end(scripted: Any) -> None:
    """Registered before orbit registers anything, so it comes last."""
    left = [thread.name for thread in threading.enumerate() if thread.name == "orbit node"]
    if scripted is not None:
        scripted.__exit__(None, None, None)  # asserts that no object of a device lives
    say(left=left)


def devices_of(path: str) -> Any:
    if path == "rdma":
        from tests.softroce import rails as found

        found.look_once()
    if path != "scripted":
        return None
    from tests.scenarios.scripted_rails import scripted_rails

    rails = scripted_rails(RAILS, lambda _: RAILS)
    rails.__enter__()
    return rails


def open_engine(transport: str, device: str | None) -> orbit.sync.TransferEngine:
    rdma = orbit.RdmaConfig(device=device)
    node = orbit.NodeConfig(transport=transport, rdma=rdma)
    engine = orbit.sync.TransferEngine(orbit.EngineConfig(node=node))
    engine.open()
    return engine


class World:
    """Two engines here, each with a node of its own, and everything that they give out."""

    def __init__(self, path: str) -> None:
        demanded = "tcp" if path == "tcp" else "rdma"
        devices = LAB_DEVICES if path == "rdma" else (None, None)
        self.source, self.requester = (open_engine(demanded, device) for device in devices)
        self.there = self.source.register(bytearray(pattern(NBYTES)), "read")
        self.into = bytearray(NBYTES)
        self.here = self.requester.register(self.into)
        self.peer = self.requester.open_peer(self.source.address)
        request = orbit.TransferRequest("read", self.here, self.there.remote(), demanded, 20.0)
        self.batch = self.requester.submit(request)
        self.results = self.batch.result()
        assert self.into == pattern(NBYTES)
        self.nodes = self.source.node, self.requester.node
        self.more(*self.nodes)
        if path != "tcp":
            self.writer = self.nodes[0].alloc_pinned_writer(4096)
        say(path=self.results[0].path)

    def more(self, owner: orbit.sync.Node, consumer: orbit.sync.Node) -> None:
        self.guard = owner.register_owned(bytearray(NBYTES))
        self.handle = owner.register_data_pinned(pattern(NBYTES))
        _, self.lease = consumer.get(self.handle)  # and is not given back
        owner.handler("echo", lambda message: bytes(message.payload))
        self.answer = consumer.unary(owner.identity, "echo", b"x")
        self.stream = owner.open_stream()
        self.sender = consumer.attach_stream(self.stream.handle)

    def parts(self) -> list[str]:
        return list(vars(self))


def falls_off(path: str, seed: int) -> None:
    global kept  # noqa: PLW0603
    kept = World(path)


def in_a_cycle(path: str, seed: int) -> None:
    global kept  # noqa: PLW0603
    world: Any = World(path)
    world.itself = [world, world.source]
    world.source.also = world
    kept = world.source


def drops(path: str, seed: int) -> None:
    """Engines, nodes, regions, guards, streams: in any order, with the collector in between."""
    chance = random.Random(seed)
    world = World(path)
    names = world.parts()
    chance.shuffle(names)
    for name in names:
        delattr(world, name)
        if chance.random() < 0.5:
            gc.collect()
    del world
    gc.collect()


def exits_in_a_callback(path: str, seed: int) -> None:
    world = World(path)
    owner, consumer = world.nodes
    handle = owner.register_data_pinned(pattern(MIB))
    consumer.get_into(handle, bytearray(MIB), progress=lambda _: sys.exit(CALLBACK_STATUS))


def exits_in_a_handler(path: str, seed: int) -> None:
    world = World(path)
    owner, consumer = world.nodes
    owner.handler("leave", lambda message: sys.exit(CALLBACK_STATUS))
    consumer.unary(owner.identity, "leave")


def leaves_a_busy_handler(path: str, seed: int) -> None:
    """Which would be busy for longer than anybody waits."""
    world = World(path)
    owner, consumer = world.nodes
    began = threading.Event()

    def busy(_: object) -> None:
        began.set()
        time.sleep(600)

    owner.handler("busy", busy)
    consumer.send(owner.identity, "busy")
    began.wait()


def goes_on_in_a_thread(path: str, seed: int) -> None:
    """The program is its other thread; the main one ends first."""
    world = World(path)
    owner, consumer = world.nodes

    def rest() -> None:
        threading.main_thread().join()
        region = owner.register_owned(bytearray(NBYTES))
        handle = owner.register_data_pinned(pattern(NBYTES))
        data, lease = consumer.get(handle)
        consumer.release(handle, lease)
        region.unregister()
        assert consumer.unary(owner.identity, "echo", b"y") == b"y"
        say(went_on=data == pattern(NBYTES))

    threading.Thread(target=rest).start()


async def open_pair() -> tuple[orbit.Node, orbit.Node, orbit.Handle]:
    nodes = orbit.Node(), orbit.Node()
    for node in nodes:
        await node.open()
    nodes[1].add_peer(nodes[0].address)
    return *nodes, await nodes[0].register_data(pattern(16 * MIB))


def exits_in_an_async_callback(path: str, seed: int) -> None:
    async def main() -> None:
        _, consumer, handle = await open_pair()
        into = bytearray(16 * MIB)
        await consumer.get_into(handle, into, progress=lambda _: sys.exit(CALLBACK_STATUS))

    asyncio.run(main())


def raises_in_a_task(path: str, seed: int) -> None:
    async def main() -> None:
        _, consumer, handle = await open_pair()
        begun = asyncio.Event()
        into = bytearray(16 * MIB)
        getting = asyncio.create_task(
            consumer.get_into(handle, into, progress=lambda _: begun.set())
        )
        await begun.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.wait_for(getting, 60))

    async def fail() -> None:
        raise ZeroDivisionError("of the program")

    asyncio.run(main())


def falls_off_async(path: str, seed: int) -> None:
    global kept  # noqa: PLW0603

    async def main() -> object:
        return await open_pair()

    kept = asyncio.run(main())


def waits_for_an_answer(path: str, seed: int) -> None:
    """For a handler that gives none, until a signal comes."""
    world = World(path)
    owner, consumer = world.nodes

    @owner.handler("hang")
    async def hang(_: object) -> None:
        say(waiting=True)
        await asyncio.sleep(600)

    consumer.unary(owner.identity, "hang")


def waits(path: str, seed: int) -> None:
    """For a peer that is stopped in the middle of a transfer, until a signal comes."""
    world = World(path)
    peer = json.loads(sys.stdin.readline())
    node = world.nodes[0]
    node.add_peer(peer["address"])
    stopped = threading.Event()

    def progress(_: int) -> None:
        if not stopped.is_set():
            os.kill(peer["pid"], signal.SIGSTOP)
            stopped.set()

    def tell() -> None:
        stopped.wait()
        say(waiting=True)

    threading.Thread(target=tell, daemon=True).start()
    node.get_into(orbit.Handle.parse(peer["handle"]), bytearray(peer["nbytes"]), progress=progress)
    raise AssertionError("it arrived")


def waits_and_takes_sigterm(path: str, seed: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    waits(path, seed)


def main(name: str, seed: str, path: str) -> None:
    atexit.register(at_the_end, devices_of(path))
    globals()[name](path, int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
