"""Page arithmetic of registered memory: what the kernel pins for a range, and where a range is cut
that is longer than one registration may be.

It knows addresses and sizes only, neither memory nor devices.
"""

from __future__ import annotations

from itertools import pairwise

from ..errors import UsageError
from ..model import Address

PAGE_BYTES = 4096  # the granule; where the system's pages are larger, cuts still lie on ours


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def page_range(address: int, nbytes: int) -> tuple[Address, int]:
    """The first page's address, and the bytes of all pages that the range touches. Raises
    UsageError for an empty range and for one that wraps around.
    """
    if nbytes < 1:
        raise UsageError(f"a range of {nbytes} bytes")
    if address < 0 or address + nbytes > 1 << 64:
        raise UsageError(f"{nbytes} bytes at {address:#x} wrap around the address space")
    first = address // PAGE_BYTES * PAGE_BYTES
    return Address(first), whole_pages(address + nbytes - first)


def cut(address: int, nbytes: int, limit_bytes: int) -> tuple[tuple[Address, int], ...]:
    """The range as parts of at most `limit_bytes` (but never less than a page), in order. Inner
    borders lie between pages, so that no page is pinned for two parts.
    """
    first, pinned_bytes = page_range(address, nbytes)
    step = max(limit_bytes // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
    end = address + nbytes
    borders = [address, *range(first + step, first + pinned_bytes, step), end]
    return tuple((Address(low), high - low) for low, high in pairwise(borders))
