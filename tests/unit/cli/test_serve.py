"""What `orbit serve` asks of registered memory for the files that it pins."""

from __future__ import annotations

import pytest

from orbit.cli.serve import pool_for
from orbit.config import GIB, MIB


@pytest.mark.parametrize("nbytes", [0, 1, 64 * MIB, GIB, 1500 * MIB, 40 * GIB])
def test_any_size_of_the_set_has_a_pool_with_room_for_it(nbytes: int) -> None:
    pool = pool_for(nbytes)
    assert pool.initial_arena_bytes <= pool.max_arena_bytes
    assert pool.registered_bytes_budget >= max(GIB, 2 * nbytes)
