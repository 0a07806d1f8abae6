"""What a user of the transfer engine may rely on, as scenarios over two engines.

Each takes a rig and leaves it idle. `SHARED` ones run one after another on one pair; `OWN` ones
name what their engines need.
"""

from __future__ import annotations

import array
import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import orbit
from tests.scenarios.engine_rig import (
    KIB,
    MIB,
    EngineRig,
    EngineScenario,
    changed_only,
    filled,
    guarded,
    in_use,
)


@dataclass(frozen=True)
class Needs:
    """Engines of its own for one scenario."""

    run: EngineScenario
    source: dict[str, Any] = field(default_factory=dict)
    requester: dict[str, Any] = field(default_factory=dict)
    rdma_only: bool = False
    brief: EngineScenario | None = None  # what says most of it, where processors are slow


# --- on one pair of engines -----------------------------------------------------------------------


async def reads_of_every_size(rig: EngineRig) -> None:
    """Whole slices, folded tails, one byte: the bytes, and nothing beside them."""
    data = filled(9 * MIB + 77, 1)
    into = guarded(len(data) + 64)
    async with await rig.source.register(data, access="read") as region:
        remote = region.remote()
        async with await rig.requester.register(into, access="local") as local:
            for nbytes in (1, 17, 64 * KIB - 1, 64 * KIB, 131_073, 196_609, 4 * MIB + 5, len(data)):
                before = bytes(into)
                request = rig.request("read", local[32 : 32 + nbytes], remote[0:nbytes])
                (result,) = await rig.requester.submit([request])
                assert (result.state, result.nbytes) == ("succeeded", nbytes)
                assert result.path == rig.transport
                assert into[32 : 32 + nbytes] == data[:nbytes]
                assert changed_only(before, into, [(32, nbytes)])
                await rig.idle()


async def writes_of_every_size(rig: EngineRig) -> None:
    data, into = filled(5 * MIB + 3, 2), guarded(6 * MIB)
    async with (
        await rig.source.register(into, access="write") as region,
        await rig.requester.register(data, access="local") as local,
    ):
        for nbytes in (1, 64, 64 * KIB + 1, 2 * MIB + 11, len(data)):
            before = bytes(into)
            request = rig.request("write", local[:nbytes], region.remote()[999 : 999 + nbytes])
            (result,) = await rig.requester.submit([request])
            assert (result.state, result.nbytes) == ("succeeded", nbytes)
            assert into[999 : 999 + nbytes] == data[:nbytes]
            assert changed_only(before, into, [(999, nbytes)])
            await rig.idle()


async def three_and_three_both_ways(rig: EngineRig) -> None:
    """Three READs and three WRITEs of ranges that do not touch, in one batch, and back."""
    for source, requester in ((rig.source, rig.requester), (rig.requester, rig.source)):
        await requester.open_peer(source.address)
        far, near = filled(3 * MIB, 3), filled(3 * MIB, 4)
        far_before, near_before = bytes(far), bytes(near)
        async with (
            await source.register(far, access="readwrite") as region,
            await requester.register(near, access="local") as local,
        ):
            remote = region.remote()
            size = 300 * KIB + 13
            spots = [7 + i * 2 * size for i in range(3)]
            requests = []
            for spot in spots:
                reads = local[spot : spot + size], remote[spot : spot + size]
                writes = spot + size, spot + 2 * size - 5
                requests.append(rig.request("read", *reads))
                requests.append(
                    rig.request(
                        "write", local[writes[0] : writes[1]], remote[writes[0] : writes[1]]
                    )
                )
            results = await requester.submit(requests)
            assert [result.state for result in results] == ["succeeded"] * 6
            for spot in spots:
                assert near[spot : spot + size] == far_before[spot : spot + size]
                begin, end = spot + size, spot + 2 * size - 5
                assert far[begin:end] == near_before[begin:end]
            assert changed_only(near_before, near, [(spot, size) for spot in spots])
            assert changed_only(far_before, far, [(spot + size, size - 5) for spot in spots])
        await rig.idle()


