"""Puts and get_many between two nodes over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from tests.conftest import LOOP_KINDS

Run = Callable[[Any], Any]
TCP = orbit.NodeConfig(transport="tcp")  # the same on a host with devices
SIZES = (0, 1, 65_535, 65_536, 65_537, 5_000_001)

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)


def test_every_size_is_in_place_when_put_returns(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(bytes(owner.address))
            for nbytes in SIZES:
                payload = pattern(nbytes, seed=nbytes)
                pieces = [bytearray(nbytes // 2 + 10), bytearray(nbytes)]
                handle = await owner.register_destination(pieces)
                source = [payload[: nbytes // 3], payload[nbytes // 3 :]]
                put = await consumer.put(handle, source, offset=3)
                whole = b"".join(pieces)
                assert whole[3 : 3 + nbytes] == payload
                assert not any(whole[:3])
                assert not any(whole[3 + nbytes :])
                assert (put.path, put.reason) == (orbit.PathName.TCP, orbit.PathReason.ASKED)
                seen = await owner.wait_put(handle, timeout=5.0)
                assert (seen.offset, seen.nbytes) == (3, nbytes)
                await owner.withdraw(handle)
                pieces[0].append(0)

    run_async(main())


def test_many_at_a_time(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(bytes(owner.address))
            payloads = [pattern(100_000 + seed, seed) for seed in range(40)]
            handles = [await owner.register_data(payload) for payload in payloads]
            into = [bytearray(len(payload)) for payload in payloads]
            got = await consumer.get_many(handles, into=into, concurrency=8, timeout=30.0)
            assert [bytes(dest) for dest in into] == payloads
            for handle, (view, lease) in zip(handles, got, strict=True):
                assert view is None
                await consumer.release(handle, lease)
            assert owner.statistics().slots.slots == 0

    run_async(main())
