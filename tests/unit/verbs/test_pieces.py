"""Spans and targets of several pieces: one grant for each, cut at the borders of both sides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from errno import ENOMEM

import pytest

from orbit.errors import PathFailed, PathUnavailable
from orbit.model import Direction, LeaseId, PathReason
from orbit.protocol.binding import GrantRecord
from orbit.protocol.descriptor import Descriptor, encode_descriptor
from orbit.testing.pattern import pattern
from orbit.transport.interface import Exposure, RegisteredRange, Span, Target
from orbit.transport.pieces import cut_span, cut_target, join_spans, join_targets
from orbit.verbs import records
from orbit.verbs.scripted_fabric import FOREVER, RECEIVE
from orbit.verbs.settings import RdmaPathConfig
from orbit.verbs.turn import PostResult
from tests.contract.rdma_pairs import QUICK, Get, Put, ScriptedPair, counts, rdma_pair
from tests.soak import SOAK

Scenario = Callable[[ScriptedPair], Awaitable[None]]
MIB = 1 << 20
SEAMS = replace(QUICK, mr_bytes_max=MIB)


def run(scenario: Scenario, *, rxe: bool = False, config: RdmaPathConfig = QUICK) -> None:
    async def main() -> None:
        async with rdma_pair(rxe=rxe, config=config, pinned_targets=False) as pair:
            for direction in Direction:
                prepared = await pair.consumer.prepare(pair.consumer_session, direction)
                assert prepared is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


class Scattered:
    """Several pieces of the owner's pool, each with other data around it."""

    def __init__(self, pair: ScriptedPair, sizes: Sequence[int], lease: int = 1) -> None:
        self.pair = pair
        self.lease = LeaseId(lease)
        self.payload = pattern(sum(sizes), lease)
        self._held = [Put(pair, size, lease) for size in sizes]
        self.span = join_spans([held.span for held in self._held])

    def fill(self) -> None:
        start = 0
        for piece in self.span.pieces:
            piece.view[:] = self.payload[start : start + piece.view.nbytes]
            start += piece.view.nbytes

    @property
    def landed(self) -> bytes:
        return b"".join(held.landed for held in self._held)

    async def expose(self, direction: Direction = Direction.READ) -> Exposure:
        session = self.pair.owner_session
        return await self.pair.owner.expose(session, self.span, self.lease, direction=direction)

    async def retract(self, *, transferred: bool = True) -> None:
        session = self.pair.owner_session
        await self.pair.owner.retract(session, self.lease, transferred=transferred)

    def free(self) -> None:
        for held in self._held:
            self.pair.owner.memory.free(held.memory)


def targets_of(buffer: bytearray, sizes: Sequence[int]) -> Target:
    """The buffer as a target of several unpinned pieces."""
    view, start, pieces = memoryview(buffer), 0, []
    for size in sizes:
        pieces.append(Target(view[start : start + size]))
        start += size
    return join_targets(pieces)


BORDERS: list[tuple[list[int], list[int]]] = [
    ([100, 200, 300], [600]),
    ([600], [100, 200, 300]),
    ([100, 200, 300], [150, 1, 449]),
    ([1, 1, 1, 1], [2, 2]),
    ([MIB + 1, 7, 2 * MIB], [3, 3 * MIB + 5]),
    ([5000, 70_000, 5000], [40_000, 40_000]),
]


@pytest.mark.parametrize("rxe", [False, True])
@pytest.mark.parametrize(("source", "target"), BORDERS)
def test_a_pull_of_several_pieces_into_several(
    source: list[int], target: list[int], rxe: bool
) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, source)
        move.fill()
        exposure = await move.expose()
        found = [GrantRecord.decode(grant) for _, grant in exposure.grants]
        assert [record.length for record in found] == source
        assert [record.slice_index for record in found] == list(range(len(source)))
        assert len({record.request_id for record in found}) == 1
        seen: list[int] = []
        buffer = bytearray(sum(target))
        session = pair.consumer_session
        report = await pair.consumer.pull(
            session, exposure, move.lease, targets_of(buffer, target), seen.append
        )
        assert buffer == move.payload
        assert seen == sorted(seen)
        assert seen[-1] == len(buffer)
        assert report.counts["bytes"] == len(buffer)
        await move.retract()
        assert pair.owner.statistics().grants_active == 0
        assert counts(pair.owner)["receipts"] == len(source)
        assert counts(pair.owner)["aborts"] == 0
        move.free()

    run(scenario, rxe=rxe)


