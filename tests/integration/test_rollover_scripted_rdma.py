"""Whole nodes and engines while the window keys of their devices run out again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.errors import PathUnavailable
from orbit.model import PathName, PathReason
from orbit.runtime.engine.core import EngineCore
from orbit.runtime.engine.requests import TransferRequest
from orbit.runtime.options import RegisterOptions
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from orbit.verbs import rollover
from tests.integration.test_engine_scripted_rdma import CONFIG
from tests.integration.test_rendezvous_scripted_rdma import QUICK, Host, two_hosts

Run = Callable[[Any], Any]
RETAIN = RegisterOptions(retain=True)
# Nothing may fail here because a machine is slow.
FEW = replace(
    QUICK,
    window_key_indices_max=3,
    bind_timeout_s=10,
    receipt_timeout_s=10,
    drain_timeout_s=10,
    progress_timeout_s=10,
    pool=replace(QUICK.pool, initial_arena_bytes=1 << 20),
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollover, "_LOOK_S", 0.01)


def rollovers(host: Host) -> int:
    return host.path.statistics().counts["key_rollovers"]


async def settled(host: Host) -> None:
    """Nothing of an old domain is left."""
    await until(lambda: all(len(device.domains) == 1 for device in host.path.devices))


def test_thousands_of_gets_in_both_directions(run_async: Run) -> None:
    """Nobody sees an error; what is not RDMA says why."""

    async def main() -> None:
        async with two_hosts(rdma=FEW) as (_, one, two):
            payload = pattern(65_536)
            reasons: list[PathReason] = []

            async def gets(owner: Host, consumer: Host, count: int) -> None:
                handle = await owner.node.rendezvous.owner.register_data_pinned(payload, RETAIN)
                api = consumer.node.rendezvous.consumer
                for _ in range(count):
                    data, lease = await api.get(handle, transport=None, timeout=None)
                    assert data == payload
                    await api.release(handle, lease)
                    assert (lease.path is PathName.RDMA) == (lease.reason is PathReason.OK)
                    reasons.append(lease.reason)

            await asyncio.gather(*(gets(one, two, 500) for _ in range(2)), gets(two, one, 800))
            assert set(reasons) <= {PathReason.OK, PathReason.WINDOW_KEYS}
            assert reasons.count(PathReason.OK) > len(reasons) // 2
            assert rollovers(one) >= 1
            await settled(one)
            await settled(two)
            for host in (one, two):
                assert host.path.statistics().counts["pulls_failed"] == 0

    run_async(main())


@pytest.mark.parametrize("op", ["read", "write"])
def test_thousands_of_engine_transfers(run_async: Run, op: str) -> None:
    """Each succeeds, or says that there are no keys for the moment, and then nothing has moved."""
    size = 2 << 10

    async def main() -> None:
        async with two_hosts(rdma=FEW) as (_, source, requester):
            here, there = (
                EngineCore(CONFIG, host.node.rendezvous.parts()) for host in (requester, source)
            )
            memory = bytearray(size), bytearray(pattern(size))
            (local,) = await here.register([memory[0]], "readwrite")
            (remote,) = await there.register([memory[1]], "readwrite")
            there_ranges = remote.remote()
            requests = [
                TransferRequest(op, local[low : low + 1024], there_ranges[low : low + 1024], "rdma")
                for low in (0, 1024)
            ]
            refused = 0
            for _ in range(700):
                batch = here.submit(requests, 30.0)
                await asyncio.wait([asyncio.ensure_future(batch.wait())])
                for result in batch.results():
                    if result.error is None:
                        assert result.nbytes == 1024
                    else:
                        assert isinstance(result.error, PathUnavailable)
                        assert result.error.reason == PathReason.WINDOW_KEYS
                        assert result.nbytes == 0
                        refused += 1
            assert rollovers(source) >= 2
            assert refused < 140
            assert memory[0] == memory[1]
            await settled(source)
            for engine in (here, there):
                await engine.close(None)

    run_async(main())
