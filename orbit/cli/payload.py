"""How `orbit serve` turns a file into a registered payload.

A file that fits is copied into registered memory, so that peers with RDMA read it without this
process. Any other is mapped and sent by the kernel: bytes of a mapping are never touched here,
since a file that shrinks meanwhile would end the process (SIGBUS) instead of one transfer.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .failures import LocalFileError

# Small payloads travel inside the acquire answer, which copies them: they live in memory.
MAP_MIN_BYTES = 4 << 20
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A file's bytes as a buffer, and the digest of what was read."""

    path: Path
    nbytes: int
    sha256: str
    buffer: memoryview
    mapped: bool


def ticket_name(path: Path) -> str:
    """The file's name as a ticket takes it: printable UTF-8 of at most 255 bytes."""
    shown = "".join(c if c.isprintable() and c != "\\" else "_" for c in path.name)
    return shown.encode("utf-8", "replace")[:255].decode("utf-8", "ignore")


def file_size(path: Path) -> int:
    """Raises UsageError for what is not a readable regular file."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path}: not a regular file")
    return found.st_size


def load(path: Path, *, into_memory: bool, keep_going: Callable[[], bool]) -> Payload:
    """Read the file once, for its digest and (if it goes into memory) its bytes.

    `keep_going` is asked between pieces, because a thread cannot be cancelled. Blocks. Raises
    LocalFileError, also when the file changes its size meanwhile.
    """
    try:
        with path.open("rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            mapped = not into_memory and nbytes >= MAP_MIN_BYTES
            target = _mapping(file.fileno(), nbytes) if mapped else _anonymous(nbytes)
            digest = hashlib.sha256()
            scratch = memoryview(bytearray(min(_READ_BYTES, nbytes))) if mapped else target
            offset = 0
            while offset < nbytes and keep_going():
                start = 0 if mapped else offset
                piece = scratch[start : start + min(_READ_BYTES, nbytes - offset)]
                got = file.readinto(piece)
                if not got:
                    raise LocalFileError(f"{path}: became shorter while it was read")
                digest.update(piece[:got])
                offset += got
    except OSError as error:
        raise LocalFileError.of(path, error) from error
    return Payload(path, nbytes, digest.hexdigest(), target, mapped)


def _mapping(fd: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))


def _anonymous(nbytes: int) -> memoryview:
    if nbytes == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