@pytest.mark.parametrize("rxe", [False, True])
@pytest.mark.parametrize(("destination", "source"), BORDERS)
def test_a_push_of_several_pieces_into_several(
    destination: list[int], source: list[int], rxe: bool
) -> None:
    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, destination)
        exposure = await move.expose(Direction.WRITE)
        target = targets_of(bytearray(move.payload), source)
        span = join_spans([Span(piece.view) for piece in target.pieces])
        await pair.consumer.push(pair.consumer_session, exposure, move.lease, span)
        await move.retract()
        assert move.landed == move.payload
        move.free()

    run(scenario, rxe=rxe)


def test_grants_are_spread_over_the_members() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, [1000] * 9)
        exposure = await move.expose()
        indexes = [GrantRecord.decode(grant).index for _, grant in exposure.grants]
        assert sorted(indexes) in ([0] * 4 + [1] * 5, [0] * 5 + [1] * 4)
        await move.retract(transferred=False)

    run(scenario)


def test_pieces_that_do_not_fit_are_windows_busy_and_cost_nothing() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        held = Get(pair, 100, 1)
        exposure = await held.expose()
        with pytest.raises(PathUnavailable) as caught:
            await Scattered(pair, [100] * 8, 2).expose()
        assert caught.value.reason == PathReason.WINDOWS_BUSY
        assert pair.owner.statistics().grants_active == 1
        move = Scattered(pair, [100] * 7, 3)
        move.fill()
        seven = await move.expose()
        await held.pull(exposure)
        await held.retract()
        buffer = bytearray(700)
        target = Target(memoryview(buffer))
        await pair.consumer.pull(pair.consumer_session, seven, move.lease, target)
        assert buffer == move.payload
        await move.retract()
        assert counts(pair.owner)["aborts"] == 0
        await Scattered(pair, [10] * 8, 4).expose()  # every receive is back
        await pair.owner.retract(pair.owner_session, LeaseId(4), transferred=False)

    run(scenario, config=replace(QUICK, recv_depth=4))


def test_keys_that_run_out_in_the_middle_publish_nothing() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.fail_verb("alloc_pd", ENOMEM, count=FOREVER)  # no fresh domain
        for lease in range(1, 2 * 255 - 3):  # three keys are left
            await Get(pair, 64, lease).run()
        with pytest.raises(PathUnavailable) as caught:
            await Scattered(pair, [64] * 5, 9000).expose()
        assert caught.value.reason == PathReason.WINDOW_KEYS
        assert pair.owner.statistics().grants_active == 0
        assert counts(pair.owner)["aborts"] == 0

    async def main() -> None:
        config = replace(QUICK, width=1, window_key_indices_max=2)
        async with rdma_pair(config=config, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await scenario(pair)

    asyncio.run(main())


def test_a_bind_that_fails_in_the_middle_publishes_nothing_and_ends_the_others() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.a.fail_bind(skip=2)
        move = Scattered(pair, [1000] * 5)
        with pytest.raises(PathUnavailable):
            await move.expose()
        assert pair.owner.statistics().grants_active == 0
        move.free()  # nothing reaches it any more
        for _ in range(500):
            await asyncio.sleep(0.002)
            if await pair.consumer.prepare(pair.consumer_session) is PathReason.OK:
                break
        await Get(pair, 5000, 2).run()

    run(scenario)


def test_a_piece_that_is_not_registered_refuses_all() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, [1000] * 3)
        span = join_spans([*move.span.pieces, Span(memoryview(bytearray(10)))])
        with pytest.raises(PathUnavailable) as caught:
            await pair.owner.expose(pair.owner_session, span, move.lease)
        assert caught.value.reason == PathReason.NOT_PINNED
        assert pair.owner.statistics().grants_active == 0
        assert counts(pair.owner)["binds"] == 0
        move.free()

    run(scenario)