async def many_ranges_as_arrays(rig: EngineRig) -> None:
    """Ranges come as three arrays; what is adjacent on both sides is joined."""
    count, size = 200, 1000
    data, into = filled(count * 2 * size, 5), guarded(count * 2 * size)
    order = list(range(count))
    random.Random(5).shuffle(order)
    remote_offsets = array.array("Q", [2 * size * i for i in order])
    local_offsets = array.array("Q", [2 * size * i + 3 for i in range(count)])
    lengths = array.array("Q", [size - (i % 7) for i in range(count)])
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        ranges = orbit.RangeRequest(
            "read",
            local,
            region.remote(),
            local_offsets=local_offsets,
            remote_offsets=remote_offsets,
            lengths=lengths,
            transport=rig.transport,
        )
        (result,) = await rig.requester.submit(ranges)
        assert (result.state, result.nbytes) == ("succeeded", sum(lengths))
        spots = list(zip(local_offsets, lengths, strict=True))
        for (there, nbytes), here in zip(spots, remote_offsets, strict=True):
            assert into[there : there + nbytes] == data[here : here + nbytes]
        assert changed_only(bytes(guarded(len(into))), into, spots)
    await rig.idle()


async def nothing_is_a_transfer_too(rig: EngineRig) -> None:
    """Zero bytes succeed after the check of the registration, without a grant."""
    async with (
        await rig.source.register(filled(100), access="read") as region,
        await rig.requester.register(bytearray(100), access="local") as local,
    ):
        remote = region.remote()
        (result,) = await rig.requester.submit([rig.request("read", local[5:5], remote[9:9])])
        assert (result.state, result.nbytes) == ("succeeded", 0)
    with pytest.raises(orbit.OrbitError):
        await rig.requester.submit([rig.request("read", local[5:5], remote[9:9])])


async def access_is_what_was_registered(rig: EngineRig) -> None:
    """What a region does not allow is refused before a byte moves."""
    data, mine = filled(10 * KIB, 6), filled(10 * KIB, 7)
    before = bytes(data), bytes(mine)
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(mine, access="local") as local,
    ):
        with pytest.raises(orbit.WrongDirection):
            await rig.requester.submit([rig.request("write", local, region.remote())])
        for begin, end in ((0, 10 * KIB + 1), (10 * KIB, 10 * KIB + 1)):
            with pytest.raises(orbit.OutOfRange):
                region.remote()[begin:end]
        remote = region.remote()
        assert orbit.RemoteRegion.from_bytes(bytes(remote)) == remote
        assert orbit.RemoteRegion.parse(str(remote)) == remote
    assert (bytes(data), bytes(mine)) == before
    with pytest.raises(orbit.OrbitError):
        await rig.requester.submit([rig.request("read", local, remote)])


async def overlap_is_refused_and_disjoint_goes_on(rig: EngineRig) -> None:
    """One range cannot be written by two, nor read while it is written, through any alias."""
    data, mine = filled(256 * KIB, 8), filled(256 * KIB, 9)
    async with (
        await rig.source.register(data, access="readwrite") as region,
        await rig.source.register(memoryview(data)[: 128 * KIB], access="read") as alias,
        await rig.requester.register(mine, access="local") as local,
    ):
        remote = region.remote()
        with alias.cpu(4 * KIB, 4 * KIB, write=True) as view:
            with pytest.raises(orbit.RangeBusy):
                await rig.requester.submit([rig.request("read", local[:100], remote[5000:5100])])
            with pytest.raises(orbit.RangeBusy), region.cpu(8 * KIB - 1, 1):
                pass
            view[:4] = b"good"
            (result,) = await rig.requester.submit(
                [rig.request("read", local[: 4 * KIB], remote[: 4 * KIB])]
            )
            assert result.nbytes == 4 * KIB
        with alias.cpu(4 * KIB, 4 * KIB) as view:  # readers share
            await rig.requester.submit([rig.request("read", local[:100], remote[4096:4196])])
            assert mine[:4] == b"good"
            with pytest.raises(orbit.RangeBusy):
                await rig.requester.submit([rig.request("write", local[:100], remote[4196:4296])])
        with (
            local.cpu(0, 10, write=True),
            pytest.raises(orbit.RangeBusy),
        ):
            await rig.requester.submit([rig.request("read", local[:100], remote[:100])])
        with pytest.raises(orbit.OrbitError):  # one batch, one target twice: one of them is refused
            await rig.requester.submit(
                [
                    rig.request("read", local[0 : 128 * KIB], remote[0 : 128 * KIB]),
                    rig.request("read", local[64 * KIB : 192 * KIB], remote[0 : 128 * KIB]),
                ]
            )
    await rig.idle()


