"""Regions on the real pool and the real RDMA path, on fake devices: the registration layer."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from orbit.errors import RegisterOwnedError, UnknownHandle, Unquiesced
from orbit.model import Deregistered, Lease, PathName
from orbit.runtime import retained
from orbit.runtime.options import RegisterOptions
from orbit.testing.pattern import pattern
from orbit.verbs import records
from tests.integration.test_rendezvous_scripted_rdma import Host, two_hosts

Run = Callable[[Any], Any]
MIB = 1 << 20
RELEASES = 10_000 if os.environ.get("ORBIT_SOAK") == "1" else 200
RETAIN = RegisterOptions(retain=True)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[retained.Retained]:
    """What could not be proven, of this test alone."""
    found: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", found)
    return found


async def fetch(consumer: Host, handle: Any, transport: str | None = None) -> tuple[bytes, Lease]:
    api = consumer.node.rendezvous.consumer
    data, lease = await api.get(handle, transport=transport, timeout=None)
    found = bytes(data)
    await api.detach(handle, lease)
    return found, lease


@pytest.mark.parametrize("rxe", [False, True])
def test_memory_of_others_is_read_in_place_and_in_chunks(run_async: Run, rxe: bool) -> None:
    async def main() -> None:
        async with two_hosts(rxe=rxe) as (_, owner, consumer):
            calls = owner.node.rendezvous
            data = pattern(3 * MIB + 5)
            array = np.frombuffer(bytearray(data), "u1")
            guards = [
                await calls.regions.register_owned(array),
                await calls.regions.register_external_memory(array.ctypes.data, array.size, array),
            ]
            before = owner.path.memory.registered_bytes
            assert before >= array.size
            for guard in guards:
                assert guard.registered
                for part in (range(array.size), range(1234, 2 * MIB + 77)):
                    handle = await calls.owner.register_data_in_region(guard, part, None)
                    found, lease = await fetch(consumer, handle, "rdma")
                    assert (found, lease.path) == (data[part.start : part.stop], PathName.RDMA)
                    found, lease = await fetch(consumer, handle, "tcp")
                    assert (found, lease.path) == (data[part.start : part.stop], PathName.TCP)
                    await calls.owner.withdraw(handle)
            pieces = [guards[0].slice(7, MIB), guards[1].slice(2 * MIB, 300_000)]
            handle = await calls.owner.register_data(pieces)
            found, lease = await fetch(consumer, handle, "rdma")
            assert found == data[7 : MIB + 7] + data[2 * MIB : 2 * MIB + 300_000]
            assert owner.path.memory.registered_bytes == before
            await calls.owner.withdraw(handle)
            for guard in guards:
                assert await guard.unregister() is Deregistered.DRAINED
            assert owner.path.memory.registered_bytes == 0

    run_async(main())


def test_a_deregistered_buffer_is_held_by_nothing(run_async: Run) -> None:
    """Not even until the next garbage collection."""

    async def main() -> None:
        async with two_hosts() as (_, owner, consumer):
            calls = owner.node.rendezvous
            data, buffer = pattern(900_000), bytearray(MIB)
            guard = await calls.regions.register_owned(buffer)
            handle = await calls.owner.register_destination(guard.slice(), None)
            put = await consumer.node.rendezvous.consumer.put(
                handle, data, offset=100, transport="rdma", timeout=None, progress=None
            )
            assert (buffer[100:900_100], put.path) == (data, PathName.RDMA)
            await calls.owner.withdraw(handle)
            assert await guard.unregister() is Deregistered.DRAINED
            buffer.clear()  # a BufferError while anything still exports it

    gc.disable()
    try:
        run_async(main())
    finally:
        gc.enable()


def test_a_large_buffer_registered_in_place(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (_, owner, consumer):
            calls = owner.node.rendezvous.owner
            buffer = bytearray(pattern(2 * MIB))
            handle = await calls.register_data_in_place(buffer, None)
            found, lease = await fetch(consumer, handle, "rdma")
            assert (found, lease.path) == (bytes(buffer), PathName.RDMA)
            await calls.withdraw(handle)
            buffer.extend(b"x")
            assert owner.path.memory.registered_bytes == 0

    run_async(main())


def test_an_unregister_out_of_time_ends_a_read_that_hangs(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (_, owner, consumer):
            calls = owner.node.rendezvous
            data = pattern(2 * MIB)
            buffer = bytearray(data)
            guard = await calls.regions.register_owned(buffer)
            handle = await calls.owner.register_data_in_region(guard, None, RETAIN)
            await fetch(consumer, handle, "rdma")  # connected
            consumer.device.hold(records.READ)
            hanging = asyncio.ensure_future(fetch(consumer, handle, "rdma"))
            await asyncio.sleep(0.05)
            patient = guard.unregister()
            await asyncio.sleep(0.05)
            assert not patient.done()
            assert owner.path.memory.registered_bytes >= len(buffer)
            assert await guard.unregister(timeout=0.05) is Deregistered.DRAIN_TIMED_OUT
            assert await patient is Deregistered.DRAIN_TIMED_OUT
            assert owner.path.memory.registered_bytes == 0
            buffer[:] = bytes(len(buffer))
            buffer.extend(b"x")
            with pytest.raises(UnknownHandle):
                await fetch(consumer, handle)
            consumer.device.clear_rules()
            consumer.device.release()
            (outcome,) = await asyncio.gather(hanging, return_exceptions=True)
            # Or all bytes had arrived before; but never any from after the end.
            assert isinstance(outcome, Exception) or outcome[0] == data

    run_async(main())


def test_a_device_that_refuses_to_let_go_keeps_the_charge(
    run_async: Run, kept: list[retained.Retained]
) -> None:
    async def main() -> None:
        async with two_hosts() as (_, owner, _consumer):
            regions = owner.node.rendezvous.regions
            buffer = bytearray(MIB)
            guard = await regions.register_owned(buffer)
            charged = owner.path.memory.registered_bytes
            owner.device.fail_verb("dereg_mr", errno.EBUSY)
            with pytest.raises(Unquiesced):
                await guard.unregister()
            assert owner.path.memory.registered_bytes == charged
            with pytest.raises(BufferError):
                buffer.extend(b"x")
            assert len(kept) == 1
            assert await guard.unregister() is Deregistered.DRAINED
            assert owner.path.memory.registered_bytes == 0
            buffer.extend(b"x")
            assert not kept

    run_async(main())


def test_a_refused_registration_gives_everything_back(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (_, owner, _consumer):
            calls = owner.node.rendezvous
            buffer = bytearray(MIB)
            for register in (
                calls.regions.register_owned,
                lambda memory: calls.owner.register_data_in_place(memory, None),
            ):
                owner.device.fail_verb("reg_mr", errno.ENOMEM)
                with pytest.raises(RegisterOwnedError) as refused:
                    await register(buffer)
                assert refused.value.buffer is buffer
                buffer.extend(b"x")
                assert owner.path.memory.registered_bytes == 0

    run_async(main())


def test_the_same_buffer_twice_and_overlaps(run_async: Run) -> None:
    """C19: the last holder's registration lives until its own end."""

    async def main() -> None:
        async with two_hosts() as (_, owner, consumer):
            calls = owner.node.rendezvous
            data = pattern(MIB)
            array = np.frombuffer(bytearray(data), "u1")
            buffers = [array, array, array[: MIB // 2], array[MIB // 2 :], array[:100]]
            guards = [await calls.regions.register_owned(buffer) for buffer in buffers]
            handle = await calls.owner.register_data_in_region(guards[1], None, None)
            for guard in (guards[0], *guards[2:]):
                assert await guard.unregister() is Deregistered.DRAINED
            found, lease = await fetch(consumer, handle, "rdma")
            assert (found, lease.path) == (data, PathName.RDMA)
            await calls.owner.withdraw(handle)
            await guards[1].unregister()
            assert owner.path.memory.registered_bytes == 0

    run_async(main())


def test_guards_that_are_dropped_or_released_without_a_wait(run_async: Run) -> None:
    """C20: the gauge is where it was. ORBIT_SOAK (`make soak`) makes it the case's own count."""

    async def main() -> None:
        async with two_hosts() as (_, owner, _consumer):
            regions = owner.node.rendezvous.regions
            for number in range(RELEASES):
                guard = await regions.register_owned(bytearray(64 * 1024))
                if number % 10:
                    guard.unregister()
                    del guard
                else:
                    with pytest.warns(ResourceWarning):
                        del guard
            gc.collect()
            async with asyncio.timeout(10):
                while owner.path.memory.registered_bytes or len(regions):
                    await regions.drain()
                    await asyncio.sleep(0.01)

    run_async(main())


def test_closing_a_node_signals_every_region(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts() as (_, owner, consumer):
            calls = owner.node.rendezvous
            buffers = [bytearray(pattern(MIB)) for _ in range(3)]
            guards = [await calls.regions.register_owned(buffer) for buffer in buffers[:2]]
            handle = await calls.owner.register_data_in_region(guards[0], None, None)
            await calls.owner.register_data_in_place(buffers[2], None)
            await fetch(consumer, handle, "rdma")
            latches = [asyncio.ensure_future(guard.deregistered()) for guard in guards]
            await asyncio.sleep(0)
            await calls.close()
            assert set(await asyncio.gather(*latches)) <= set(Deregistered)
            for buffer in buffers:
                buffer.extend(b"x")

    run_async(main())
