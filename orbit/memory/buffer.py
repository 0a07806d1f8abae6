"""A real buffer export of memory that someone else owns: anything with the buffer protocol, as
unsigned bytes.

While an export is held the exporter cannot move, resize or free the memory, even when every other
reference is dropped. The bytes are those that lie in memory, whatever the item type and shape. It
knows no device and copies nothing.
"""

from __future__ import annotations

import re
import sys
from pickle import PickleBuffer
from types import TracebackType
from typing import Any, Self

from ..errors import ClosedError, UsageError
from ..model import Address

_ADDRESSES = 1 << 64
_PYBUF_WRITE = 0x200  # of CPython's stable ABI


class BufferExport:
    """Holds `source`'s memory until `release`. Raises UsageError for what can never be moved as one
    piece of bytes.

    `writable=True` asks for a destination and refuses read-only memory.
    """

    __slots__ = ("_view", "nbytes", "readonly")

    def __init__(self, source: object, *, writable: bool = False) -> None:
        self._view: memoryview | None = _raw_view(source)
        self.nbytes = self._view.nbytes
        self.readonly = self._view.readonly
        if writable and self.readonly:
            self.release()
            raise UsageError(
                f"the destination ({_kind(source)}) is read-only",
                hint="pass writable memory, for example a bytearray",
            )

    @property
    def view(self) -> memoryview:
        """One dimension of unsigned bytes. A slice of it keeps the memory as long as it lives."""
        if self._view is None:
            raise ClosedError("the buffer export")
        return self._view

    @property
    def released(self) -> bool:
        return self._view is None

    def address(self) -> Address:
        """Where the memory lies. 0 for no bytes: there is nothing to point at."""
        return address_of(self.view)

    def release(self) -> None:
        """Let go of the memory. Idempotent. Raises BufferError while `view` itself is exported."""
        if self._view is not None:
            self._view.release()
            self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def address_of(view: memoryview) -> Address:
    """The address of a contiguous view's first byte, without copying and for read-only memory too;
    0 when empty.

    Valid only while the view is held.
    """
    if not view.nbytes:
        return Address(0)
    import ctypes  # here: most processes never need an address, and `import orbit` stays light

    if not view.readonly:
        return Address(ctypes.addressof(ctypes.c_char.from_buffer(view)))

    class PyBuffer(ctypes.Structure):  # Py_buffer: part of the stable ABI since Python 3.11
        _fields_ = (
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.py_object),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.c_void_p),
            ("strides", ctypes.c_void_p),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        )

    buffer = PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = int(buffer.buf)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return Address(address)


def view_of_address(address: int, nbytes: int) -> memoryview:
    """Writable bytes over memory that no Python object exports. The view holds nothing: its user
    guarantees that the memory stays, as long as the view or a slice of it is used.

    Raises UsageError for no bytes and for a range that is none in an address space.
    """
    if not isinstance(address, int) or not isinstance(nbytes, int) or address <= 0 or nbytes <= 0:
        raise UsageError(f"{nbytes!r} bytes at address {address!r} are no memory")
    if address + nbytes > _ADDRESSES or nbytes > sys.maxsize:
        raise UsageError(f"{nbytes} bytes at address {address:#x} wrap around the address space")
    import ctypes  # here, as in `address_of`

    from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
    from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    from_memory.restype = ctypes.py_object
    view: memoryview = from_memory(address, nbytes, _PYBUF_WRITE)
    return view


def _raw_view(source: Any) -> memoryview:
    try:
        exported = PickleBuffer(source)
    except TypeError:
        raise UsageError(f"{_kind(source)} has no buffer of bytes", hint=_hint(source)) from None
    except (BufferError, ValueError) as error:
        raise UsageError(
            f"{_kind(source)} does not export its memory: {error}", hint=_hint(source)
        ) from None
    try:
        _refuse_references(source)
        shared = _shared_view(source) if isinstance(source, memoryview) else None
        return exported.raw() if shared is None else shared
    except BufferError:
        raise UsageError(
            f"{_kind(source)} is not contiguous in memory",
            hint="copy it into one piece first, for example with numpy.ascontiguousarray(array)",
        ) from None
    finally:
        exported.release()


def _shared_view(source: memoryview) -> memoryview | None:
    """The bytes of a view through the export that it holds itself; None where that cannot be.

    A memoryview must not be an exporter if that can be helped: cyclic garbage collection frees one
    under its consumer when it finds both unreachable, and the process dies (CPython 3.11). It
    cannot be helped for item types that `cast` does not know, and for Fortran order.
    """
    if source.nbytes == 0:
        return memoryview(b"") if source.readonly else memoryview(bytearray())
    try:
        return memoryview(source).cast("B")
    except (TypeError, NotImplementedError):
        return None


def _refuse_references(source: Any) -> None:
    """Arrays of Python objects export pointers, which mean nothing to anybody else."""
    with memoryview(source) as typed:
        # Field names stand between colons in a structured format: "T{i:one:O:two:}".
        if "O" in re.sub(r":[^:]*:", "", typed.format):
            raise UsageError(
                f"{_kind(source)} holds Python objects, not bytes",
                hint="convert it to a plain item type first",
            )


def _kind(source: object) -> str:
    name = type(source).__name__
    return f"{name} of {source.format!r} items" if isinstance(source, memoryview) else name


def _hint(source: object) -> str:
    if isinstance(source, str):
        return "encode the text first, for example with text.encode()"
    if hasattr(source, "dtype"):
        return "pass its bytes, for example array.view('u1')"
    return "pass bytes, a bytearray, a memoryview, an mmap, an array or a numpy array"
