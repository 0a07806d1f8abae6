"""Registered memory given back by a graceful shutdown, on the scripted device: who is waited for,
what is cut short, what is kept, and what peers see of it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.config import NodeConfig, RdmaConfig
from orbit.errors import ClosedError, OrbitError
from orbit.model import Deregistered, PathName, PathReason
from orbit.runtime.ending import Outcome
from orbit.runtime.options import RegisterOptions
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.verbs import records
from tests.integration.test_rendezvous_scripted_rdma import MIB, QUICK, Host, two_hosts

Run = Callable[[Any], Any]
WANTED: dict[str, Any] = {"transport": None, "timeout": None}
RETAIN = RegisterOptions(retain=True)
PATIENT = replace(QUICK, progress_timeout_s=20.0)  # with a READ that the test holds back


def outcomes(host: Host) -> dict[str, Outcome]:
    return {report.name: report.outcome for report in host.node.rendezvous.sweep.reports}


def all_well(host: Host) -> bool:
    return set(outcomes(host).values()) <= {Outcome.DONE, Outcome.ENOUGH}


def test_a_pinned_payload_goes_on_as_a_copy(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            payload = pattern(MIB)
            handle = await mine.owner.register_data_pinned(payload, RETAIN)
            data, lease = await theirs.consumer.get(handle, **WANTED)
            assert (data == payload, lease.path) == (True, PathName.RDMA)
            await asyncio.gather(*(mine.sweep.sweep() for _ in range(3)))
            assert all_well(owner)
            assert owner.path.memory.registered_bytes == 0
            # The idle lease was not waited for, and can still be given back.
            assert mine.statistics().slots.leases_held == 1
            await theirs.consumer.detach(handle, lease)
            data, lease = await theirs.consumer.get(handle, **WANTED)
            assert data == payload
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason.NOT_PINNED)
            await theirs.consumer.release(handle, lease)

    run_async(main())


def test_a_read_that_is_under_way_is_waited_for(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            payload = pattern(4 * MIB)
            handle = await mine.owner.register_data_pinned(payload)
            consumer.device.hold(records.READ)
            getting = asyncio.create_task(theirs.consumer.get(handle, **WANTED))
            await until(lambda: consumer.path.statistics().counts["reads"] > 0)
            sweeping = asyncio.create_task(mine.sweep.sweep())
            await asyncio.sleep(0.05)
            assert not sweeping.done()
            consumer.device.clear_rules()
            consumer.device.release()
            data, lease = await getting
            assert (data == payload, lease.path) == (True, PathName.RDMA)
            await sweeping
            assert all_well(owner)
            await theirs.consumer.release(handle, lease)

    run_async(main())


def test_a_read_that_never_ends_is_cut_short_at_the_deadline(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            payload = pattern(4 * MIB)
            handle = await mine.owner.register_data_pinned(payload)
            consumer.device.hold(records.READ)
            getting = asyncio.create_task(theirs.consumer.get(handle, **WANTED))
            await until(lambda: consumer.path.statistics().counts["reads"] > 0)
            mine.sweep.bring_forward(asyncio.get_running_loop().time() + 0.05)
            await mine.sweep.sweep()
            assert outcomes(owner)["transfers"] is Outcome.LATE
            assert outcomes(owner)["arenas"] is Outcome.DONE
            assert owner.path.memory.registered_bytes == 0
            consumer.device.clear_rules()
            consumer.device.release()
            data, lease = await getting  # its one fallback
            assert (data == payload, lease.path) == (True, PathName.TCP)
            await theirs.consumer.release(handle, lease)

    run_async(main())


def test_a_region_is_the_callers_again_while_its_payload_goes_on(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            payload = bytearray(pattern(MIB))
            guard = await mine.regions.register_owned(payload)
            signal = asyncio.create_task(guard.watch().deregistered())
            handle = await mine.owner.register_data_in_region(guard, range(100, MIB), RETAIN)
            data, lease = await theirs.consumer.get(handle, **WANTED)
            assert lease.path is PathName.RDMA
            await mine.sweep.sweep()
            assert all_well(owner)
            assert await asyncio.wait_for(signal, 5) is Deregistered.DRAINED
            expected = bytes(payload[100:])
            payload[:] = bytes(MIB)
            gc.collect()
            payload.append(0)  # no export is held any more
            await theirs.consumer.detach(handle, lease)
            data, lease = await theirs.consumer.get(handle, **WANTED)
            assert (data == expected, lease.path) == (True, PathName.TCP)
            await theirs.consumer.release(handle, lease)

    run_async(main())


def test_nothing_is_registered_behind_the_gate(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            await mine.sweep.sweep()
            with pytest.raises(OrbitError) as refused:
                await mine.regions.register_owned(bytearray(MIB))
            assert isinstance(refused.value.__cause__, ClosedError)
            payload = pattern(MIB)
            handle = await mine.owner.register_data_pinned(payload)
            assert not (await mine.consumer.metadata(handle)).pinned
            data, lease = await theirs.consumer.get(handle, **WANTED)
            assert (data == payload, lease.reason) == (True, PathReason.NOT_PINNED)
            await theirs.consumer.release(handle, lease)
            # As a consumer it offers nothing any more either.
            handle = await theirs.owner.register_data_pinned(payload)
            data, lease = await mine.consumer.get(handle, **WANTED)
            assert (data == payload, lease.reason) == (True, PathReason.DRAINING)
            await mine.consumer.release(handle, lease)
            assert owner.path.memory.registered_bytes == 0

    run_async(main())


def test_what_a_device_does_not_let_go_of_is_kept(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, _consumer):
            mine = owner.node.rendezvous
            guard = await mine.regions.register_owned(bytearray(MIB))
            signal = asyncio.create_task(guard.deregistered())
            await mine.owner.register_data_pinned(pattern(MIB))
            charged = owner.path.memory.registered_bytes
            owner.device.fail_verb("dereg_mr", 16, count=100)
            await mine.sweep.sweep()
            assert outcomes(owner)["arenas"] is Outcome.FAILED
            assert owner.path.memory.registered_bytes == charged
            assert not signal.done()
            owner.device.clear_rules()
            # It answers again: the close goes on where the sweep stopped.
            await mine.close()
            assert owner.path.memory.registered_bytes == 0
            assert await asyncio.wait_for(signal, 5) in Deregistered

    run_async(main())
    assert any(record.levelname == "ERROR" for record in caplog.records)


def test_a_close_hurries_the_sweep(run_async: Run) -> None:
    async def main() -> None:
        async with two_hosts(rdma=PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            handle = await mine.owner.register_data_pinned(pattern(4 * MIB))
            consumer.device.hold(records.READ)
            getting = asyncio.create_task(theirs.consumer.get(handle, **WANTED))
            await until(lambda: consumer.path.statistics().counts["reads"] > 0)
            sweeping = asyncio.create_task(mine.sweep.sweep())
            await asyncio.sleep(0.05)
            assert not sweeping.done()
            await asyncio.gather(mine.close(), mine.close())
            assert sweeping.done()
            assert owner.path.memory.registered_bytes == 0
            consumer.device.clear_rules()
            consumer.device.release()
            with pytest.raises(OrbitError):
                await getting

    run_async(main())


def test_the_sweep_is_bounded_where_the_shutdown_is_not(run_async: Run) -> None:
    async def main() -> None:
        config = NodeConfig(rdma=RdmaConfig(shutdown_timeout=0.1))
        async with two_hosts(config, PATIENT) as (_, owner, consumer):
            mine, theirs = owner.node.rendezvous, consumer.node.rendezvous
            handle = await mine.owner.register_data_pinned(pattern(4 * MIB))
            consumer.device.hold(records.READ)
            getting = asyncio.create_task(theirs.consumer.get(handle, **WANTED))
            await until(lambda: consumer.path.statistics().counts["reads"] > 0)
            await asyncio.wait_for(mine.sweep.sweep(), 20)
            assert outcomes(owner)["transfers"] is Outcome.LATE
            consumer.device.clear_rules()
            consumer.device.release()
            _, lease = await getting
            await theirs.consumer.release(handle, lease)

    run_async(main())
