"""RdmaPath on two SoftRoCE devices across a link: the contract, and what the device itself refuses.

rdma_rxe does not enforce a window's range, so that part of the authority is tested on the scripted
device; everything else a key must not do is refused here by the device.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.config import RdmaPoolConfig
from orbit.errors import PathUnavailable
from orbit.model import Direction, LeaseId, PathReason
from orbit.protocol.binding import GrantRecord
from orbit.protocol.descriptor import decode_descriptor
from orbit.testing.contracts import PATH_CASES, check_data_path
from orbit.testing.waiting import until
from orbit.transport.interface import Exposure
from orbit.verbs import records, status
from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.queue_pair import Posting
from orbit.verbs.records import Completion
from orbit.verbs.registration import RegisteredBlock
from orbit.verbs.requester import RequesterMember
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import Get, PathPair, array_of, counts, forge, join, open_path
from tests.soak import SOAK
from tests.softroce.rails import rail_of

# An emulated processor may stand still for a while; these bounds are for hangs alone.
DEVICE = RdmaPathConfig(
    pool=RdmaPoolConfig(initial_arena_bytes=24 << 20),
    connect_timeout_s=20,
    connect_backoff_s=0.1,
    bind_timeout_s=20,
    receipt_timeout_s=20,
    drain_timeout_s=20,
    progress_timeout_s=30,
)
# What is waited out in vain, and not only a bound: shorter.
WAITED_OUT = {"transferred_without_a_push": replace(DEVICE, receipt_timeout_s=5)}
# Of windows and their keys: after which grants a queue pair is lost.
INDICES, LOSSES = (12, range(100, 2000, 100)) if SOAK else (4, (10, 280))
Scenario = Callable[[PathPair], Awaitable[None]]


@contextlib.asynccontextmanager
async def device_pair(
    *, config: RdmaPathConfig = DEVICE, pinned_targets: bool = True
) -> AsyncIterator[PathPair]:
    """The owner on host A's first device, the consumer on host B's."""
    provider = PyverbsProvider()
    owner = await open_path(provider, config, rail_of("rxa1"))
    consumer = await open_path(provider, config, rail_of("rxb1"))
    assert await owner.memory.ensure() is PathReason.OK
    if pinned_targets:
        assert await consumer.memory.ensure() is PathReason.OK
    ours, theirs = join(owner, consumer)
    try:
        yield PathPair(owner, consumer, ours, theirs, pinned_targets)
    finally:
        await consumer.close()
        await owner.close()


def run(scenario: Scenario, config: RdmaPathConfig = DEVICE) -> None:
    async def main() -> None:
        async with device_pair(config=config, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


async def until_rebuilt(pair: PathPair, connects: int) -> None:
    """The consumer has connected `connects` queue pairs in all."""
    for _ in range(6000):
        if counts(pair.consumer)["connects"] >= connects:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not rebuilt: {counts(pair.consumer)}")


def contract_runs() -> list[Any]:
    """Every case, by turns on either loop and kind of target; `make soak` runs them on both."""
    kinds = (("asyncio", False), ("uvloop", True))
    return [
        pytest.param(case, *kind, id=f"{kind[0]}-{case}")
        for number, case in enumerate(PATH_CASES)
        for turn, kind in enumerate(kinds)
        if SOAK or turn == number % len(kinds)
    ]


@pytest.mark.parametrize(("case", "loop_kind", "pinned"), contract_runs())
def test_contract(case: str, pinned: bool, run_async: Callable[..., Any]) -> None:
    @contextlib.asynccontextmanager
    async def open_pair() -> AsyncIterator[PathPair]:
        config = WAITED_OUT.get(case, DEVICE)
        async with device_pair(config=config, pinned_targets=pinned) as pair:
            yield pair

    run_async(check_data_path(case, open_pair))


def test_the_probe_says_what_this_device_does_not_enforce() -> None:
    async def scenario(pair: PathPair) -> None:
        assert pair.owner.hints[0].range_enforced is False
        assert pair.owner.hints[0].link_layer == "ethernet"

    run(scenario)


def test_after_the_receipt_the_key_reads_nothing() -> None:
    async def scenario(pair: PathPair) -> None:
        get = Get(pair, 5000)
        exposure = await get.expose()
        await get.pull(exposure)
        await get.retract()
        again = Get(pair, 5000, 2)
        error = await again.fails(exposure, PathReason.GET_FAILED)
        assert "remote access error" in str(error)
        assert again.untouched

    run(scenario)


def test_an_earlier_key_of_a_bound_window_reads_nothing() -> None:
    async def scenario(pair: PathPair) -> None:
        old = decode_descriptor((await first_exposure(pair)).descriptor)
        get = Get(pair, 5000, 2)
        exposure = await get.expose()
        assert decode_descriptor(exposure.descriptor).key >> 8 == old.key >> 8  # the same window
        await get.fails(forge(exposure, key=old.key), PathReason.GET_FAILED)
        assert get.untouched
        await get.retract(transferred=False)

    async def first_exposure(pair: PathPair) -> Exposure:
        get = Get(pair, 5000, 1)
        exposure = await get.expose()
        await get.pull(exposure)
        await get.retract()
        return exposure

    run(scenario, replace(DEVICE, width=1))


def test_a_read_key_does_not_write() -> None:
    async def scenario(pair: PathPair) -> None:
        get = Get(pair, 5000)
        record = GrantRecord.decode((await get.expose()).grant)
        member = member_of(pair, record)
        block = await RegisteredBlock.open(member.domain, 4096, records.ACCESS_LOCAL_WRITE)
        completion = await complete(
            member,
            lambda wr_id: records.pack_write(
                wr_id, block.address, block.lkey, 64, record.address, record.key
            ),
        )
        assert completion.status in (status.REM_ACCESS_ERR, status.REM_INV_REQ_ERR)
        assert bytes(get.span.view) == get.payload
        await get.retract(transferred=False)
        await block.close()

    run(scenario)


def member_of(pair: PathPair, record: GrantRecord) -> RequesterMember:
    member = array_of(pair, Direction.READ).member(record.index)
    assert member is not None
    return member


async def complete(member: RequesterMember, pack: Callable[[int], bytes]) -> Completion:
    done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    member.queue_pair.post_send([Posting("test", pack, done.set_result)])
    return await asyncio.wait_for(done, 30)


def test_a_key_of_another_queue_pair_is_refused() -> None:
    async def scenario(pair: PathPair) -> None:
        gets = [Get(pair, 5000, 1), Get(pair, 5000, 2)]
        grants = [GrantRecord.decode((await get.expose()).grant) for get in gets]
        assert grants[0].index != grants[1].index
        lie = forge(
            Exposure(grant=grants[1].encode()), key=grants[0].key, address=grants[0].address
        )
        await gets[1].fails(lie, PathReason.GET_FAILED)
        assert gets[1].untouched
        for get in gets:
            await get.retract(transferred=False)

    run(scenario)


def test_no_key_is_used_twice_and_when_all_were_used_it_says_so() -> None:
    """By one queue pair, so that more are needed than an index has tags."""

    async def scenario(pair: PathPair) -> None:
        keys, lost, reason = [], 0, ""
        while not reason and len(keys) < 256 * INDICES:
            get = Get(pair, 64, len(keys) + 1)
            try:
                exposure = await get.expose()
            except PathUnavailable as error:
                reason = error.reason
                break
            keys.append(decode_descriptor(exposure.descriptor).key)
            if len(keys) not in LOSSES:
                await get.pull(exposure)
                await get.retract()
                continue
            await get.retract(transferred=False)  # frees the windows of the queue pair
            lost += 1
            async with asyncio.timeout(60):
                while counts(pair.consumer)["connects"] < 1 + lost:
                    await pair.consumer.prepare(pair.consumer_session)
                    await asyncio.sleep(0.01)
        assert reason == PathReason.WINDOW_KEYS
        assert len(set(keys)) == len(keys) > 255
        assert counts(pair.owner)["receipts"] == len(keys) - lost
        assert counts(pair.owner)["aborts"] == lost > 1

    # Without room for every registration a second time there is no fresh domain.
    pool = replace(DEVICE.pool, registered_bytes_budget=DEVICE.pool.initial_arena_bytes)
    run(scenario, replace(DEVICE, width=1, window_key_indices_max=INDICES, pool=pool))


def test_fresh_domains_as_keys_run_out() -> None:
    async def scenario(pair: PathPair) -> None:
        reasons, missed = set[str](), 0
        for lease in range(1, 601):
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            get = Get(pair, 64, lease)
            try:
                exposure = await get.expose()
            except PathUnavailable as error:
                reasons.add(str(error.reason))
                missed += 1
                pair.owner.memory.free(get.memory)
                await asyncio.sleep(0.01)
                continue
            await get.pull(exposure)
            assert get.buffer == get.payload
            await get.retract()
        assert counts(pair.owner)["key_rollovers"] >= 1
        assert missed < 200
        assert reasons <= {PathReason.WINDOW_KEYS}
        assert counts(pair.consumer)["pulls_failed"] == 0
        await until(lambda: len(pair.owner.devices[0].domains) == 1)

    run(scenario, replace(DEVICE, window_key_indices_max=2))


def test_siblings_fail_with_the_queue_pair_and_everybody_else_goes_on() -> None:
    async def scenario(pair: PathPair) -> None:
        third = await open_path(PyverbsProvider(), DEVICE, rail_of("rxb1"))
        ours, theirs = join(pair.owner, third, 2)
        assert await third.prepare(theirs) is PathReason.OK
        gets = [Get(pair, 100_000, lease) for lease in range(1, 5)]
        exposures = [await get.expose() for get in gets]
        members = [GrantRecord.decode(exposure.grant).index for exposure in exposures]
        victim, sibling = (i for i in range(4) if members[i] == 0)
        other = Get(pair, 100_000, 9)
        others = await pair.owner.expose(ours, other.span, LeaseId(9))
        await gets[victim].retract(transferred=False)
        await gets[sibling].fails(exposures[sibling], PathReason.GET_FAILED)
        await gets[sibling].retract(transferred=False)
        for i in (i for i in range(4) if members[i] == 1):
            await gets[i].pull(exposures[i])
            assert gets[i].buffer == gets[i].payload
            await gets[i].retract()
        await third.pull(theirs, others, LeaseId(9), other.target)
        assert other.buffer == other.payload
        await pair.owner.retract(ours, LeaseId(9), transferred=True)
        await third.close()
        await until_rebuilt(pair, 3)
        await Get(pair, 5000, 10).run()

    run(scenario)


def test_a_cancelled_get_spares_the_queue_pair() -> None:
    async def scenario(pair: PathPair) -> None:
        for lease in range(1, 6):
            get = Get(pair, 4 << 20, lease)
            pulling = asyncio.ensure_future(get.pull(await get.expose()))
            await asyncio.sleep(0.02 * lease)
            pulling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pulling
            snapshot = bytes(get.buffer)
            get.memory.view[:] = b"\xee" * len(get.memory.view)
            await asyncio.sleep(0.02)
            assert get.buffer == snapshot
            await get.retract(transferred=False)
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        await Get(pair, 5000, 9).run()

    run(scenario)
