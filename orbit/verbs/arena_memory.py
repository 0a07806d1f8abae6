"""Memory of arenas: whole pages of this process, in huge ones when the system gives them.

It maps and never registers. Where huge pages cannot be had it is ordinary memory, without a word.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import NamedTuple

from ..memory.buffer import address_of
from ..model import Address

# What an entry of the page table's middle level maps. On other page sizes the alignment is only
# unneeded, and the advice is refused.
_HUGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000  # Linux; the mmap module has no name for it


class ArenaMemory(NamedTuple):
    """`view` is exactly what was asked for. The pages go with the last view of them."""

    view: memoryview
    address: Address


def map_arena(nbytes: int) -> ArenaMemory:
    """`nbytes` (whole pages) of zeroed memory, untouched yet. Raises OSError.

    Private, not shared: only private memory is backed by transparent huge pages where the system
    is left at its defaults.
    """
    reserved = _map_reserved(nbytes)
    if reserved is not None:
        return reserved
    if nbytes < _HUGE_BYTES:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return _part(memory, 0, nbytes)
    # The slack before and behind is never touched: it costs addresses, no memory.
    memory = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -address_of(memoryview(memory)) % _HUGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    return _part(memory, start, nbytes)


def _map_reserved(nbytes: int) -> ArenaMemory | None:
    """Of the pool of huge pages that an administrator has set aside, if all of it fits there."""
    free_pages, page_bytes = _reserved_pages()
    if not page_bytes or nbytes % page_bytes or nbytes // page_bytes > free_pages:
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
    try:
        # The kernel reserves the pages now, or refuses now: touching them does not fail later.
        return _part(mmap.mmap(-1, nbytes, flags=flags), 0, nbytes)
    except OSError:
        return None  # somebody else was faster


def _reserved_pages() -> tuple[int, int]:
    """How many are free, and their size in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    facts = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free = facts.get("HugePages_Free", 0) - facts.get("HugePages_Rsvd", 0)
    return free, facts.get("Hugepagesize", 0) << 10


def _part(memory: mmap.mmap, start: int, nbytes: int) -> ArenaMemory:
    view = memoryview(memory)[start : start + nbytes]
    return ArenaMemory(view, address_of(view))
