"""Trouble that others have met with several NICs, packet sizes, full queues and late data, each as
its recipe, with a transfer engine over SoftRoCE. The counts are CI's; ORBIT_SOAK (`make soak`)
makes them the cases' own.
"""

from __future__ import annotations

import array
import asyncio
import zlib
from dataclasses import replace

import pytest

import orbit
from orbit.testing import waiting
from orbit.verbs.discovery import discover
from tests.scenarios.engine_rig import HANG_S, KIB, MIB, Devices, EngineRig, filled
from tests.soak import SOAK
from tests.softroce import links
from tests.softroce.engine_pairs import (
    RAILS,
    SharedPair,
    both_rails_carry,
    contexts,
    engines,
    rail_facts,
    regions,
    seen_anew,
    transfer,
    usual_devices,
)

ONE_RAIL = Devices(("rxa1",), ("rxb1",))
PAIRS = 200  # of queue pairs
RANGES = 5000 if SOAK else 300
ROUNDS = 2000 if SOAK else 20
NOTICES = 64
FAILS_WITHIN_S = 60.0  # a bound for hangs; the device's own retries end in half a second
DELAYED = ("netem", "delay", "50ms", "limit", "100000")


# --- C36: packet sizes and other attributes that the device or path does not have -----------------


@pytest.mark.parametrize(("a", "b"), [(1500, 1500), (1500, 4200), (4200, 1500)])
def test_packets_are_as_long_as_both_ends_can(a: int, b: int) -> None:
    """Every size around one packet, each way. (4200 on both sides is every other test's.)"""

    async def main() -> None:
        with links.mtu({"a1": a, "b1": b}):
            async with engines(devices=ONE_RAIL) as rig:
                for op in ("read", "write"):
                    for nbytes in (1, 1023, 1024, 1025, 4097, MIB):
                        await transfer(rig, op, nbytes, nbytes)

    asyncio.run(main())


def test_packets_that_become_too_long_fail_and_the_next_connection_is_right() -> None:
    """The link shrinks under a live connection, and grows again."""

    async def main() -> None:
        async with engines(devices=ONE_RAIL) as rig:
            await transfer(rig, "read")
            with links.mtu({"a1": 1500, "b1": 1500}):
                await waiting.until(lambda: mtus(rig) == [1024, 1024], HANG_S)
                async with regions(rig, MIB, 1) as memory:
                    request = rig.request("read", memory.local, memory.remote)
                    batch = rig.requester.submit([request])
                    assert await batch.wait(FAILS_WITHIN_S)
                    (result,) = batch.results()
                    assert (result.state, result.nbytes) == ("failed", 0)
                    assert isinstance(result.error, orbit.OrbitError)
                    await rig.idle()
                    await rig.requester.submit([request])
                    assert memory.into == memory.data
            await waiting.until(lambda: mtus(rig) == [4096, 4096], HANG_S)
            await transfer(rig, "read")

    asyncio.run(main())


def mtus(rig: EngineRig) -> list[int]:
    return [contexts(engine)[0].rail.mtu for engine in (rig.source, rig.requester)]


def test_every_queue_pair_can_be_made(engine_pair: SharedPair) -> None:
    async def main(rig: EngineRig) -> None:
        device = contexts(rig.requester)[0]
        before = device.queue_pairs
        for _ in range(PAIRS):
            queue_pair = device.create_queue_pair(lambda _cause: None)
            await queue_pair.drain(orbit.OrbitError("made for nothing"))
            await device.destroy_queue_pair(queue_pair)
        assert device.queue_pairs == before

    engine_pair.run(main)


# --- C45: send queue overflow and resubmitting what was already accepted --------------------------


@pytest.mark.parametrize("op", ["read", "write"])
def test_thousands_of_ranges_pass_a_queue_of_eight(op: str) -> None:
    """Each range has its number in it; messages go between the same nodes meanwhile."""

    async def main() -> None:
        size = 4 * KIB
        small = {"max_send_wr": 8}
        async with engines(small, small) as rig:
            data, into = stamped(RANGES, size), bytearray(2 * RANGES * size)
            heard: list[int] = []
            rig.source.node.handler("count", lambda message: heard.append(message.payload[0]))
            to = rig.requester.node.add_peer(rig.source.address)
            mine, theirs = (into, data) if op == "read" else (data, into)
            async with (
                await rig.source.register(theirs, access="readwrite") as region,
                await rig.requester.register(mine, access="local") as local,
            ):
                dense = array.array("Q", range(0, RANGES * size, size))
                sparse = array.array("Q", range(0, 2 * RANGES * size, 2 * size))
                request = orbit.RangeRequest(
                    op,
                    local,
                    region.remote(),
                    local_offsets=sparse if op == "read" else dense,
                    remote_offsets=dense if op == "read" else sparse,
                    lengths=array.array("Q", [size]) * RANGES,
                )
                batch = rig.requester.submit(request)
                for number in range(32):
                    await rig.requester.node.sync(to, "count", bytes([number]), timeout=HANG_S)
                (result,) = await batch
            assert result.nbytes == RANGES * size
            assert sorted(heard) == list(range(32))
            for number, offset in enumerate(sparse):
                here = memoryview(data)[number * size : (number + 1) * size]
                assert into[offset : offset + size] == here
                assert not any(into[offset + size : offset + 2 * size])
            await rig.idle()

    asyncio.run(main())


