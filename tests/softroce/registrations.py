"""What registering much, in every kind of memory, does to a process; see test_rendezvous_cases.

The system's limit of mappings is the caller's to lower: it belongs to everybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbit

KIB, MIB = 1 << 10, 1 << 20
BUFFER_BYTES = (1 << 30) if os.environ.get("ORBIT_SOAK") == "1" else 64 * MIB
HUGE_PAGE = 2 * MIB
MAPPINGS_MAX = Path("/proc/sys/vm/max_map_count")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


async def slices(node: orbit.Node, count: int) -> int:
    """By how many mappings the process grew; some registrations are alive at a time."""
    rng = random.Random(51)
    view = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    live: list[orbit.RegionGuard] = []
    await (await node.register_owned(view[:1])).unregister()
    before = mappings()
    for _ in range(count):
        begin, nbytes = rng.randrange(BUFFER_BYTES - 64 * KIB), rng.randint(1, 64 * KIB)
        live.append(await node.register_owned(view[begin : begin + nbytes]))
        if len(live) > 8:
            await live.pop(rng.randrange(len(live))).unregister()
    for guard in live:
        await guard.unregister()
    return mappings() - before


async def registered(node: orbit.Node, view: memoryview) -> str:
    """How registering ends: well, or in words."""
    try:
        async with await node.register_owned(view):
            return "registered"
    except orbit.RegisterOwnedError as error:
        return f"{error} ({error.hint})"


async def huge(node: orbit.Node) -> dict[str, str]:
    file = os.memfd_create("huge", os.MFD_HUGETLB)
    os.ftruncate(file, 2 * HUGE_PAGE)
    view = memoryview(mmap.mmap(file, 2 * HUGE_PAGE))
    parts = {
        "whole": view,
        "half": view[: HUGE_PAGE // 2],
        "unaligned": view[4 * KIB : HUGE_PAGE + 8 * KIB],
    }
    return {name: await registered(node, part) for name, part in parts.items()}


async def crowded(node: orbit.Node) -> str:
    """With hardly a mapping left to this process."""
    memory = memoryview(mmap.mmap(-1, MIB))
    with _few_mappings():
        return await registered(node, memory)


@contextlib.contextmanager
def _few_mappings() -> Iterator[None]:
    filler = list(_fill(int(MAPPINGS_MAX.read_text()) - mappings() - 2))
    try:
        yield
    finally:
        filler.clear()


def _fill(count: int) -> Iterator[mmap.mmap]:
    """Mappings that the kernel cannot join with their neighbours."""
    for number in range(count):
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if number % 2 else 0)
        yield mmap.mmap(-1, mmap.PAGESIZE, prot=protection)


def protect_from_forks() -> None:
    """As IBV_FORK_SAFE=1, which the library reads when it is first used."""
    verbs = ctypes.CDLL("libibverbs.so.1")
    assert verbs.ibv_fork_init() == 0
    assert verbs.ibv_is_fork_initialized() != 0  # on, or the kernel does it itself


async def measured(device: str, count: int) -> dict[str, Any]:
    """By a node of its own."""
    heard = Heard()
    logging.getLogger("orbit").addHandler(heard)
    config = orbit.NodeConfig(rdma=orbit.RdmaConfig(device=device, device_timeout_s=20.0))
    async with orbit.Node(config) as node:
        start = node.statistics().registered_bytes
        begin = time.monotonic()
        found: dict[str, Any] = {"mappings_grown": await slices(node, count)}
        found["seconds"] = time.monotonic() - begin
        found["huge"] = await huge(node)
        found["crowded"] = await crowded(node)
        found["left"] = node.statistics().registered_bytes - start
    return {**found, "warnings": heard.texts}