async def a_batch_of_registrations_is_all_or_none(rig: EngineRig) -> None:
    before = rig.source.statistics().budgets["max_cached_mr_bytes"]
    with pytest.raises(orbit.OrbitError):
        await rig.source.register([bytearray(4096), bytes(4096), bytearray(4096)], access="read")
    assert rig.source.statistics().budgets["max_cached_mr_bytes"] == before
    regions = await rig.source.register([bytearray(100), bytearray(200)], access="readwrite")
    assert [region.nbytes for region in regions] == [100, 200]
    for region in regions:
        await region.unregister()
    assert rig.source.statistics().budgets["max_cached_mr_bytes"] == before


async def a_request_names_its_transport(rig: EngineRig) -> None:
    """TCP is a transport like any other; what is not there is refused, never replaced."""
    data, into = filled(MIB, 10), bytearray(MIB)
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        request = orbit.TransferRequest("read", local, region.remote(), transport="tcp")
        (result,) = await rig.requester.submit([request])
        assert (result.path, into) == ("tcp", data)
        if rig.transport == "tcp":
            request = orbit.TransferRequest("read", local, region.remote(), transport="rdma")
            with pytest.raises(orbit.PathUnavailable):
                await rig.requester.submit([request])


async def a_batch_explains_itself(rig: EngineRig) -> None:
    data, into = filled(2 * MIB, 11), bytearray(2 * MIB)
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        batch = rig.requester.submit([rig.request("read", local, region.remote())])
        (result,) = await batch
        assert result.phases["total"] >= result.phases["acquire"] > 0
        text = batch.explain()
        assert "read" in text
        assert "acquire" in text
        assert rig.transport in text
        for device in rig.devices.requester:
            assert device in text
        assert batch.done
        assert batch.nbytes == 2 * MIB
        assert set(result.rails) <= set(rig.devices.requester)
        assert bool(result.rails) == (rig.transport == "rdma")


async def the_timeout_of_a_request_is_its_own(rig: EngineRig) -> None:
    data, into = filled(MIB, 12), bytearray(MIB)
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        soon = rig.request("read", local[:1000], region.remote()[:1000], timeout=1e-9)
        late = rig.request("read", local[2000:], region.remote()[2000:])
        batch = rig.requester.submit([soon, late])
        with pytest.raises(orbit.OrbitError):
            await batch
        first, second = batch.results()
        assert (first.state, first.nbytes) == ("failed", 0)
        assert isinstance(first.error, TimeoutError)
        assert (second.state, second.nbytes) == ("succeeded", MIB - 2000)
        assert batch.nbytes == MIB - 2000
    await rig.idle()


async def a_cancelled_batch_gives_everything_back(rig: EngineRig) -> None:
    data, into = filled(8 * MIB, 13), guarded(8 * MIB)
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        batch = rig.requester.submit([rig.request("read", local, region.remote())])
        await asyncio.sleep(0)
        batch.cancel()
        assert await batch.wait(60.0)
        (result,) = batch.results()
        assert result.state in ("cancelled", "succeeded")
        await rig.idle()
        (result,) = await rig.requester.submit([rig.request("read", local, region.remote())])
        assert into == data


async def unregistering_ends_what_uses_it(rig: EngineRig) -> None:
    data, into = filled(4 * MIB, 14), bytearray(4 * MIB)
    region = await rig.source.register(data, access="read")
    async with await rig.requester.register(into, access="local") as local:
        remote = region.remote()
        batch = rig.requester.submit([rig.request("read", local, remote)])
        await region.unregister(timeout=0.0)
        assert await batch.wait(60.0)
        (result,) = batch.results()
        assert result.nbytes in (0, 4 * MIB)
        with pytest.raises(orbit.OrbitError):
            await rig.requester.submit([rig.request("read", local, remote)])
    await rig.idle()


async def a_hundred_transfers_leave_nothing(rig: EngineRig) -> None:
    """More than all budgets hold at once: they wait in order, and every one ends well."""
    count, size = 100, 96 * KIB
    data, into = filled(count * size, 15), bytearray(count * size)
    async with (
        await rig.source.register(data, access="read") as region,
        await rig.requester.register(into, access="local") as local,
    ):
        remote = region.remote()
        requests = [
            rig.request("read", local[i : i + size], remote[i : i + size])
            for i in range(0, count * size, size)
        ]
        results = await rig.requester.submit(requests)
        assert all(result.nbytes == size for result in results)
        assert into == data
    await rig.idle()
    assert in_use(rig.requester) == {}


