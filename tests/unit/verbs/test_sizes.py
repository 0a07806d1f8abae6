"""C29 and C38: lengths and offsets at the 32 and 64 bit edges, the longest message of a device, and
what a consumer does with records that are nonsense.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from orbit.errors import OutOfRange, PathFailed
from orbit.model import Address, Direction, PathReason, RemoteKey
from orbit.protocol.binding import GrantRecord
from orbit.protocol.descriptor import (
    Descriptor,
    DescriptorError,
    decode_descriptor,
    encode_descriptor,
)
from orbit.protocol.grants import RoundPlanner
from orbit.transport.interface import Exposure
from orbit.transport.pieces import check_range
from orbit.verbs import records
from orbit.verbs.registration import Segment
from orbit.verbs.requester import LocalMemory
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import QUICK, Get, Put, ScriptedPair, counts, rdma_pair
from tests.unit.verbs.test_pieces import Watched

Scenario = Callable[[ScriptedPair], Awaitable[None]]
KIB = 1 << 10
EDGES = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**64 - 1]


def run(scenario: Scenario, *, config: RdmaPathConfig = QUICK, message_bytes_max: int = 0) -> None:
    async def main() -> None:
        async with rdma_pair(
            config=config, pinned_targets=False, message_bytes_max=message_bytes_max
        ) as pair:
            for direction in Direction:
                prepared = await pair.consumer.prepare(pair.consumer_session, direction)
                assert prepared is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("address", [1, *EDGES])
def test_a_range_of_memory_ends_inside_it_or_is_refused(address: int, length: int) -> None:
    fits = address + length <= 2**64
    record = replace(RECORD, address=1, length=1)
    if fits:
        descriptor = Descriptor(7, Address(address), length, RemoteKey(9))
        assert decode_descriptor(encode_descriptor(descriptor)) == descriptor
        record = replace(RECORD, address=address, length=length)
        assert GrantRecord.decode(record.encode()) == record
    else:
        with pytest.raises(DescriptorError):
            Descriptor(7, Address(address), length, RemoteKey(9))
        with pytest.raises(ValueError, match="memory"):
            replace(RECORD, address=address, length=length)
        honest = encode_descriptor(Descriptor(7, Address(1), 1, RemoteKey(9)))
        lie = honest[:11] + address.to_bytes(8, "little") + length.to_bytes(8, "little")
        with pytest.raises(DescriptorError):
            decode_descriptor(lie + honest[27:])


@pytest.mark.parametrize("nbytes", EDGES)
@pytest.mark.parametrize("offset", [0, 1, *EDGES])
def test_a_range_of_a_payload_is_checked_without_wrapping(offset: int, nbytes: int) -> None:
    for total in EDGES:
        if offset + nbytes <= total:
            check_range(offset, nbytes, total)
        else:
            with pytest.raises(OutOfRange):
                check_range(offset, nbytes, total)


@pytest.mark.parametrize("total", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40])
def test_pieces_of_a_huge_range_are_packed_with_their_whole_offsets(total: int) -> None:
    """Nothing is moved: the work requests alone are looked at, at the edges of 32 bits."""
    cap = 1 << 30
    base, far = 2**47, 2**48
    border = total // 2 + 1
    memory = LocalMemory([Segment(Address(base), 1, border), Segment(Address(5), 2, total)], None)
    planner = RoundPlanner(
        total, piece_bytes=cap, inflight_bytes_max=total, send_slots=9, borders=memory.borders
    )
    covered = 0
    while not planner.finished:
        pieces = planner.next_round()
        for piece in pieces:
            assert piece.offset == covered
            assert 0 < piece.nbytes <= cap
            assert not piece.offset < border < piece.offset + piece.nbytes
            address, lkey = memory.locate(piece.offset)
            first = piece.offset < border
            assert (address, lkey) == (
                (base + piece.offset, 1) if first else (5 + piece.offset - border, 2)
            )
            packed = records.pack_read(1, address, lkey, piece.nbytes, far + piece.offset, 3)
            _, local, remote, _, _, nbytes, *_ = records.WR.unpack(packed)
            assert (local, remote, nbytes) == (address, far + piece.offset, piece.nbytes)
            covered += piece.nbytes
        planner.complete(len(pieces))
    assert covered == total


@pytest.mark.parametrize(
    ("offset", "nbytes", "expected"),
    [
        (0, 600, [(1000, 1, 100), (2000, 2, 200), (3000, 3, 300)]),
        (99, 2, [(1099, 1, 1), (2000, 2, 1)]),
        (100, 200, [(2000, 2, 200)]),
        (299, 301, [(2199, 2, 1), (3000, 3, 300)]),
    ],
)
def test_local_memory_is_cut_at_its_borders(
    offset: int, nbytes: int, expected: list[tuple[int, int, int]]
) -> None:
    segments = [Segment(Address(1000 * i), i, 100 * i) for i in (1, 2, 3)]
    keep = object()
    memory = LocalMemory(segments, keep)
    assert memory.borders == [100, 300]
    part = memory.cut(offset, nbytes)
    assert part.keep is keep
    starts = [0, *part.borders]
    assert [
        (*part.locate(start), size) for start, (_, _, size) in zip(starts, expected, strict=True)
    ] == expected


# --- the device's longest message -----------------------------------------------------------------


@pytest.mark.parametrize("cap", [64 * KIB, 64 * KIB - 1, 4096])
@pytest.mark.parametrize("direction", Direction)
def test_no_work_request_is_longer_than_the_device_takes(direction: Direction, cap: int) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        watched = Watched(pair)
        kind = Get if direction is Direction.READ else Put
        sizes = [cap - 1, cap, cap + 1, 3 * cap, 1_000_003]
        for lease, nbytes in enumerate(sizes, 1):
            await kind(pair, nbytes, lease).run()
        assert max(nbytes for _, _, nbytes in watched.posted) == cap
        assert sum(nbytes for _, _, nbytes in watched.posted) == sum(sizes)
        assert counts(pair.consumer)["aborts"] == 0

    run(scenario, message_bytes_max=cap)


# --- nonsense -------------------------------------------------------------------------------------


def test_ten_thousand_mutated_answers_move_nothing_that_was_not_granted() -> None:
    """Each ends as a typed error before anything is posted, or it means the same as the original:
    then exactly the granted bytes come.
    """

    async def scenario(pair: ScriptedPair) -> None:
        chance = random.Random(38)
        get = Get(pair, 5000, 1)
        exposure = await get.expose()
        lease, refused = 1, 0
        for _ in range(10_000):
            mutant = mutate(chance, exposure)
            try:
                await get.pull(mutant)
            except PathFailed as error:
                assert error.reason in (PathReason.DECODE_ERROR, PathReason.GET_FAILED)  # noqa: PT017
                assert get.untouched
                refused += 1
                continue
            assert get.buffer == get.payload
            same = GrantRecord.decode(mutant.grant)
            granted = GrantRecord.decode(exposure.grant)
            assert replace(same, request_id=granted.request_id) == granted
            assert decode_descriptor(mutant.descriptor) == decode_descriptor(exposure.descriptor)
            await get.retract()
            lease += 1
            await asyncio.sleep(0.06)  # a receipt that names another request ends the queue pair
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            get = Get(pair, 5000, lease)
            exposure = await get.expose()
        assert refused > 9000
        assert counts(pair.consumer)["pulls_failed"] == refused
        await get.pull(exposure)
        await get.retract()

    run(scenario)


def mutate(chance: random.Random, exposure: Exposure) -> Exposure:
    """Bytes changed, removed, doubled or appended, in one of the two or in both."""
    parts = [exposure.descriptor, exposure.grant]
    for place in chance.choice([(0,), (1,), (0, 1)]):
        data = bytearray(parts[place])
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(len(data))
            match chance.randrange(5):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at] = chance.randrange(256)
                case 2:
                    del data[at:]
                    data += bytes(1)
                case 3:
                    data[at:at] = data[at : at + chance.randrange(1, 9)]
                case _:
                    data += chance.randbytes(chance.randrange(1, 4))
        parts[place] = bytes(data)
    return Exposure(descriptor=parts[0], grant=parts[1])


RECORD = GrantRecord(
    source_process=bytes(16),
    requester_process=bytes(16),
    source_connection=bytes(16),
    requester_connection=bytes(16),
    request_id=bytes(16),
    array=0,
    index=0,
    source_qpn=1,
    requester_qpn=2,
    generation=7,
    address=1,
    length=1,
    key=9,
)
