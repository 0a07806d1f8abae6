"""Engines over the real RDMA path on fake devices with two rails: bytes, spread, ends, and nothing
left on any device.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from orbit.config import EngineConfig
from orbit.errors import OrbitError
from orbit.memory.range_locks import LOCKS
from orbit.runtime.engine.core import EngineCore
from orbit.runtime.engine.region import EngineRegion
from orbit.runtime.engine.requests import RangeRequest, TransferRequest, TransferState
from orbit.testing.pattern import pattern
from orbit.verbs import records, status
from tests.integration.test_rendezvous_scripted_rdma import QUICK, Host, two_hosts

Run = Callable[[Any], Any]
MIB = 1 << 20
SIZE = 8 * MIB + 160
CONFIG = EngineConfig.for_bytes(2 * SIZE, rails=2)
STAGED = replace(CONFIG, host_memory="staged")


@dataclass(eq=False)
class End:
    host: Host
    engine: EngineCore
    memory: bytearray
    region: EngineRegion


@contextlib.asynccontextmanager
async def two_engines(
    config: EngineConfig = CONFIG,
    source: EngineConfig = CONFIG,
    *,
    rxe: bool = False,
    rails: int = 2,
) -> AsyncIterator[tuple[End, End]]:
    before = LOCKS.held
    async with two_hosts(rdma=QUICK, rxe=rxe, rails=rails) as (_, owner, consumer):
        ends = []
        for number, (host, made) in enumerate(((owner, source), (consumer, config))):
            engine = EngineCore(made, host.node.rendezvous.parts())
            memory = bytearray(pattern(SIZE, number))
            (region,) = await engine.register([memory], "readwrite")
            ends.append(End(host, engine, memory, region))
        yield ends[0], ends[1]
        for end in reversed(ends):
            await end.engine.close(None)
            found = end.engine.statistics()
            left = {name: used for name, (used, _) in found.budgets.items() if used}
            assert set(left) <= {"max_endpoints"}, found
            assert found.in_flight_bytes == 0
    assert LOCKS.held == before


@pytest.mark.parametrize("rxe", [False, True])
@pytest.mark.parametrize("op", ["read", "write"])
def test_bytes_over_both_rails(run_async: Run, op: str, rxe: bool) -> None:
    async def main() -> None:
        async with two_engines(rxe=rxe) as (there, here):
            for low, high in ((0, SIZE), (7, 65_543), (100, 101), (3, MIB + 77)):
                old = bytes(here.memory), bytes(there.memory)
                request = TransferRequest(
                    op, here.region[low:high], there.region.remote()[low:high], "rdma"
                )
                (result,) = await here.engine.submit([request], 30.0)
                assert (result.state, result.nbytes) == (TransferState.SUCCEEDED, high - low)
                if high - low > 128 << 10:
                    assert len(result.rails) == 2
                target, source = (here, old[1]) if op == "read" else (there, old[0])
                before = old[0] if op == "read" else old[1]
                assert target.memory[low:high] == source[low:high]
                assert target.memory[:low] == before[:low]
                assert target.memory[high:] == before[high:]

    run_async(main())


@pytest.mark.parametrize("op", ["read", "write"])
def test_ranges_over_both_rails(run_async: Run, op: str) -> None:
    async def main() -> None:
        async with two_engines() as (there, here):
            count, size = 100, 5_000
            local = np.arange(count) * 6_000
            remote = local[::-1] + 11
            ranges = RangeRequest(
                op, here.region, there.region.remote(), local, remote, np.full(count, size), "rdma"
            )
            old, new = bytearray(here.memory), bytearray(there.memory)
            (result,) = await here.engine.submit([ranges], 30.0)
            assert result.nbytes == count * size
            for mine, other in zip(local.tolist(), remote.tolist(), strict=True):
                if op == "read":
                    old[mine : mine + size] = new[other : other + size]
                else:
                    new[other : other + size] = old[mine : mine + size]
            assert here.memory == old
            assert there.memory == new

    run_async(main())


@pytest.mark.parametrize("sides", ["requester", "source", "both"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_staged(run_async: Run, op: str, sides: str) -> None:
    async def main() -> None:
        config = CONFIG if sides == "source" else STAGED
        source = CONFIG if sides == "requester" else STAGED
        async with two_engines(config, source) as (there, here):
            for nbytes in (1, MIB, SIZE):
                request = TransferRequest(
                    op, here.region[:nbytes], there.region.remote()[:nbytes], "rdma"
                )
                (result,) = await here.engine.submit([request], 30.0)
                assert result.nbytes == nbytes
                assert "close arrays" in result.phases
            assert here.memory == there.memory

    run_async(main())


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_failing_rail_fails_the_request_and_the_next_one_works(run_async: Run, op: str) -> None:
    async def main() -> None:
        async with two_engines() as (there, here):
            request = TransferRequest(op, here.region, there.region.remote(), "rdma")
            kind = records.READ if op == "read" else records.WRITE
            here.host.devices[1].fail(kind, status.REM_ACCESS_ERR)
            batch = here.engine.submit([request], 30.0)
            with pytest.raises(OrbitError):
                await batch
            (result,) = batch.results()
            assert (result.state, result.nbytes) == (TransferState.FAILED, 0)
            assert result.locally_drained
            here.host.devices[1].clear_rules()
            (again,) = await here.engine.submit([request], 30.0)
            assert again.nbytes == SIZE
            assert here.memory == there.memory

    run_async(main())
