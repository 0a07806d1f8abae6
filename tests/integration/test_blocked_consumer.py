"""A consumer whose event loop is held up for more than two lease periods while its pull runs.

The owner ends the lease, and the bulk connection with it. What had been sent by then was read under
the lease: so either that was all of it and the get succeeds, or the get fails with a typed error.
Wrong bytes are no outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import orbit
import orbit.sync
from orbit.testing.pattern import pattern

CONFIG = orbit.NodeConfig(
    transport="tcp", rendezvous=orbit.RendezvousConfig(lease_timeout=0.3, inline_max_bytes=0)
)
RETAIN = orbit.RegisterOptions(retain=True)


@pytest.mark.parametrize("nbytes", [1 << 20, 96 << 20], ids=["in flight", "far from done"])
def test_no_wrong_bytes_come_of_it(run_async: Callable[[Any], Any], nbytes: int) -> None:
    payload = pattern(nbytes)

    async def fetch(address: object, handle: orbit.Handle) -> tuple[str, bytearray]:
        dest, blocked = bytearray(nbytes), False

        def block(arrived: int) -> None:
            nonlocal blocked
            if not blocked:
                blocked = True
                asyncio.get_running_loop().call_soon(time.sleep, 0.8)

        async with orbit.Node(CONFIG) as consumer:
            consumer.add_peer(bytes(address))  # type: ignore[call-overload]
            try:
                lease = await consumer.get_into(handle, dest, progress=block)
            except orbit.OrbitError as error:
                return type(error).__name__, dest
            finally:
                assert blocked
            await consumer.detach(handle, lease)  # it may have ended; that is no error
        return "kept", dest

    with orbit.sync.Node(CONFIG) as owner:  # in a thread of its own: it is not held up
        source = bytearray(payload)
        handle = owner.register_data(source, RETAIN)
        outcome, dest = run_async(fetch(owner.address, handle))
        assert owner.statistics().slots.leases_held == 0
        owner.withdraw(handle)
        source[:] = bytes(nbytes)  # nobody reads it any more
    if outcome == "kept":
        assert dest == payload
    else:
        assert outcome in ("PathFailed", "PeerLost", "TransferFailed", "LeaseError")