def test_one_grant_that_fails_takes_the_pull_with_it_and_the_target_is_quiet_then() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, [MIB] * 6)
        move.fill()
        exposure = await move.expose()
        bad = list(exposure.grants)
        bad[3] = forged(exposure, 3, key=GrantRecord.decode(bad[3][1]).key + 1)
        lie = Exposure(descriptor=bad[0][0], grant=bad[0][1], rest=tuple(bad[1:]))
        buffer = bytearray(6 * MIB)
        with pytest.raises(PathFailed) as caught:
            await pair.consumer.pull(
                pair.consumer_session, lie, move.lease, Target(memoryview(buffer))
            )
        assert caught.value.reason is PathReason.GET_FAILED
        held = bytes(buffer)
        for piece in move.span.pieces:
            piece.view[:] = b"\xee" * piece.view.nbytes
        await asyncio.sleep(0.02)
        assert buffer == held
        await move.retract(transferred=False)
        await pair.consumer.prepare(pair.consumer_session)
        await Get(pair, 5000, 2).run()

    run(scenario)


def forged(exposure: Exposure, place: int, **changes: int | bytes) -> tuple[bytes, bytes]:
    record = replace(GrantRecord.decode(exposure.grants[place][1]), **changes)  # type: ignore[arg-type]
    descriptor = Descriptor(record.generation, record.address, record.length, record.key)  # type: ignore[arg-type]
    return encode_descriptor(descriptor), record.encode()


Mangle = Callable[[Exposure], Sequence[tuple[bytes, bytes]]]
MANGLED: dict[str, Mangle] = {
    "one is missing": lambda e: e.grants[:2],
    "out of order": lambda e: (e.grants[1], e.grants[0], e.grants[2]),
    "one twice": lambda e: (e.grants[0], e.grants[1], e.grants[1]),
    "of another lease": lambda e: (*e.grants[:2], forged(e, 2, request_id=bytes(16))),
    "one key twice": lambda e: (
        *e.grants[:2],
        forged(
            e,
            2,
            key=GrantRecord.decode(e.grants[0][1]).key,
            index=GrantRecord.decode(e.grants[0][1]).index,
        ),
    ),
    "one is too long": lambda e: (*e.grants[:2], forged(e, 2, length=1001)),
    "one is empty": lambda e: (*e.grants[:2], (b"", b"")),
}


@pytest.mark.parametrize("name", MANGLED)
def test_grants_that_do_not_belong_together_are_a_decode_error(name: str) -> None:
    """Found before anything is posted: the real ones are not spent."""

    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, [1000] * 3)
        move.fill()
        exposure = await move.expose()
        first, *rest = MANGLED[name](exposure)
        lie = Exposure(descriptor=first[0], grant=first[1], rest=tuple(rest))
        buffer = bytearray(3000)
        target = Target(memoryview(buffer))
        session = pair.consumer_session
        with pytest.raises(PathFailed) as caught:
            await pair.consumer.pull(session, lie, move.lease, target)
        assert caught.value.reason is PathReason.DECODE_ERROR
        await pair.consumer.pull(session, exposure, move.lease, target)
        assert buffer == move.payload
        await move.retract()
        assert counts(pair.consumer)["aborts"] == 0

    run(scenario)


def test_a_cancelled_pull_of_many_pieces_spares_the_queue_pairs() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        pair.b.hold(records.READ)
        move = Scattered(pair, [2 * MIB, 100, MIB, 5000, MIB, 3])
        move.fill()
        exposure = await move.expose()
        buffer = bytearray(len(move.payload))
        pulling = asyncio.ensure_future(
            pair.consumer.pull(
                pair.consumer_session, exposure, move.lease, Target(memoryview(buffer))
            )
        )
        for _ in range(5000):
            await asyncio.sleep(0.001)
            if counts(pair.consumer)["reads"]:
                break
        pulling.cancel()
        await asyncio.sleep(0.01)
        assert not pulling.done()
        pair.b.clear_rules()
        pair.b.release()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        await move.retract(transferred=False)
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        move.free()
        await Get(pair, 5000, 2).run()

    run(scenario)


def test_a_push_is_whole_only_when_every_receipt_came() -> None:
    async def scenario(pair: ScriptedPair) -> None:
        move = Scattered(pair, [1000] * 4)
        exposure = await move.expose(Direction.WRITE)
        pair.a.lose(RECEIVE, skip=2)
        await pair.consumer.push(
            pair.consumer_session, exposure, move.lease, Span(memoryview(move.payload))
        )
        with pytest.raises(PathFailed):
            await move.retract()
        move.free()

    run(scenario)


