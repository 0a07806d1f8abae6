"""Where a registration lands, what it holds, and that its memory comes back once."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from orbit.errors import InternalError, UsageError
from orbit.model import PathReason
from orbit.runtime.fresh_memory import MAPPED_MIN_BYTES, fresh_memory
from orbit.runtime.staging import stage_held, stage_pinned
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.sim_memory import SimPinnedMemory
from orbit.transport.copying import copy_bytes


def test_held_memory_is_neither_copied_nor_let_go() -> None:
    array = np.arange(1000, dtype="u1")
    alive = weakref.ref(array)
    staged = stage_held(array)
    array[0] = 77  # forbidden to a caller, and proof that nothing was copied
    assert staged.span.view[0] == 77
    assert staged.span.view.readonly
    assert not staged.pinned
    del array
    gc.collect()
    assert alive() is not None
    staged.free()
    gc.collect()
    assert alive() is None
    with pytest.raises(InternalError):
        staged.free()


def test_a_slice_that_somebody_still_holds_does_not_stop_the_free() -> None:
    source = bytearray(100)
    staged = stage_held(source)
    piece = staged.span.view[10:20]
    staged.free()
    assert piece[0] == 0
    with pytest.raises(BufferError):
        source.append(0)
    del piece
    source.append(0)


@pytest.mark.parametrize("bad", ["text", 7, None, memoryview(bytearray(10))[::2]])
def test_what_is_no_contiguous_buffer_is_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        stage_held(bad)
    with pytest.raises(UsageError):
        run_virtual(stage_pinned(bad, None, PathReason.NO_DEVICE))


def test_pinned_staging_copies_and_gives_the_space_back() -> None:
    async def main() -> None:
        memory = SimPinnedMemory(1 << 20)
        source = bytearray(pattern(100_000))
        staging = await stage_pinned(source, memory, PathReason.OK)
        assert staging.reason is PathReason.OK
        assert staging.staged.pinned
        source[:] = bytes(len(source))
        source.append(0)  # its export is not held
        assert staging.staged.span.view == pattern(100_000)
        assert memory.allocated_count == 1
        staging.staged.free()
        assert memory.allocated_count == 0

    run_virtual(main())


def test_a_refusal_copies_to_the_heap() -> None:
    async def main() -> None:
        for refused in (PathReason.KILL_SWITCH, PathReason.NO_DEVICE):
            source = bytearray(b"abc")
            staging = await stage_pinned(source, None, refused)
            assert staging.reason is refused
            source[:] = b"xyz"
            assert staging.staged.span.view == b"abc"
        empty = await stage_pinned(b"", SimPinnedMemory(), PathReason.OK)
        assert empty.reason is PathReason.NOT_PINNED
        assert empty.staged.nbytes == 0

    run_virtual(main())


def test_a_cancelled_copy_gives_the_space_back() -> None:
    async def main() -> None:
        memory = SimPinnedMemory(64 << 20)
        task = asyncio.ensure_future(stage_pinned(bytes(40 << 20), memory, PathReason.OK))
        while memory.allocated_count == 0:  # noqa: ASYNC110 (a few turns of the loop)
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert memory.allocated_count == 0

    run_virtual(main())


def test_a_long_copy_lets_others_run() -> None:
    async def main() -> None:
        turns = 0

        async def ticker() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.ensure_future(ticker())
        source, target = memoryview(pattern(33 << 20)), memoryview(bytearray(33 << 20))
        await copy_bytes(source, target)
        assert target == source
        assert turns >= 3
        task.cancel()

    run_virtual(main())


@pytest.mark.parametrize(
    "nbytes", [0, 1, MAPPED_MIN_BYTES - 1, MAPPED_MIN_BYTES, MAPPED_MIN_BYTES + 1, 9 << 20]
)
def test_fresh_memory_is_zero_writable_and_exact(nbytes: int) -> None:
    view = fresh_memory(nbytes)
    assert view.nbytes == nbytes
    assert not view.readonly
    assert view == bytes(nbytes)
    if nbytes:
        view[nbytes - 1] = 1
