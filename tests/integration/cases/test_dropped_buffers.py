"""C07 between processes: the caller drops its last reference while a put is under way, and the peer
perhaps stands still meanwhile. What arrives is what was given.

That a registration holds the export is shown in tests/unit/runtime/test_regions.py and
tests/scenarios/memory_cases.py.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.waiting import until
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import SOAK, TCP

Run = Callable[[Coroutine[Any, Any, None]], None]
MIB = 1 << 20
NBYTES = 8 * MIB
WORKER = "tests.integration.cases.worker"
ROUNDS = 20 if SOAK else 1


def overwrite_what_is_free() -> None:
    gc.collect()
    junk = [np.full(MIB, 9, "u1") for _ in range(64)]
    assert len(junk) == 64


@pytest.mark.parametrize("how", ["awake", "stopped"])
def test_a_source_that_nobody_else_holds(run_async: Run, how: str) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node, worker(WORKER) as peer:
            node.add_peer(peer.address)
            for _ in range(ROUNDS):
                named = (await peer.ask("offer", nbytes=NBYTES))["handle"]
                handle = orbit.Handle.parse(named)
                await node.metadata(handle)  # connected
                source = np.full(NBYTES, 7, "u1")
                alive = weakref.ref(source)
                if how == "stopped":
                    peer.stop()
                moved: list[int] = []
                putting = asyncio.ensure_future(node.put(handle, source, progress=moved.append))
                del source
                if how == "stopped":
                    await asyncio.sleep(0.3)
                    overwrite_what_is_free()
                    assert not putting.done()
                    assert alive() is not None
                    peer.go_on()
                else:
                    await until(lambda m=moved, p=putting: m or p.done())
                    overwrite_what_is_free()
                put = await putting
                assert put.nbytes == NBYTES
                found = await peer.ask("filled", handle=named)
                assert found == {"nbytes": NBYTES, "bytes": [7]}
                del putting
                gc.collect()
                assert alive() is None

    run_async(main())


def test_a_destination_that_nobody_else_holds(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as node, worker(WORKER) as peer:
            node.add_peer(peer.address)
            named = (await peer.ask("register", nbytes=NBYTES))["handle"]
            handle = orbit.Handle.parse(named)
            await node.metadata(handle)
            for _ in range(ROUNDS):
                dest = np.zeros(NBYTES, "u1")
                alive = weakref.ref(dest)
                peer.stop()
                getting = asyncio.ensure_future(node.get_into(handle, dest))
                await asyncio.sleep(0.1)
                del dest
                gc.collect()
                junk = [np.full(MIB, 9, "u1") for _ in range(64)]
                assert alive() is not None
                peer.go_on()
                await node.detach(handle, await getting)
                assert all(part.min() == 9 for part in junk)  # nothing was written into them
                del getting
                gc.collect()
                assert alive() is None

    run_async(main())
