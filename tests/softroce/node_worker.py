"""A worker that runs nodes on command: one JSON command per line in, one JSON answer per line out.

`lives` starts it. `open` replaces the node of the command before.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import orbit
from orbit.events import LeaseEnded
from orbit.testing.pattern import pattern
from tests.softroce import registrations

OVERWRITTEN = b"\xee"
PAGE = 4096


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def rdma_config(pool: dict[str, Any] | None = None, **knobs: Any) -> orbit.RdmaConfig:
    return orbit.RdmaConfig(pool=orbit.RdmaPoolConfig(**(pool or {})), **knobs)


class LeaseClock:
    """When each lease of an owner was last heard of, and how it ended."""

    def __init__(self) -> None:
        self.ends: list[dict[str, Any]] = []
        self._heard: dict[int, float] = {}

    def watch(self, node: orbit.Node) -> None:
        shelf = node._open()._owner._shelf
        arm, renew = shelf.arm, shelf.renew

        def armed(lease_id: orbit.LeaseId, *rest: Any) -> float:
            self._heard[lease_id] = time.monotonic()
            return arm(lease_id, *rest)

        def renewed(handle: orbit.Handle, lease_id: orbit.LeaseId, epoch: bytes) -> None:
            self._heard[lease_id] = time.monotonic()
            renew(handle, lease_id, epoch)

        shelf.__dict__.update(arm=armed, renew=renewed)

    def on_event(self, event: object) -> None:
        if isinstance(event, LeaseEnded):
            now = time.monotonic()
            silent_s = now - self._heard.get(event.lease_id, now)
            self.ends.append(
                {
                    "handle": str(event.handle),
                    "how": event.how.value,
                    "at": now,
                    "silent_s": silent_s,
                }
            )


@contextlib.contextmanager
def slow_drains(seconds: float) -> Iterator[list[float]]:
    """Every bulk queue pair takes so much longer to be drained; yields when each was."""
    from orbit.verbs.queue_pair import BulkQueuePair

    drain, drained = BulkQueuePair.drain, []

    async def slow(queue_pair: BulkQueuePair, cause: orbit.OrbitError) -> None:
        queue_pair.fail(cause)
        await asyncio.sleep(seconds)
        await drain(queue_pair, cause)
        drained.append(time.monotonic())

    BulkQueuePair.drain = slow  # type: ignore[method-assign]
    try:
        yield drained
    finally:
        BulkQueuePair.drain = drain  # type: ignore[method-assign]


class Droppable(bytearray):
    """A buffer that can be seen to die."""


class Worker:
    """The node, and what its owner and its consumer look at afterwards."""

    def __init__(self, listen: str) -> None:
        self.listen = listen
        self.node: orbit.Node | None = None
        self.memory = bytearray()  # in which payloads are served in place, or puts land
        self.guard: orbit.RegionGuard | None = None
        self.dest = bytearray()  # of the latest get
        self.leases = LeaseClock()

    @property
    def opened(self) -> orbit.Node:
        assert self.node is not None
        return self.node

    async def open(
        self,
        transport: str = "auto",
        rdma: dict[str, Any] | None = None,
        rendezvous: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        await self.close()
        config = orbit.NodeConfig(
            listen=self.listen,
            transport=transport,
            rdma=rdma_config(**(rdma or {})),
            rendezvous=orbit.RendezvousConfig(**(rendezvous or {})),
        )
        self.leases = LeaseClock()
        self.node = orbit.Node(config, on_event=self.leases.on_event)
        await self.node.open()
        self.leases.watch(self.node)
        return {"address": str(self.node.address)}

    async def close(self) -> dict[str, Any]:
        if self.node is not None:
            await self.node.close()
            self.node = None
        return {"closed": True}

    async def register(self, nbytes: int, pinned: bool = True) -> dict[str, Any]:
        node = self.opened
        register = node.register_data_pinned if pinned else node.register_data
        handle = await register(pattern(nbytes), orbit.RegisterOptions(retain=True))
        return {"handle": str(handle), "counters": dict(node.statistics().counters)}

    async def withdraw(self, handle: str) -> dict[str, Any]:
        await self.opened.withdraw(orbit.Handle.parse(handle))
        return {}

    async def get(
        self,
        address: str,
        handle: str,
        nbytes: int,
        transport: str | None = None,
        announce_at: int = 0,
    ) -> dict[str, Any]:
        """Fetch and compare; `announce_at` says when so many bytes have arrived (0: nothing)."""
        node = self.opened
        node.add_peer(address)
        before = dict(node.statistics().counters)
        dest = self.dest = bytearray(max(nbytes, 1))
        lease = await node.get_into(
            orbit.Handle.parse(handle), dest, transport=transport, progress=announcing(announce_at)
        )
        await node.detach(lease.handle, lease)
        after = dict(node.statistics().counters)
        return {
            "path": lease.path,
            "reason": lease.reason,
            "same": memoryview(dest)[:nbytes] == pattern(nbytes),
            "decisions": {
                name: count - before.get(name, 0)
                for name, count in after.items()
                if "path_total" in name and count != before.get(name, 0)
            },
        }

    # --- what outlives a peer ---------------------------------------------------------------------

    async def serve_in_place(self, nbytes: int) -> dict[str, Any]:
        """A payload whose memory is this worker's own, and stays where it is."""
        await self.let_go()
        self.memory = bytearray(pattern(nbytes))
        self.guard = await self.opened.register_owned(self.memory)
        options = orbit.RegisterOptions(retain=True)
        handle = await self.opened.register_data_in_region(self.guard, options=options)
        return {"handle": str(handle)}

    async def overwrite(self, handle: str) -> dict[str, Any]:
        """Take the payload back and use its memory for something else, at once."""
        begin = time.monotonic()
        await self.opened.withdraw(orbit.Handle.parse(handle))
        seconds = time.monotonic() - begin
        self.memory[:] = OVERWRITTEN * len(self.memory)
        return {"seconds": seconds}

    async def let_go(self) -> dict[str, Any]:
        if self.guard is not None:
            await self.guard.unregister(1.0)  # by force, where a test failed in the middle
        self.guard, self.memory = None, bytearray()
        return {}

    async def saw_overwritten(self) -> dict[str, Any]:
        """Whether the latest get's memory has bytes from after the payload's end."""
        return {"saw": OVERWRITTEN * PAGE in self.dest}

    async def lease_ends(self) -> dict[str, Any]:
        return {"ends": self.leases.ends}

    async def get_from_the_dying(
        self, address: str, handle: str, nbytes: int, drain_s: float
    ) -> dict[str, Any]:
        """A get that says when it has begun. Was its destination held until the queue pair was
        drained, which takes `drain_s` longer than it does, and can it be resized afterwards?
        """
        node, dest = self.opened, bytearray(nbytes)
        node.add_peer(address)
        early = held = 0
        with slow_drains(drain_s) as drained:
            getting = asyncio.ensure_future(
                node.get_into(
                    orbit.Handle.parse(handle), dest, transport="rdma", progress=announcing(1)
                )
            )
            await asyncio.wait([getting], timeout=0.5)  # it has taken the destination
            while not getting.done():
                try:
                    dest.extend(b"x")
                    early += 1
                except BufferError:
                    held += 1
                await asyncio.wait([getting], timeout=0.02)
            ended = time.monotonic()
            error = type(getting.exception()).__name__
            del getting
        resizable = True
        try:
            dest.extend(b"x")
        except BufferError:
            resizable = False
        first_drain = min(drained, default=float("inf"))
        return {
            "ended_by": error,
            "early": early,
            "held": held,
            "resizable": resizable,
            "drained_first": first_drain <= ended,
        }

    async def offer(self, nbytes: int) -> dict[str, Any]:
        await self.let_go()
        self.memory = bytearray(nbytes)
        return {"handle": str(await self.opened.register_destination(self.memory))}

    async def landed(self, handle: str, fill: int) -> dict[str, Any]:
        """Take the destination back: is it full of that byte?"""
        await self.opened.withdraw(orbit.Handle.parse(handle))
        return {"same": self.memory.count(fill) == len(self.memory)}

    async def put_dropped(
        self, address: str, handle: str, nbytes: int, fill: int
    ) -> dict[str, Any]:
        """Put a buffer that nobody else holds, while free memory is written to."""
        node = self.opened
        node.add_peer(address)
        source = Droppable(bytes([fill]) * nbytes)
        seen = weakref.ref(source)
        putting = asyncio.ensure_future(
            node.put(orbit.Handle.parse(handle), source, progress=announcing(1))
        )
        del source
        gc.collect()
        while not putting.done():
            bytearray(bytes([fill + 1]) * (4 << 20))
            await asyncio.wait([putting], timeout=0.05)
        put = putting.result()
        del putting
        gc.collect()
        return {"path": put.path, "dead": seen() is None}

    # --- trouble ----------------------------------------------------------------------------------

    async def limit_memory(self, memlock_bytes: int) -> dict[str, Any]:
        """Become a plain user who may lock that much. For good: kill the worker afterwards."""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
        return {"user": os.getuid()}

    async def register_much(self, device: str, count: int, fork_safe: bool) -> dict[str, Any]:
        """See registrations. The process must not have registered anything."""
        if fork_safe:
            registrations.protect_from_forks()
        return await registrations.measured(device, count)

    async def statistics(self) -> dict[str, Any]:
        found = self.opened.statistics()
        return {
            "leases": found.slots.leases_held + found.slots.leases_retracting,
            "sessions": found.sessions,
            "retained": len(found.retained),
            "grants": found.rdma.grants_active if found.rdma else 0,
            "queue_pairs": found.rdma.queue_pairs if found.rdma else 0,
            "aborts": found.rdma.counts["aborts"] if found.rdma else 0,
            "counters": dict(found.counters),
        }

    async def fork(self) -> dict[str, Any]:
        """A child that drops every reference that it can and exits through the interpreter."""
        child = os.fork()
        if child == 0:
            self.node = None
            gc.collect()
            os._exit(0)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        return {"child": os.waitstatus_to_exitcode(status)}

    async def exit(self) -> dict[str, Any]:
        sys.exit(0)  # with everything open


async def serve(listen: str) -> None:
    worker = Worker(listen)
    say(ready=os.getpid())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        operation: Callable[..., Awaitable[dict[str, Any]]] = getattr(worker, command.pop("op"))
        try:
            say(**await operation(**command))
        except orbit.OrbitError as error:
            say(error=type(error).__name__, code=error.code, text=str(error))
    await worker.close()


def announcing(at: int) -> Callable[[int], None]:
    """Says once when so many bytes have arrived, unless `at` is 0."""
    begun = not at

    def progress(done: int) -> None:
        nonlocal begun
        if not begun and done >= at:
            begun = True
            say(begun=done)

    return progress
