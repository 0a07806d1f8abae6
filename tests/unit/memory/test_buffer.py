"""Buffer exports: what can be moved as bytes, what cannot, and that memory stays while it is
held.
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest

from orbit.errors import ClosedError, UsageError
from orbit.memory.buffer import BufferExport, address_of
from orbit.testing.pattern import pattern


@pytest.mark.parametrize(
    "source",
    [
        b"abcdefgh",
        bytearray(b"abcdefgh"),
        memoryview(b"abcdefgh"),
        memoryview(b"xxabcdefghyy")[2:10],
        array.array("q", [0x6867666564636261]),
        np.frombuffer(b"abcdefgh", dtype="<u8"),
        np.frombuffer(b"abcdefgh", dtype="<u2").reshape(2, 2),
        np.frombuffer(b"abcdefgh", dtype=[("a", "<u4"), ("One", ">u4")]),
        np.array(0x6867666564636261),
        (ctypes.c_char * 8)(*b"abcdefgh"),
    ],
    ids=lambda source: type(source).__name__,
)
def test_anything_contiguous_is_its_bytes(source: object) -> None:
    with BufferExport(source) as export:
        assert export.nbytes == 8
        assert export.view.format == "B"
        assert export.view.shape == (8,)
        assert bytes(export.view) == b"abcdefgh"
        assert ctypes.string_at(export.address(), 8) == b"abcdefgh"


def test_fortran_order_is_contiguous_too() -> None:
    grid = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    with BufferExport(grid) as export:
        assert bytes(export.view) == bytes([0, 3, 1, 4, 2, 5])  # as it lies in memory


@pytest.mark.parametrize("source", [b"", bytearray(), np.zeros((0, 3)), memoryview(b"a")[1:]])
def test_no_bytes(source: object) -> None:
    with BufferExport(source) as export:
        assert export.nbytes == 0
        assert export.address() == 0
        assert bytes(export.view) == b""


def test_read_only_memory_is_seen() -> None:
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for source in (b"abc", memoryview(bytearray(3)).toreadonly(), frozen):
        assert BufferExport(source).readonly
        with pytest.raises(UsageError, match="read-only"):
            BufferExport(source, writable=True)
    assert not BufferExport(bytearray(3), writable=True).readonly


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        (np.zeros((4, 4))[:, ::2], "not contiguous", "ascontiguousarray"),
        (np.zeros(4)[::-1], "not contiguous", "ascontiguousarray"),
        (memoryview(b"abcd")[::2], "not contiguous", "ascontiguousarray"),
        ("text", "str has no buffer", "encode"),
        (5, "int has no buffer", "numpy array"),
        ([1, 2], "list has no buffer", "numpy array"),
        (np.zeros(4, dtype="M8[s]"), "does not export", "view"),
        (np.array([object()]), "Python objects", "plain item type"),
        (np.zeros(2, dtype=[("x", "O")]), "Python objects", "plain item type"),
    ],
)
def test_what_cannot_be_moved_says_how_to_fix_it(source: object, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        BufferExport(source)
    assert hint in caught.value.hint


def test_the_exporter_cannot_move_the_memory_while_it_is_held() -> None:
    data = bytearray(pattern(100))
    export = BufferExport(data)
    with pytest.raises(BufferError):
        data.append(1)
    export.release()
    export.release()
    data.append(1)
    assert export.released
    with pytest.raises(ClosedError):
        _ = export.view


def test_a_dropped_array_stays_alive_while_it_is_held() -> None:
    source = np.frombuffer(bytearray(pattern(5000)), dtype=np.uint8)
    gone = weakref.ref(source)
    export = BufferExport(source)
    del source
    gc.collect()
    assert gone() is not None
    assert bytes(export.view) == pattern(5000)
    export.release()
    gc.collect()
    assert gone() is None


def test_a_mapping_stays_mapped_while_it_is_held() -> None:
    mapping = mmap.mmap(-1, 4096)
    export = BufferExport(mapping, writable=True)
    with pytest.raises(BufferError):
        mapping.close()
    export.view[:3] = b"abc"
    export.release()
    assert mapping[:3] == b"abc"
    mapping.close()


def test_a_slice_keeps_the_memory_for_as_long_as_it_lives() -> None:
    data = bytearray(pattern(10))
    export = BufferExport(data)
    part = export.view[2:4]
    export.release()
    with pytest.raises(BufferError):
        data.append(1)
    assert bytes(part) == pattern(10)[2:4]
    part.release()
    data.append(1)


def test_the_address_of_a_part() -> None:
    with BufferExport(bytearray(10)) as export:
        with export.view[3:] as part:
            assert address_of(part) == export.address() + 3
        with export.view.toreadonly()[3:] as part:
            assert address_of(part) == export.address() + 3


def test_a_view_in_a_reference_cycle_is_collected_without_harm() -> None:
    """The collector clears the oldest first; a memoryview that exports itself dies of that."""
    for size in (0, 1, 1000):
        for _ in range(20):
            source = memoryview(bytearray(size))[0:size]
            export = BufferExport(source, writable=True)
            cycle: list[object] = [source, export, export.view.toreadonly()]
            cycle.append(cycle)
            del source, export, cycle
        gc.collect()
