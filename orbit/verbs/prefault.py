"""Faults pages in before they are registered, without the GIL and without changing a byte.

Registration pins pages under the GIL (pyverbs never drops it), at 14 to 21 us a page when they are
untouched and 0.3 us when they are there. It knows nothing of devices; contents and ownership of the
range stay the caller's.
"""

from __future__ import annotations

import ctypes
import errno as errnos
import mmap

from ..errors import DeviceError

_CHUNK_BYTES = 64 << 20  # one madvise holds the address space's lock for this long
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = getattr(_libc, "madvise", None)  # absent where this module is imported off Linux
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _madvise.restype = ctypes.c_int


def prefault(address: int, length: int) -> int:
    """Fault [address, address + length) in, writable where it is writable; how many system calls it
    took. DeviceError when the range is not mapped. On a kernel that cannot, the pages are left to
    the registration."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = address + length
    calls = 0
    while length and start < end:
        chunk = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE - start, _CHUNK_BYTES)
        calls += 1
        if not _populate(start, chunk):
            break
        start += chunk
    return calls


def _populate(start: int, length: int) -> bool:
    """False when this kernel does not know the advice."""
    if _madvise is None:
        return False
    # EINVAL of the first means a mapping without write permission or an old kernel; the second
    # tells which.
    for advice in (_MADV_POPULATE_WRITE, _MADV_POPULATE_READ):
        while _madvise(start, length, advice):
            error = ctypes.get_errno()
            if error == errnos.EINVAL:
                break
            if error not in (errnos.EINTR, errnos.EAGAIN):
                raise DeviceError("memory", "prefault", error)
        else:
            return True
    return False
