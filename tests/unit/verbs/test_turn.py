"""The helper's binding without any device: records, loading, errors, prefaulting, fork."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import orbit.verbs.prefault
from orbit.errors import ClosedError, DeviceError, UsageError
from orbit.testing.pattern import pattern
from orbit.verbs import records
from orbit.verbs.prefault import prefault
from orbit.verbs.quirks import RXE, SPECIFICATION, quirks_of
from orbit.verbs.turn import (
    Completion,
    Crossings,
    QueuePairAttributes,
    Turn,
    library_path,
    pack_bind,
    pack_local_inv,
    pack_read,
    pack_recv,
    pack_send,
    pack_send_with_inv,
)

TURN = Path(orbit.verbs.prefault.__file__).parent / "_turn"


@pytest.fixture
def turn() -> Turn:
    return Turn(library_path("scripted"))


def test_records_are_the_headers() -> None:
    """64, 24, 40 and 88 bytes; the library compares again when it is loaded."""
    sizes = [layout.size for layout in (records.WR, records.RECV, records.WC, records.ATTR)]
    assert sizes == [64, 24, 40, 96]


def test_a_request_carries_its_fields_in_order() -> None:
    read = records.WR.unpack(pack_read(1, 2, 3, 4, 5, 6, 7))
    assert read == (1, 2, 5, 0, 0, 4, 3, 6, 2, 7, 0)
    receipt = records.WR.unpack(pack_send_with_inv(1, 2, 3, 4, 0xFFFFFFFF))
    assert receipt == (1, 2, 0, 0, 0, 4, 3, 0xFFFFFFFF, 1, 3, 0)
    bind = records.WR.unpack(pack_bind(1, 2, 3, 4, 5, 6, 1))
    assert bind == (1, 4, 0, 2, 3, 5, 0, 6, 4, 1, 1)
    assert records.WR.unpack(pack_bind(1, 2, 3, 4, 5, 6, 1, key_now=0))[2] == 1 << 32
    assert records.WR.unpack(pack_local_inv(1, 9))[7:9] == (9, 5)
    assert records.RECV.unpack(pack_recv(1, 2, 3, 4)) == (1, 2, 3, 4)


def test_attributes_carry_a_gid() -> None:
    packed = QueuePairAttributes(2, dgid="::ffff:198.18.0.1", dest_qpn=17).pack()
    assert packed[-16:] == bytes(10) + b"\xff\xff" + bytes([198, 18, 0, 1])
    with pytest.raises(UsageError):
        QueuePairAttributes(2, dgid="198.18.0.1").pack()


def test_a_completion_is_a_named_tuple() -> None:
    assert Completion(1, 0, 2, 64, 17, 0, 0, 0).byte_len == 64


def test_both_libraries_load_where_they_were_built() -> None:
    assert Turn(library_path("native")).crossings == Crossings()
    assert Turn(library_path("scripted")).crossings.total == 0


def test_a_null_address_is_an_error_in_both(turn: Turn) -> None:
    for helper in (turn, Turn(library_path("native"))):
        assert helper.post_send(0, [pack_send(1, 0, 0, 0)]) == (0, errno.EBADF)
        assert helper.post_recv(0, [bytes(24)]) == (0, errno.EBADF)
        assert helper.post_shared_receive(0, [bytes(24)]) == (0, errno.EBADF)
        calls = (helper.arm, helper.poll, helper.channel_fd, helper.async_fd, helper.poller_drain)
        for call in calls:
            with pytest.raises(DeviceError) as refused:
                call(0)
            assert refused.value.errno == errno.EBADF
        with pytest.raises(DeviceError):
            helper.drain_events(0, 0)
        with pytest.raises(DeviceError):
            helper.wait(0, 0, 0, 0)
        with pytest.raises(DeviceError):
            helper.wake(0, 0)
        with pytest.raises(DeviceError):
            helper.nap(0, 0, 0, 0)
        refused = helper.post(0, [bytes(24)], [pack_send(1, 0, 0, 0)])
        assert refused == ((0, errno.EBADF), (0, errno.EBADF), None)
        assert helper.post(0, [], [pack_send(1, 0, 0, 0)]) == ((0, 0), (0, errno.EBADF), None)
        with pytest.raises(DeviceError):
            helper.modify(0, QueuePairAttributes(1), "nic0")
        with pytest.raises(DeviceError):
            helper.poller_start(0, 0, 8, 0, 0)
        helper.poller_stop(0)
        helper.poller_free(0)
        helper.set_window_key(0, 1)
        assert helper.window_key(0) == 0


def test_a_helper_of_another_version_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int turn_abi(void){return 99;} unsigned turn_sizes(void){return 0;}\n")
    library = tmp_path / "other.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the helper was built, so there is a compiler"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(DeviceError, match="ABI 99") as refused:
        Turn(library)
    assert "build orbit again" in refused.value.hint
    source.write_text("int nothing;\n")
    empty = tmp_path / "empty.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", empty, source], check=True)
    with pytest.raises(DeviceError):
        Turn(empty)
    with pytest.raises(DeviceError):
        Turn(tmp_path / "absent.so")


def test_what_was_found_outlives_the_step_that_fails(tmp_path: Path) -> None:
    """`wake.c` over steps that answer by script, under the sanitizers."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the helper was built, so there is a compiler"
    program = tmp_path / "wake_steps"
    sources = [Path(__file__).with_name("wake_steps.c"), TURN / "wake.c"]
    sanitized = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    subprocess.run([compiler, *sanitized, f"-I{TURN}", *sources, "-o", program], check=True)
    done = subprocess.run([program], check=False, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_an_absent_helper_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("orbit.verbs.turn.__file__", str(tmp_path / "turn.py"))
    with pytest.raises(DeviceError) as absent:
        library_path("native")
    assert absent.value.errno == errno.ENOENT
    assert "libibverbs-dev" in absent.value.hint


def test_threads_do_not_share_out_parameters(turn: Turn) -> None:
    """Refusals of several threads at once each tell their own accepted count."""
    wrong: list[object] = []

    def refuse() -> None:
        for _ in range(2000):
            result = turn.post_send(0, [bytes(64)])
            if result != (0, errno.EBADF):
                wrong.append(result)

    threads = [threading.Thread(target=refuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_cannot_use_the_parents_helper(turn: Turn) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        raised = 0
        for call in (
            lambda: turn.post_send(0, []),
            lambda: turn.poll(0),
            lambda: turn.wait(0, 0, 0, 0),
            lambda: turn.nap(0, 0, 0, 0),
            lambda: turn.wake(0, 0),
            lambda: turn.post(0, [], []),
            lambda: turn.post_shared_receive(0, []),
            lambda: turn.poller_start(0, 0, 8, 0, 0),
            lambda: turn.poller_drain(0),
            lambda: turn.poller_stop(0),
            lambda: turn.async_fd(0),
            lambda: turn.set_window_key(0, 0),
            lambda: turn.prefault(0, 0),
        ):
            try:
                call()
            except ClosedError:
                raised += 1
        Turn(library_path("scripted")).window_key(0)  # its own works
        os.write(write_end, bytes([raised]))
        os._exit(0)
    os.close(write_end)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read_end, 1) == b"\x0d"
    os.close(read_end)
    assert turn.window_key(0) == 0


class TestPrefault:
    def test_contents_stay(self, turn: Turn) -> None:
        memory = mmap.mmap(-1, 1 << 20)
        memory[:] = pattern(1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        turn.prefault(address + 5, (1 << 20) - 10)
        assert memory[:] == pattern(1 << 20)
        assert turn.crossings.prefault == 1

    def test_pages_are_there_afterwards(self) -> None:
        memory = mmap.mmap(-1, 64 * mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert resident(address, 64) == 0
        prefault(address + mmap.PAGESIZE + 1, mmap.PAGESIZE)  # touches two pages
        assert resident(address, 64) == 2
        prefault(address, 64 * mmap.PAGESIZE)
        assert resident(address, 64) == 64

    def test_large_ranges_go_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(orbit.verbs.prefault, "_CHUNK_BYTES", 4 * mmap.PAGESIZE)
        memory = mmap.mmap(-1, 10 * mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert prefault(address, 10 * mmap.PAGESIZE) == 3
        assert resident(address, 10) == 10

    def test_nothing_to_do(self) -> None:
        assert prefault(0, 0) == 0

    def test_read_only_memory_is_faulted_for_reading(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(random.Random(7).randbytes(4 * mmap.PAGESIZE))
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        start = address_of_readonly(memory)
        prefault(start, 4 * mmap.PAGESIZE)
        assert resident(start, 4) == 4

    def test_unmapped_memory_is_an_error(self) -> None:
        with pytest.raises(DeviceError) as refused:
            prefault(mmap.PAGESIZE, mmap.PAGESIZE)
        assert refused.value.errno in {errno.ENOMEM, errno.EFAULT}

    def test_an_old_kernel_leaves_it_to_the_registration(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unknown_advice(*_arguments: int) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

        monkeypatch.setattr(orbit.verbs.prefault, "_madvise", unknown_advice)
        assert prefault(mmap.PAGESIZE, mmap.PAGESIZE) == 1
        monkeypatch.setattr(orbit.verbs.prefault, "_madvise", None)
        assert prefault(mmap.PAGESIZE, mmap.PAGESIZE) == 1


def address_of_readonly(memory: mmap.mmap) -> int:
    import numpy as np

    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def resident(address: int, pages: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    vector = (ctypes.c_ubyte * pages)()
    found = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), vector)
    assert found == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in vector)


class TestQuirks:
    def test_rows_by_vendor(self) -> None:
        assert quirks_of(0xFFFFFF) is RXE
        assert quirks_of(0x02C9) is SPECIFICATION

    def test_the_c_sources_repeat_the_table(self) -> None:
        native = (TURN / "native.c").read_text()
        assert SPECIFICATION.with_inv_flag == 8  # IBV_WC_WITH_INV of verbs.h
        found = re.search(r"WITH_INV_ANY = IBV_WC_WITH_INV \| (0x\d+)", native)
        assert found
        assert int(found[1], 0) == RXE.with_inv_flag
        fake = (TURN / "scripted_execute.c").read_text()
        found = re.search(r"FLAG_WITH_INV = (\d+), FLAG_WITH_INV_RXE = (\d+)", fake)
        assert found
        flags = (SPECIFICATION.with_inv_flag, RXE.with_inv_flag)
        assert (int(found[1]), int(found[2])) == flags