SHARED: list[EngineScenario] = [
    reads_of_every_size,
    writes_of_every_size,
    three_and_three_both_ways,
    many_ranges_as_arrays,
    nothing_is_a_transfer_too,
    access_is_what_was_registered,
    overlap_is_refused_and_disjoint_goes_on,
    a_batch_of_registrations_is_all_or_none,
    a_request_names_its_transport,
    a_batch_explains_itself,
    the_timeout_of_a_request_is_its_own,
    a_cancelled_batch_gives_everything_back,
    unregistering_ends_what_uses_it,
    a_hundred_transfers_leave_nothing,
]


# --- with engines of their own --------------------------------------------------------------------


async def more_than_a_budget_is_refused_at_once(rig: EngineRig) -> None:
    async with (
        await rig.source.register(filled(MIB), access="read") as region,
        await rig.requester.register(bytearray(MIB), access="local") as local,
    ):
        with pytest.raises(orbit.BudgetExceeded) as caught:
            await rig.requester.submit([rig.request("read", local, region.remote())])
        assert "max_direct_bytes" in str(caught.value)
        small = rig.request("read", local[: 64 * KIB], region.remote()[: 64 * KIB])
        assert (await rig.requester.submit([small]))[0].nbytes == 64 * KIB


async def registrations_have_a_cliff(rig: EngineRig) -> None:
    """Two views on each rail: half of the budget, and a quarter on two rails."""
    views = 2 * max(1, rig.rails)
    fits = MIB // views if rig.rails else MIB
    async with await rig.source.register(bytearray(fits - 8 * KIB), access="read"):
        pass
    if rig.rails:
        with pytest.raises(orbit.BudgetExceeded) as caught:
            await rig.source.register(bytearray(fits + 8 * KIB), access="read")
        assert "max_cached_mr_bytes" in str(caught.value)
        assert "for_bytes" in f"{caught.value} {caught.value.hint}"


async def staged_moves_the_same_bytes(rig: EngineRig) -> None:
    await reads_of_every_size(rig)
    await writes_of_every_size(rig)
    await three_and_three_both_ways(rig)


async def closing_one_role_leaves_the_other(rig: EngineRig) -> None:
    data, into = filled(MIB, 16), bytearray(MIB)
    near, far = await rig.requester.register([bytearray(MIB), filled(MIB, 17)], access="readwrite")
    async with await rig.source.register(data, access="readwrite") as region:
        await rig.source.open_peer(rig.requester.address)
        await rig.source.close_source(10.0)
        with pytest.raises(orbit.OrbitError):
            await rig.requester.submit([rig.request("read", near, region.remote())])
        async with await rig.source.register(into, access="local") as local:
            (result,) = await rig.source.submit([rig.request("read", local, far.remote())])
            assert result.nbytes == MIB
            assert into == filled(MIB, 17)
            await rig.source.close_requester(10.0)
            with pytest.raises(orbit.ClosedError):
                await rig.source.submit([rig.request("read", local, far.remote())])
    for mine in (near, far):
        await mine.unregister()


_STAGED = {"host_memory": "staged", "max_staging_bytes": 32 * MIB}
OWN: dict[str, Needs] = {
    "more_than_a_budget_is_refused_at_once": Needs(
        more_than_a_budget_is_refused_at_once, requester={"max_direct_bytes": 256 * KIB}
    ),
    "registrations_have_a_cliff": Needs(
        registrations_have_a_cliff, source={"max_cached_mr_bytes": MIB}, rdma_only=True
    ),
    "staged_requester": Needs(three_and_three_both_ways, requester=_STAGED, rdma_only=True),
    "staged_source": Needs(three_and_three_both_ways, source=_STAGED, rdma_only=True),
    "staged_both": Needs(
        staged_moves_the_same_bytes,
        source=_STAGED,
        requester=_STAGED,
        rdma_only=True,
        brief=three_and_three_both_ways,
    ),
    "polling_progress": Needs(
        three_and_three_both_ways,
        source={"progress": "polling"},
        requester={"progress": "polling"},
        rdma_only=True,
    ),
    "closing_one_role_leaves_the_other": Needs(closing_one_role_leaves_the_other),
}
