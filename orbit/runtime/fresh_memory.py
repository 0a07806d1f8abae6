"""Fresh memory for a fetch to fill: private, plain, and of exactly the payload's size.

Nothing here is registered with a device; whoever holds a view of it keeps it alive.
"""

from __future__ import annotations

import contextlib
import mmap

from ..errors import BudgetExceeded

# Below this a zeroed bytearray from the allocator is as good; above, anonymous pages come untouched
# (no zeroing ahead of the copy) and go back to the kernel when the last view is dropped.
MAPPED_MIN_BYTES = 1 << 20
# Huge pages spare 511 of 512 page faults while the payload is written for the first time.
_HUGE_MIN_BYTES = 8 << 20
_UNIX = hasattr(mmap, "MAP_ANONYMOUS")


def fresh_memory(nbytes: int) -> memoryview:
    """A writable byte view over new private memory. Raises BudgetExceeded when the host has none
    left.
    """
    try:
        if nbytes < MAPPED_MIN_BYTES:
            return memoryview(bytearray(nbytes))
        # Private, so that a forked child never shares the payload (the default flag would).
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if _UNIX else {}
        pages = mmap.mmap(-1, nbytes, **private)
    except (OSError, MemoryError, OverflowError) as error:
        raise BudgetExceeded("memory of this process", nbytes, 0, 0, "its limits") from error
    if nbytes >= _HUGE_MIN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them; small pages do
            pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
