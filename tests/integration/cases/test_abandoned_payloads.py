"""C16 between real nodes: payloads that nobody picks up, consumers that die or fall silent, a
release that is lost or comes twice, and slow readers who keep their leases. The owner alone
enforces it.

Its sixth try, a consumer whose event loop is held up, is test_blocked_consumer.py; the same over
RDMA, in simulated time, is tests/sim/test_abandoned_handles.py. ORBIT_SOAK (`make soak`) makes the
counts the case's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import orbit
from orbit.model import LeaseEnd
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.integration.cases.frame_relay import frame_relay
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import SOAK, TCP
from tests.integration.relay import relay

Run = Callable[[Coroutine[Any, Any, None]], None]
MIB = 1 << 20
LEASE_S = 0.5
SLOW_LEASE_S = 2.0
WORKER = "tests.integration.cases.worker"
SLOW_FETCHES = 128 if SOAK else 32
FORGOTTEN = orbit.NodeConfig(
    transport="tcp",
    rendezvous=orbit.RendezvousConfig(lease_timeout=LEASE_S),
    timeouts=orbit.TimeoutConfig(call_s=0.5),
)


def slots(node: orbit.Node) -> Any:
    return node.statistics().slots


def sessions(node: orbit.Node) -> int:
    return node.statistics().sessions


async def emptied(node: orbit.Node) -> None:
    """Until it stages nothing, is read by nobody, and has nothing to wait for."""
    await until(lambda: not slots(node).staged_bytes)
    found = slots(node)
    assert (found.slots, found.leased_bytes, found.leases_held) == (0, 0, 0)
    assert (found.leases_armed, found.ttl_armed) == (0, 0)


def test_two_hundred_payloads_that_nobody_fetches(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner:
            options = orbit.RegisterOptions(retain=True, ttl=1.0)
            sources = [bytearray(MIB) for _ in range(200)]
            for source in sources[:100]:
                await owner.register_data(source, options)
            for source in sources[100:]:
                await owner.register_data_pinned(source, options)
            assert slots(owner).staged_bytes == 200 * MIB
            await emptied(owner)
            assert slots(owner).slots_expired == 200
            for source in sources:
                source.append(0)  # nobody holds its export

    run_async(main())


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_consumer_that_ends_in_the_middle(run_async: Run, how: str) -> None:
    async def main() -> None:
        nbytes = 16 * MIB
        async with (
            nothing_left(),
            orbit.Node(FORGOTTEN) as owner,
            relay(owner.address, delay_max_s=0.05) as between,
            worker(WORKER, timeouts={"no_progress_s": 1.0}) as consumer,
        ):
            await consumer.ask("add_peer", address=str(between.address(owner.address)))
            source = bytearray(pattern(nbytes))
            handle = await owner.register_data(source)
            await consumer.ask("begin_fetch", handle=str(handle), nbytes=nbytes)
            consumer.stop()
            assert slots(owner).leased_bytes == nbytes
            if how == "killed":
                await consumer.kill()
            await emptied(owner)
            source[:MIB] = bytes(MIB)
            source.append(0)
            ended = slots(owner).leases_ended
            expected = LeaseEnd.PEER_LOST if how == "killed" else LeaseEnd.REAPED
            assert ended[expected] == 1
            if how == "stopped":
                consumer.go_on()
                found = (await consumer.ask("fetched"))["outcome"]
                assert found not in ("right", "wrong")

    run_async(main())


@pytest.mark.parametrize("nbytes", [1000, MIB], ids=["inline", "pulled"])
@pytest.mark.parametrize("copies", [0, 2], ids=["lost", "doubled"])
def test_a_release_that_is_lost_or_comes_twice(run_async: Run, copies: int, nbytes: int) -> None:
    async def main() -> None:
        async with (
            nothing_left(),
            orbit.Node(FORGOTTEN) as owner,
            orbit.Node(FORGOTTEN) as consumer,
            frame_relay(owner.address, b"_rv_release", copies) as between,
        ):
            consumer.add_peer(between.address(owner.address))
            kept = await owner.register_data(pattern(nbytes), orbit.RegisterOptions(retain=True))
            sources = [bytearray(pattern(nbytes, n)) for n in range(5)]
            for number, source in enumerate(sources):
                handle = await owner.register_data(source)
                data, lease = await consumer.get(handle)
                assert data == pattern(nbytes, number)
                if copies:
                    await consumer.release(handle, lease)
                    # The second is no call at all: it repeats an id, which ends the connection.
                    await until(lambda: not (sessions(owner) or sessions(consumer)))
                else:
                    with pytest.raises(orbit.DeadlineExceeded):
                        await consumer.release(handle, lease)
            await until(lambda: slots(owner).slots == 1)
            await until(lambda: not slots(owner).leases_held)
            assert between.seen == 5
            for source in sources:
                source.append(0)
            data, lease = await consumer.get(kept)
            assert data == pattern(nbytes)
            await consumer.detach(kept, lease)
            await owner.withdraw(kept)
            await emptied(owner)
            found = slots(owner)
            assert found.late_ends == 0
            assert found.leases_ended[LeaseEnd.REAPED] == (0 if copies else 5)
            assert found.leases_ended[LeaseEnd.RELEASED] == (5 if copies else 0)

    run_async(main())


def test_slow_fetches_through_a_slow_network_keep_their_leases(run_async: Run) -> None:
    """They share two connections, so most of them wait for several lease periods."""
    config = orbit.NodeConfig(
        transport="tcp",
        rendezvous=orbit.RendezvousConfig(lease_timeout=SLOW_LEASE_S),
        timeouts=orbit.TimeoutConfig(no_progress_s=60.0),
    )

    async def main() -> None:
        payload = pattern(192 << 10)
        async with (
            nothing_left(),
            orbit.Node(config) as owner,
            orbit.Node(config) as consumer,
            relay(owner.address, delay_max_s=0.2) as between,
        ):
            consumer.add_peer(between.address(owner.address))
            handle = await owner.register_data(payload, orbit.RegisterOptions(retain=True))
            loop = asyncio.get_running_loop()
            longest_s = 0.0

            async def fetch() -> None:
                nonlocal longest_s
                started = loop.time()
                data, lease = await consumer.get(handle)
                longest_s = max(longest_s, loop.time() - started)
                assert data == payload
                await consumer.detach(handle, lease)

            await asyncio.gather(*(fetch() for _ in range(SLOW_FETCHES)))
            found = slots(owner)
            assert (found.leases_reaped, found.late_ends, found.leases_held) == (0, 0, 0)
            assert found.leases_ended[LeaseEnd.DETACHED] == SLOW_FETCHES
            assert longest_s > 3 * SLOW_LEASE_S
            await owner.withdraw(handle)
            await emptied(owner)

    run_async(main())