def stamped(count: int, size: int) -> bytearray:
    return bytearray(b"".join(number.to_bytes(4, "big") * (size // 4) for number in range(count)))


# --- C48: several NICs: one subnet, wrong pairing, unreachable rails ------------------------------


def retries() -> int:
    return sum(
        links.counter(links.device(end, rail), "completer_retry_err")
        for end in links.ENDS
        for rail in (1, 2)
    )


@pytest.mark.parametrize("side", ["source", "requester"])
def test_rails_are_paired_by_subnet_and_not_by_place(side: str) -> None:
    """b, c: one side finds its devices in the reverse order; cross pairs are unreachable."""

    async def main() -> None:
        found = usual_devices()
        there, here = replace(found, devices=found.devices[::-1]), found
        orders = iter([there, here] if side == "source" else [here, there])
        async with engines(find=lambda: next(orders)) as rig:
            before = retries()
            peer = await rig.requester.open_peer(rig.source.address)
            pairs = {route.rail.device: route.remote_device for route in peer.routes}
            assert pairs == {"rxb1": "rxa1", "rxb2": "rxa2"}
            await both_rails_carry(rig)
            assert retries() == before

    asyncio.run(main())


def test_rails_in_one_subnet_carry_or_fail_by_name() -> None:
    """a: what is paired wrongly there ends in an error of the transfer, and in no wrong byte."""

    async def main() -> None:
        async with engines(find=discover) as rig, regions(rig, MIB, 4) as memory:
            batch = rig.requester.submit([rig.request("read", memory.local, memory.remote)])
            assert await batch.wait(FAILS_WITHIN_S)
            (result,) = batch.results()
            if result.state == "succeeded":
                assert memory.into == memory.data
            else:
                assert isinstance(result.error, orbit.OrbitError)
                assert (result.state, result.nbytes) == ("failed", 0)

    for end in links.ENDS:
        links.remove_address(end, 2)
        links.add_address(end, 2, shift=2, net=1)
    try:
        asyncio.run(main())
    finally:
        for end in links.ENDS:
            links.remove_address(end, 2, shift=2, net=1)
            links.add_address(end, 2)


def test_a_pair_that_is_cut_off_fails_its_parent_and_no_masked_one(engine_pair: SharedPair) -> None:
    """d, e: the ports stay up, so nobody is told. There is no retry over another rail."""

    async def main(rig: EngineRig) -> None:
        await both_rails_carry(rig)
        mask = 1 << rail_facts(rig.requester, "rxb2").nic
        async with engines({}, {"device_mask": mask}) as masked:
            await transfer(masked, "read")
            async with regions(rig, MIB, 5) as memory:
                with links.dropped("a1", "b1"):
                    batch = rig.requester.submit([rig.request("read", memory.local, memory.remote)])
                    before = links.sent_pkts(1)
                    for seed in range(3):
                        result = await transfer(masked, "read", seed=seed)
                        assert result.rails == ("rxb2",)
                    assert await batch.wait(FAILS_WITHIN_S)
                    (result,) = batch.results()
                    assert (result.state, result.nbytes) == ("failed", 0)
                    assert set(result.rails) == {"rxb1", "rxb2"}
                    assert "rxb1" in str(result.error) or "retry" in str(result.error).lower()
                    await rig.idle()
            assert rig.requester.retained() == rig.source.retained() == ()
            alone = links.sent_pkts(1)
            await transfer(masked, "write", seed=9)
            assert links.sent_pkts(1) == alone, before
        await both_rails_carry(rig)

    engine_pair.run(main)


# --- C50: notice arrives, data not yet ------------------------------------------------------------


def test_what_is_told_has_arrived_on_every_rail(engine_pair: SharedPair) -> None:
    """One of two rails is 50 ms late. The source looks at its memory when it is told."""

    async def main(rig: EngineRig) -> None:
        wrong: list[int] = []

        async def on_notice(message: orbit.Message) -> None:
            number, checksum = divmod(int.from_bytes(message.payload, "big"), 1 << 32)
            with memory.region.cpu(0, MIB) as view:
                if zlib.crc32(view) != checksum:
                    wrong.append(number)

        to = rig.requester.node.add_peer(rig.source.address)
        rig.source.node.handler("arrived", on_notice)
        try:
            async with regions(rig, MIB, 6) as memory:
                with links.shaped("a1", "b1", shape=DELAYED):
                    for number in range(ROUNDS):
                        memory.into[:] = filled(MIB, 100 + number)
                        request = rig.request("write", memory.local, memory.remote)
                        (result,) = await rig.requester.submit([request])
                        assert set(result.rails) == set(RAILS.requester)
                        told = number << 32 | zlib.crc32(memory.into)
                        payload = told.to_bytes(12, "big")
                        await rig.requester.node.sync(to, "arrived", payload, timeout=HANG_S)
        finally:
            rig.source.node.remove_handler("arrived")
        assert wrong == []

    engine_pair.run(main)


def test_notices_in_a_burst_have_their_own_bodies(engine_pair: SharedPair) -> None:
    async def main(rig: EngineRig) -> None:
        heard: list[bytes] = []
        to = rig.requester.node.add_peer(rig.source.address)
        rig.source.node.handler("burst", lambda message: heard.append(bytes(message.payload)))
        bodies = [bytes([number]) * (1 + 37 * number) for number in range(NOTICES)]
        try:
            for rails in ((), (1, 2)):  # the second time after all links were gone
                with links.down(*rails):
                    pass
                await seen_anew(rig)
                heard.clear()
                sent = [
                    rig.requester.node.sync(to, "burst", body, timeout=HANG_S, wait=True)
                    for body in bodies
                ]
                await asyncio.gather(*sent)
                assert sorted(heard) == sorted(bodies)
        finally:
            rig.source.node.remove_handler("burst")

    engine_pair.run(main)
