"""The life of a native object that a foreign Python binding made: pinned from creation until its
ordered close.

The binding's own destructor closes in an order of the interpreter's choosing, also in a forked
child, and under the GIL. So each object carries one reference that nobody drops: what is never
closed is left to the kernel, which frees in the right order at exit. `close` destroys natively
without the GIL, then clears the binding's pointer, so that its destructor finds nothing to do. It
knows no binding by name.
"""

from __future__ import annotations

import ctypes
import errno as errnos
import os
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import ClosedError, DeviceError

POINTER_BYTES = 8

_pin = ctypes.pythonapi.Py_IncRef
_pin.argtypes, _pin.restype = (ctypes.py_object,), None
_unpin = ctypes.pythonapi.Py_DecRef
_unpin.argtypes, _unpin.restype = (ctypes.py_object,), None

_write = ctypes.PyDLL(None).write  # never blocks: a few hundred bytes into an empty pipe
_write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t

_process_generation = 0  # counts forks on the way from the process that imported this


def _after_fork_in_child() -> None:
    global _process_generation  # noqa: PLW0603  (what it is: a property of the process)
    _process_generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Field(NamedTuple):
    """One field of a native structure whose value is known from elsewhere."""

    name: str
    offset: int
    size: int  # 4 or 8
    expected: int


def read_memory(address: int, length: int) -> bytes:
    """Memory of this process, b"" where there is none: a wrong pointer must not crash it."""
    # The kernel reads it into a pipe, and says EFAULT instead of a signal. /proc/self/mem would do
    # the same, but is closed to a process that has dropped its privileges.
    read_end, write_end = os.pipe()
    try:
        written = _write(write_end, address, length)
        return os.read(read_end, written) if written > 0 else b""
    finally:
        os.close(read_end)
        os.close(write_end)


def native_pointer(owner: object, offset: int, fields: Sequence[Field], device: str) -> int:
    """The pointer that `owner` (a binding's object) holds at `offset`, proven by known fields of
    what it points to. DeviceError when they differ: the binding's layout is not the one that is
    known."""
    value = int(ctypes.c_uint64.from_address(id(owner) + offset).value)
    length = max(field.offset + field.size for field in fields)
    memory = read_memory(value, length)
    what = type(owner).__name__
    if len(memory) < length:
        raise DeviceError(device, f"pointer of {what}", errnos.EFAULT, f"{value:#x} at {offset}")
    for field in fields:
        form = "=Q" if field.size == POINTER_BYTES else "=I"
        (found,) = struct.unpack_from(form, memory, field.offset)
        if found != field.expected:
            raise DeviceError(
                device,
                f"pointer of {what}",
                errnos.EPROTO,
                f"{field.name} is {found:#x} there, expected {field.expected:#x}",
                hint="this pyverbs lays its objects out in another way; orbit knows that of 44",
            )
    return value


class PinnedObject:
    """One native object behind `owner`. `destroy` takes the native address and returns 0 or an
    errno."""

    def __init__(
        self,
        device: str,
        owner: object,
        pointer_offset: int,
        native: int,
        destroy: Callable[[int], int],
        destroy_verb: str,
        parents: Sequence[PinnedObject] = (),
    ) -> None:
        _pin(owner)
        self._device = device
        self._owner: object | None = owner
        self._pointer_offset = pointer_offset
        self._native = native
        self._destroy = destroy
        self._destroy_verb = destroy_verb
        self._parents = tuple(dict.fromkeys(parents))  # a queue may serve both directions
        self._children = 0
        self._generation = _process_generation
        for parent in self._parents:
            parent._children += 1

    @property
    def device(self) -> str:
        return self._device

    @property
    def native(self) -> int:
        self._check_process()
        return self._native

    def close(self) -> None:
        """Without the GIL. Refused (EBUSY) while children live, before the device is asked: a
        parent that goes first leaves objects behind that nothing can close."""
        self._check_process()
        owner = self._owner
        if owner is None:
            return
        if self._children:
            raise DeviceError(
                self._device, self._destroy_verb, errnos.EBUSY, f"{self._children} children live"
            )
        rc = self._destroy(self._native)
        if rc:
            raise DeviceError(self._device, self._destroy_verb, rc)
        self._native = 0
        self._owner = None
        for parent in self._parents:
            parent._children -= 1
        ctypes.c_uint64.from_address(id(owner) + self._pointer_offset).value = 0
        _unpin(owner)

    def _alive(self) -> None:
        self._check_process()
        if self._owner is None:
            raise ClosedError(f"{self._device}: the parent object")

    def _check_process(self) -> None:
        if self._generation != _process_generation:
            raise ClosedError(f"{self._device}: the verbs object of the parent process")
