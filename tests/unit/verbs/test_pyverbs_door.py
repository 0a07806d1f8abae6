"""The door to pyverbs, as far as it shows without a device: pinning, proven pointers, logging,
typed errors, fork.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

from orbit.errors import ClosedError, DeviceError
from orbit.verbs.pinned import Field, PinnedObject, native_pointer, read_memory


class Cell:
    """An object whose memory holds a pointer at a known offset: its only slot."""

    __slots__ = ("pointer",)
    pointer: object


def cell_with_pointer() -> tuple[Cell, int]:
    """The slot holds a Python object, so the pointer that is tested is that of the object."""
    cell = Cell()
    cell.pointer = ctypes.c_uint64(0)
    return cell, Cell.__basicsize__ - 8


class TestPointers:
    def test_known_fields_prove_it(self) -> None:
        cell, offset = cell_with_pointer()
        native = id(cell.pointer)
        reference_count = sys.getrefcount(cell.pointer) - 1
        fields = [Field("type", 8, 8, id(type(cell.pointer)))]
        assert native_pointer(cell, offset, fields, "nic0") == native
        low = Field("references", 0, 4, reference_count & 0xFFFFFFFF)
        assert native_pointer(cell, offset, [*fields, low], "nic0") == native

    def test_a_wrong_field_refuses_it(self) -> None:
        cell, offset = cell_with_pointer()
        with pytest.raises(DeviceError, match="qp_num is 0x") as wrong:
            native_pointer(cell, offset, [Field("qp_num", 8, 8, 5)], "nic0")
        assert wrong.value.device == "nic0"
        assert "pyverbs" in wrong.value.hint

    def test_no_pointer_at_all_is_an_error_and_no_crash(self) -> None:
        class Holder:
            pass

        holder = Holder()
        # An object's reference count is no address.
        with pytest.raises(DeviceError) as wrong:
            native_pointer(holder, 0, [Field("qp_num", 8, 8, 5)], "nic0")
        assert wrong.value.errno == errno.EFAULT

    def test_memory_is_read_where_there_is_some(self) -> None:
        data = ctypes.create_string_buffer(b"some bytes")
        assert read_memory(ctypes.addressof(data), 4) == b"some"
        assert read_memory(8, 8) == b""
        assert read_memory(1 << 63, 8) == b""


class Owner:
    """A foreign object whose destructor looks at its pointer: it must find none."""

    __slots__ = ("__weakref__", "pointer")
    destroyed_by_itself = 0

    def __init__(self) -> None:
        self.pointer: object = object()

    def __del__(self) -> None:
        # After a native destroy the slot reads as empty.
        if hasattr(self, "pointer"):
            Owner.destroyed_by_itself += 1


def pinned(log: list[int], *parents: PinnedObject, fail: int = 0) -> PinnedObject:
    owner = Owner()
    offset = next(
        at
        for at in range(16, Owner.__basicsize__, 8)
        if ctypes.c_uint64.from_address(id(owner) + at).value == id(owner.pointer)
    )
    kept.append(owner.pointer)  # the slot is cleared without its reference being dropped
    native = id(owner.pointer)

    def destroy(address: int) -> int:
        log.append(address)
        return fail

    return PinnedObject("nic0", owner, offset, native, destroy, "destroy_qp", parents)


kept: list[object] = []


class TestPinning:
    def test_an_object_that_nobody_closes_is_never_destroyed(self) -> None:
        before = Owner.destroyed_by_itself
        log: list[int] = []
        pinned(log)
        gc.collect()
        assert (Owner.destroyed_by_itself, log) == (before, [])

    def test_a_closed_one_is_destroyed_once_and_not_by_the_binding(self) -> None:
        before = Owner.destroyed_by_itself
        log: list[int] = []
        thing = pinned(log)
        native = thing.native
        thing.close()
        thing.close()
        del thing
        gc.collect()
        assert log == [native]
        assert Owner.destroyed_by_itself == before

    def test_native_is_zero_afterwards(self) -> None:
        thing = pinned([])
        thing.close()
        assert thing.native == 0

    def test_parents_wait_for_their_children(self) -> None:
        log: list[int] = []
        parent = pinned(log)
        child = pinned(log, parent, parent)
        with pytest.raises(DeviceError, match="1 children") as busy:
            parent.close()
        assert busy.value.errno == errno.EBUSY
        assert not log
        child.close()
        parent.close()
        assert len(log) == 2

    def test_a_refused_destroy_keeps_the_object(self) -> None:
        thing = pinned([], fail=errno.EINVAL)
        for _ in range(2):
            with pytest.raises(DeviceError) as refused:
                thing.close()
            assert (refused.value.verb, refused.value.errno) == ("destroy_qp", errno.EINVAL)
        assert thing.native

    def test_a_forked_child_may_not_touch_it(self) -> None:
        log: list[int] = []
        thing = pinned(log)
        pid = os.fork()
        if pid == 0:
            code = 0
            for use in (lambda: thing.native, thing.close):
                try:
                    use()
                except ClosedError:
                    code += 1
            os._exit(code if not log else 9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
        assert thing.native
        thing.close()


def run_python(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], check=True, text=True, capture_output=True
    )
    assert not done.stderr, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_pyverbs() -> None:
    out = run_python(
        """
        import sys
        import orbit.verbs._pyverbs, orbit.verbs.scripted
        print([name for name in sys.modules if name.split(".")[0] == "pyverbs"])
        """
    )
    assert out == "[]"


def test_absence_is_typed() -> None:
    out = run_python(
        """
        import sys
        sys.modules["pyverbs"] = None
        from orbit.errors import DeviceError
        from orbit.verbs._pyverbs import PyverbsProvider
        try:
            PyverbsProvider()
        except DeviceError as error:
            print(error.errno, error.verb, "python3-pyverbs" in error.hint)
        """
    )
    assert out == f"{errno.ENOENT} import True"


needs_pyverbs = pytest.mark.skipif(
    importlib.util.find_spec("pyverbs") is None, reason="pyverbs is not installed"
)


@needs_pyverbs
def test_the_root_logger_is_left_alone() -> None:
    out = run_python(
        """
        import logging
        from orbit.verbs._pyverbs import PyverbsProvider
        before = logging.root.handlers[:], logging.root.level
        PyverbsProvider()
        print((logging.root.handlers, logging.root.level) == before)
        """
    )
    assert out == "True"


@needs_pyverbs
def test_a_user_who_configured_logging_keeps_it() -> None:
    out = run_python(
        """
        import logging, sys
        logging.basicConfig(level=logging.ERROR, stream=sys.stdout)
        from orbit.verbs._pyverbs import PyverbsProvider
        PyverbsProvider()
        print(len(logging.root.handlers), logging.root.level)
        """
    )
    assert out == "1 40"


@needs_pyverbs
def test_no_device_is_an_empty_list_and_a_typed_error() -> None:
    out = run_python(
        """
        from orbit.errors import DeviceError
        from orbit.verbs._pyverbs import PyverbsProvider
        provider = PyverbsProvider()
        assert isinstance(list(provider.devices()), list)
        try:
            provider.open("no_such_nic0")
        except DeviceError as error:
            print(error.errno, error)
        """
    )
    assert out == f"{errno.ENODEV} no_such_nic0: open_device: No such device"


@needs_pyverbs
def test_what_an_event_is_about_stands_before_its_type() -> None:
    """pyverbs tells the type alone, so the door reads both, and compares the type each time."""
    out = run_python(
        """
        import ctypes
        from pyverbs.device import AsyncEvent
        from orbit.verbs import _pyverbs
        event = AsyncEvent()
        at = id(event) + type(event).__basicsize__ - _pyverbs._ASYNC_EVENT.size
        ctypes.memmove(at, _pyverbs._ASYNC_EVENT.pack(1, 10), 12)
        print(event.event_type)
        """
    )
    assert out == "10"
