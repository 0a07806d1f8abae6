"""The offset allocator: exact, without overlap, and full only when it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orbit.errors import InternalError, UsageError
from orbit.memory.arena import GRANULE_BYTES, Allocation, OffsetAllocator

KIB = 1024
MIB = 1024 * KIB


def test_a_whole_arena_in_one_piece_and_back() -> None:
    arena = OffsetAllocator(64 * MIB)
    piece = arena.allocate(64 * MIB)
    assert piece is not None
    assert piece.offset == 0
    assert arena.free_bytes == arena.largest_free_bytes == 0
    assert arena.allocate(1) is None
    arena.free(piece)
    assert arena.largest_free_bytes == arena.capacity_bytes == 64 * MIB
    assert arena.live_count == 0


@pytest.mark.parametrize("nbytes", [1, GRANULE_BYTES - 1, GRANULE_BYTES, GRANULE_BYTES + 1])
def test_pieces_are_whole_granules(nbytes: int) -> None:
    arena = OffsetAllocator(MIB)
    piece = arena.allocate(nbytes)
    assert piece is not None
    assert piece.nbytes == nbytes
    granules = -(-nbytes // GRANULE_BYTES)
    assert arena.allocated_bytes == granules * GRANULE_BYTES


def test_a_capacity_is_cut_down_to_granules() -> None:
    assert OffsetAllocator(3 * GRANULE_BYTES - 1).capacity_bytes == 2 * GRANULE_BYTES
    with pytest.raises(UsageError):
        OffsetAllocator(GRANULE_BYTES - 1)


def test_only_the_token_frees_and_only_once() -> None:
    arena, other = OffsetAllocator(MIB), OffsetAllocator(MIB)
    piece, twin = arena.allocate(5), other.allocate(5)
    assert piece is not None
    assert twin is not None
    assert piece.offset == twin.offset
    for wrong in (twin, Allocation(piece.offset, piece.nbytes, piece.granules)):
        with pytest.raises(InternalError):
            arena.free(wrong)
    arena.free(piece)
    with pytest.raises(InternalError):
        arena.free(piece)
    assert arena.free_bytes == MIB


def test_zero_bytes_are_no_allocation() -> None:
    with pytest.raises(UsageError):
        OffsetAllocator(MIB).allocate(0)


def test_a_run_in_the_same_class_is_found_when_only_it_fits() -> None:
    """Runs of 33 granules sit in the class of 32 to 35: rounding the request up alone would miss
    them.
    """
    arena = OffsetAllocator(33 * GRANULE_BYTES)
    piece = arena.allocate(33 * GRANULE_BYTES)
    assert piece is not None
    arena.free(piece)
    assert arena.allocate(33 * GRANULE_BYTES) is not None


@pytest.mark.parametrize("order", ["up", "down", "inside out"])
def test_neighbours_join_in_any_order(order: str) -> None:
    arena = OffsetAllocator(8 * GRANULE_BYTES)
    pieces = [arena.allocate(1) for _ in range(8)]
    assert arena.allocate(1) is None
    if order == "down":
        pieces.reverse()
    elif order == "inside out":
        pieces = pieces[1::2] + pieces[::2]
    for piece in pieces:
        assert piece is not None
        arena.free(piece)
    assert arena.largest_free_bytes == arena.capacity_bytes


def test_ten_thousand_random_steps_give_everything_back() -> None:
    rng = random.Random(7)
    arena = OffsetAllocator(64 * MIB)
    live: list[Allocation] = []
    for _ in range(10_000):
        if live and rng.random() < 0.5:
            arena.free(live.pop(rng.randrange(len(live))))
        elif (piece := arena.allocate(rng.randint(1, 2 * MIB))) is not None:
            live.append(piece)
    for piece in live:
        arena.free(piece)
    assert arena.largest_free_bytes == arena.free_bytes == 64 * MIB


class ArenaAgainstModel(RuleBasedStateMachine):
    """A model that keeps one flag for each granule."""

    GRANULES = 100

    def __init__(self) -> None:
        super().__init__()
        self.arena = OffsetAllocator(self.GRANULES * GRANULE_BYTES)
        self.taken = [False] * self.GRANULES
        self.live: list[Allocation] = []

    def longest_free(self) -> int:
        runs = "".join("x" if taken else "." for taken in self.taken).split("x")
        return max(len(run) for run in runs)

    @rule(nbytes=st.integers(1, GRANULES * GRANULE_BYTES))
    def allocate(self, nbytes: int) -> None:
        granules = -(-nbytes // GRANULE_BYTES)
        piece = self.arena.allocate(nbytes)
        if piece is None:
            assert self.longest_free() < granules, "full although a run is long enough"
            return
        first, rest = divmod(piece.offset, GRANULE_BYTES)
        assert rest == 0
        assert not any(self.taken[first : first + granules]), "overlap"
        assert first + granules <= self.GRANULES
        self.taken[first : first + granules] = [True] * granules
        self.live.append(piece)

    @rule(nbytes=st.integers(1, 12 * GRANULE_BYTES))
    def allocate_small(self, nbytes: int) -> None:
        self.allocate(nbytes)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        piece = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.arena.free(piece)
        first = piece.offset // GRANULE_BYTES
        for granule in range(first, first + -(-piece.nbytes // GRANULE_BYTES)):
            self.taken[granule] = False

    @invariant()
    def agree(self) -> None:
        assert self.arena.allocated_bytes == sum(self.taken) * GRANULE_BYTES
        assert self.arena.largest_free_bytes == self.longest_free() * GRANULE_BYTES
        assert self.arena.live_count == len(self.live)


ArenaAgainstModel.TestCase.settings = settings(max_examples=150, deadline=None)
TestArenaAgainstModel = ArenaAgainstModel.TestCase
