"""Memory that one operation borrows: held until it is given back, once, whatever happens."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from orbit.errors import BusyError, ClosedError, InternalError, OrbitError, UsageError
from orbit.model import Address
from orbit.runtime.borrowed import Borrowed, CallerSink, StopScope
from orbit.runtime.region_guards import RegionSlice
from orbit.runtime.sinks import PinnedWriter
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.sim_memory import SimPinnedMemory
from orbit.transport.copying import copy_now, copy_pieces
from orbit.transport.interface import PinnedBuffer, Span, Target


class Use:
    """What a region hands out, and what became of it."""

    def __init__(self, nbytes: int, stop: Callable[[], None]) -> None:
        view = memoryview(bytearray(nbytes))
        piece = PinnedBuffer(view, Address(4096), object(), object())
        self.span, self.target = Span(view.toreadonly(), piece), Target(view, piece)
        self.stop = stop
        self.ends = 0
        self.kept: list[str] = []

    def end(self) -> None:
        self.ends += 1

    def keep(self, cause: str) -> None:
        self.kept.append(cause)


class Slice(RegionSlice):
    """Of a region that is not there."""

    __slots__ = ("closed", "uses")

    def __init__(self, nbytes: int, *, closed: bool = False) -> None:
        self.offset, self.nbytes = 0, nbytes
        self.closed = closed
        self.uses: list[Use] = []

    def use(self, stop: Callable[[], None]) -> Use:  # type: ignore[override]
        if self.closed:
            raise ClosedError("the region")
        self.uses.append(Use(self.nbytes, stop))
        return self.uses[-1]


async def writer_of(memory: SimPinnedMemory, nbytes: int) -> PinnedWriter:
    return PinnedWriter(memory, await memory.allocate(nbytes))


def test_a_buffer_is_exported_until_it_is_given_back() -> None:
    buffer = bytearray(pattern(100))
    borrowed = Borrowed(buffer, writable=False)
    assert borrowed.nbytes == 100
    assert borrowed.span.view == pattern(100)
    with pytest.raises(BufferError):
        buffer.append(0)
    borrowed.give_back()
    borrowed.give_back()
    buffer.append(0)
    with pytest.raises(InternalError):
        _ = borrowed.span


def test_a_list_stands_for_its_bytes_in_order() -> None:
    async def main() -> None:
        memory = SimPinnedMemory()
        writer = await writer_of(memory, 30)
        region = Slice(20)
        buffer = bytearray(50)
        borrowed = Borrowed([buffer, writer, region], writable=True)
        assert borrowed.nbytes == 100
        pieces = borrowed.target.pieces
        assert [piece.view.nbytes for piece in pieces] == [50, 30, 20]
        assert [piece.pinned is None for piece in pieces] == [True, False, False]
        copy_now(Span(memoryview(pattern(100))), borrowed.target)
        assert bytes(buffer) == pattern(100)[:50]
        assert bytes(writer.view) == pattern(100)[50:80]
        borrowed.give_back()
        assert region.uses[0].ends == 1
        buffer.append(0)
        writer.free()
        assert memory.allocated_count == 0

    run_virtual(main())


@pytest.mark.parametrize("what", [[], (), [b"text", 7], "text", 7, [bytearray(4), b"readonly"]])
def test_what_cannot_be_borrowed_leaves_nothing_held(what: object) -> None:
    region, buffer = Slice(10), bytearray(10)
    items = [region, buffer, *what] if isinstance(what, list) and what else what
    with pytest.raises(UsageError):
        Borrowed(items, writable=True)
    buffer.append(0)
    assert [use.ends for use in region.uses] in ([], [1])


def test_a_region_that_goes_refuses_and_the_others_are_let_go() -> None:
    first, second = Slice(10), Slice(10, closed=True)
    with pytest.raises(ClosedError):
        Borrowed([first, second], writable=False)
    assert [use.ends for use in first.uses] == [1]


def test_a_writer_that_is_freed_while_it_is_borrowed_keeps_its_space() -> None:
    async def main() -> None:
        memory = SimPinnedMemory()
        writer = await writer_of(memory, 100)
        borrowed = Borrowed([writer, writer], writable=False)
        with pytest.raises(BusyError):
            writer.take()
        writer.free()
        assert memory.allocated_count == 1
        with pytest.raises(ClosedError):
            Borrowed(writer, writable=False)
        borrowed.give_back()
        assert memory.allocated_count == 0

    run_virtual(main())


def test_memory_that_is_wanted_back_is_told_to_who_watches_now_or_later() -> None:
    region = Slice(10)
    borrowed = Borrowed(region, writable=False)
    told: list[OrbitError] = []
    region.uses[0].stop()
    borrowed.watch(told.append)
    assert [type(error) for error in told] == [ClosedError]
    other = Slice(10)
    later = Borrowed(other, writable=False)
    later.watch(told.append)
    other.uses[0].stop()
    assert len(told) == 2
    later.watch(None)
    other.uses[0].stop()
    assert len(told) == 2
    assert region.uses[0].ends == other.uses[0].ends == 0


def test_what_is_not_proven_is_kept_by_its_region() -> None:
    region = Slice(10)
    Borrowed([bytearray(3), region], writable=True).keep("stuck")
    assert region.uses[0].kept == ["stuck"]
    assert region.uses[0].ends == 0


def test_a_sink_of_several_buffers_is_filled_from_the_front() -> None:
    async def main() -> None:
        buffers = [bytearray(10), bytearray(0), bytearray(20), bytearray(5)]
        sink = CallerSink(buffers)
        assert sink.capacity_bytes == 35
        target = await sink.open(15)
        assert [piece.view.nbytes for piece in target.pieces] == [10, 5]
        assert (await sink.open(0)).nbytes == 0
        assert (await sink.open(35)).nbytes == 35
        del target
        sink.deliver(pattern(32))
        sink.release()
        assert b"".join(buffers) == pattern(32) + b"\0\0\0"
        gc.collect()
        for buffer in buffers:
            buffer.append(0)

    run_virtual(main())


@pytest.mark.parametrize("cuts", [(0, 100), (1, 99), (50, 50), (33, 33, 34), (0, 7, 0, 93)])
def test_pieces_are_copied_across_different_borders(cuts: tuple[int, ...]) -> None:
    async def main() -> None:
        data = memoryview(pattern(100))
        source = Span(data[:40], rest=(Span(data[40:40]), Span(data[40:])))
        parts = [memoryview(bytearray(size)) for size in cuts]
        target = Target(parts[0], rest=tuple(Target(part) for part in parts[1:]))
        await copy_pieces(source, target)
        assert b"".join(parts) == data

    run_virtual(main())


# --- the scope ------------------------------------------------------------------------------------


def test_a_stopped_body_raises_the_error() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        scope = StopScope()
        loop.call_later(1, scope.stop, ClosedError("the region"))
        with pytest.raises(ClosedError):
            async with scope:
                await asyncio.sleep(9)
        assert loop.time() == 1
        await asyncio.sleep(1)  # no cancellation is left over

    run_virtual(main())


def test_a_stop_before_the_body_keeps_it_from_beginning() -> None:
    async def main() -> None:
        scope = StopScope()
        scope.stop(ClosedError("the region"))
        with pytest.raises(ClosedError):
            async with scope:
                raise AssertionError("it began")
        await asyncio.sleep(1)

    run_virtual(main())


def test_a_cancellation_by_somebody_else_stays_one() -> None:
    async def main() -> None:
        scope = StopScope()

        async def body() -> None:
            async with scope:
                await asyncio.sleep(9)

        task = asyncio.ensure_future(body())
        await asyncio.sleep(1)
        task.cancel()
        scope.stop(ClosedError("the region"))
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


def test_a_stop_after_the_body_does_nothing() -> None:
    async def main() -> None:
        scope = StopScope()
        async with scope:
            await asyncio.sleep(1)
        scope.stop(ClosedError("the region"))
        await asyncio.sleep(1)

    run_virtual(main())
