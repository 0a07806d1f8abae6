"""What a request of the engine costs in calls into the helper: counted at each side, over scripted
rails. The counts do not depend on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest

from orbit.runtime.engine.requests import RangeRequest, TransferRequest
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider
from orbit.verbs.turn import Turn, library_path
from tests.integration import test_rendezvous_scripted_rdma as hosts
from tests.integration.test_engine_scripted_rdma import MIB, End, two_engines

KIB = 1 << 10
Counts = dict[str, int]


class OwnTurn(ScriptedProvider):
    """The helper is counted for this host alone."""

    def __init__(self, fabric: ScriptedFabric, devices: Sequence[str] | None = None) -> None:
        super().__init__(fabric, devices)
        self._turn = Turn(library_path("scripted"))

    @property
    def turn(self) -> Turn:
        return self._turn


def counts(end: End) -> Counts:
    return asdict(end.host.path.devices[0].turn.crossings)


def used(before: Counts, after: Counts) -> Counts:
    return {name: after[name] - before[name] for name in after if after[name] > before[name]}


def request(op: str, here: End, there: End, size: int, ranges: int) -> object:
    if ranges == 1:
        return TransferRequest(op, here.region[:size], there.region.remote()[:size], "rdma")
    offsets = np.arange(ranges, dtype=np.uint64) * np.uint64(size)
    lengths = np.full(ranges, size, dtype=np.uint64)
    backwards = offsets[::-1].copy()
    return RangeRequest(op, here.region, there.region.remote(), backwards, offsets, lengths, "rdma")


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(
    ("rails", "size", "ranges", "pairs", "rounds", "naps"),
    [
        pytest.param(1, 64 * KIB, 1, 1, 1, True, id="one slice"),
        pytest.param(2, 64 * KIB, 1, 1, 1, True, id="one slice, two rails"),
        pytest.param(1, MIB, 1, 2, 1, False, id="every queue pair of one rail"),
        pytest.param(2, MIB, 1, 4, 1, False, id="every queue pair of two rails"),
        pytest.param(1, 8 * MIB, 1, 2, 2, False, id="two rounds"),
        pytest.param(1, 4 * KIB, 32, 2, 1, False, id="32 ranges"),
    ],
)
def test_two_calls_for_each_queue_pair_and_round(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    rails: int,
    size: int,
    ranges: int,
    pairs: int,
    rounds: int,
    naps: bool,
) -> None:
    """Its source posts once and is woken once, by the receipt. Its requester posts each round, and
    waits for it once: in the helper if it is short, else it is woken.
    """
    monkeypatch.setattr(hosts, "ScriptedProvider", OwnTurn)

    async def main() -> None:
        async with two_engines(rails=rails) as (there, here):
            asked = request(op, here, there, size, ranges)
            for warm in (request(op, here, there, 4 * MIB, 1), asked):
                await here.engine.submit([warm], 30.0)
            await asyncio.sleep(0.01)
            before = counts(there), counts(here)
            (result,) = await here.engine.submit([asked], 30.0)
            assert result.nbytes == size * ranges
            await asyncio.sleep(0.01)
            source, requester = used(before[0], counts(there)), used(before[1], counts(here))
            assert source == {"post": pairs, "wake": pairs}
            waits = {"nap": pairs} if naps else {"wake": pairs * rounds}
            assert requester == {"post_send": pairs * rounds, **waits}

    asyncio.run(main())