# --- seams of registrations -----------------------------------------------------------------------


class Watched:
    """Notes the READs and WRITEs that a path's first device posts."""

    def __init__(self, pair: ScriptedPair) -> None:
        self.posted: list[tuple[int, int, int]] = []  # local address, remote address, bytes
        turn = pair.consumer.devices[0].turn
        post_send = turn.post_send

        def watching(qp: int, requests: Sequence[bytes]) -> PostResult:
            for request in requests:
                _, local, remote, _, _, nbytes, _, _, opcode, _, _ = records.WR.unpack(request)
                if opcode in (records.READ, records.WRITE):
                    self.posted.append((local, remote, nbytes))
            return post_send(qp, requests)

        turn.post_send = watching  # type: ignore[method-assign]


def seams(registered: RegisteredRange) -> list[tuple[int, int]]:
    return [(part.address, part.address + part.view.nbytes) for part in registered.parts]


def within(parts: Sequence[tuple[int, int]], address: int, nbytes: int) -> bool:
    return any(low <= address and address + nbytes <= high for low, high in parts)


def ranges(total: int, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths: the seams first, then at random, most of them short."""
    yield from ((MIB - 1, 2), (0, total), (MIB, MIB), (2 * MIB - 1, MIB + 2), (total - 1, 1))
    chance = random.Random(seed)
    for _ in range(count - 5):
        nbytes = int(min(total, 2 ** chance.uniform(0, 17 if chance.random() < 0.97 else 22)))
        near = chance.randrange(1, 5) * MIB - chance.randrange(nbytes + 1)
        offset = near if chance.random() < 0.5 else chance.randrange(total)
        yield max(0, min(offset, total - nbytes)), nbytes


@pytest.mark.parametrize("direction", Direction)
def test_transfers_across_seams_out_of_phase_are_equal_to_a_copy(direction: Direction) -> None:
    """5 MiB + 123 bytes registered in parts of 1 MiB on both sides, and the far side 300 000 bytes
    further.
    """
    total, shift = 5 * MIB + 123, 300_000

    async def scenario(pair: ScriptedPair) -> None:
        far, near = bytearray(total), bytearray(shift + total)
        far_range = await pair.owner.memory.register(memoryview(far))
        near_range = await pair.consumer.memory.register(memoryview(near))
        assert len(far_range.parts) == 6
        watched = Watched(pair)
        far_span = join_spans([Span(part.view, part) for part in far_range.parts])
        near_target = join_targets([Target(part.view, part) for part in near_range.parts])
        far[:] = pattern(total, 1)
        near[:] = pattern(shift + total, 2)
        model_far, model_near = bytearray(far), bytearray(near)
        owner, consumer = pair.owner_session, pair.consumer_session
        for lease, (offset, nbytes) in enumerate(ranges(total, 20_000 if SOAK else 2000, 42), 1):
            span = cut_span(far_span, offset, nbytes)
            there = (offset + shift * lease) % (shift + total - nbytes + 1)
            target = cut_target(near_target, there, nbytes)
            exposure = await pair.owner.expose(owner, span, LeaseId(lease), direction=direction)
            if direction is Direction.READ:
                await pair.consumer.pull(consumer, exposure, LeaseId(lease), target)
                model_near[there : there + nbytes] = model_far[offset : offset + nbytes]
            else:
                source = join_spans([Span(p.view, p.pinned) for p in target.pieces])
                await pair.consumer.push(consumer, exposure, LeaseId(lease), source)
                model_far[offset : offset + nbytes] = model_near[there : there + nbytes]
            await pair.owner.retract(owner, LeaseId(lease), transferred=True)
            assert memoryview(near)[there : there + nbytes] == far[offset : offset + nbytes]
        assert near == model_near
        assert far == model_far
        local, remote = seams(near_range), seams(far_range)
        for near_address, far_address, size in watched.posted:
            assert within(local, near_address, size)
            assert within(remote, far_address, size)
        assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 0
        assert counts(pair.consumer)["targets_copied"] == 0
        del span, target, far_span, near_target, exposure
        await pair.owner.memory.deregister(far_range)
        await pair.consumer.memory.deregister(near_range)

    run(scenario, config=SEAMS)
