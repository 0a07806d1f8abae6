"""A node in a process of its own, for tests: `owner` serves a pattern, `consumer` fetches it.

Started as a module with a role and JSON arguments; says what it did in JSON lines on stdout.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import os
import sys
from typing import Any

import orbit
from orbit.testing.pattern import pattern

CONFIG = orbit.NodeConfig(transport="tcp")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def own(nbytes: int) -> None:
    node = orbit.Node(CONFIG)
    await node.open()
    handle = await node.register_data(pattern(nbytes), orbit.RegisterOptions(retain=True))
    say(address=str(node.address), handle=str(handle))
    loop = asyncio.get_running_loop()
    while command := await loop.run_in_executor(None, sys.stdin.readline):
        match command.strip():
            case "statistics":
                found = node.statistics()
                say(leases=found.slots.leases_held, sessions=found.sessions)
            case "fork":
                child = os.fork()
                if child == 0:
                    gc.collect()  # the finalizers of whatever is garbage by now
                    os._exit(0)  # as multiprocessing's children end
                _, status = await asyncio.to_thread(os.waitpid, child, 0)
                say(child=os.waitstatus_to_exitcode(status))
            case "exit":
                sys.exit(0)  # with everything open
            case "close":
                await node.close()
                say(closed=True)
                return


async def consume(address: str, handle: str, nbytes: int) -> None:
    async with orbit.Node(CONFIG) as node:
        node.add_peer(address)
        dest = mmap.mmap(-1, nbytes)
        begun = asyncio.Event()

        def progress(done: int) -> None:
            if not begun.is_set():
                begun.set()
                say(begun=done)

        try:
            lease = await node.get_into(orbit.Handle.parse(handle), dest, progress=progress)
        except orbit.OrbitError as error:
            say(error=type(error).__name__, code=error.code)
            return
        same = memoryview(dest) == pattern(nbytes)
        await node.detach(lease.handle, lease)
        say(path=lease.path, reason=lease.reason, same=same)


def main() -> None:
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    asyncio.run({"owner": own, "consumer": consume}[role](**arguments))


if __name__ == "__main__":
    main()
