"""A process that runs nodes on command: one JSON command per line in, one JSON answer per line out.

Started once per host, since starting Python costs seconds on an emulated processor. `open` replaces
the node of the command before.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import os
import resource
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import orbit
from orbit.testing.pattern import pattern


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def rdma_config(pool: dict[str, Any] | None = None, **knobs: Any) -> orbit.RdmaConfig:
    return orbit.RdmaConfig(pool=orbit.RdmaPoolConfig(**(pool or {})), **knobs)


class Worker:
    """The node, and the tasks that a `start_get` left running."""

    def __init__(self, listen: str) -> None:
        self.listen = listen
        self.node: orbit.Node | None = None

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
        self.node = orbit.Node(config)
        await self.node.open()
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

    async def get(
        self,
        address: str,
        handle: str,
        nbytes: int,
        transport: str | None = None,
        announce: bool = False,
    ) -> dict[str, Any]:
        """Fetch and compare; `announce` says when the first bytes have arrived."""
        node = self.opened
        node.add_peer(address)
        before = dict(node.statistics().counters)
        dest = mmap.mmap(-1, max(nbytes, 1))
        begun = not announce

        def progress(done: int) -> None:
            nonlocal begun
            if not begun:
                begun = True
                say(begun=done)

        lease = await node.get_into(
            orbit.Handle.parse(handle), dest, transport=transport, progress=progress
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

    async def limit_memory(self, memlock_bytes: int) -> dict[str, Any]:
        """Become a plain user who may lock that much. A node was opened before, so that nothing has
        to be imported any more."""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
        return {"user": os.getuid()}

    async def statistics(self) -> dict[str, Any]:
        found = self.opened.statistics()
        return {
            "leases": found.slots.leases_held + found.slots.leases_retracting,
            "sessions": found.sessions,
            "retained": len(found.retained),
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


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
