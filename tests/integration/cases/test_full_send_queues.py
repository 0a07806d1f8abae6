"""C45 with scripted devices: no work request is posted without a free slot, none that may have been
taken is posted again, and a post that was refused in the middle ends by the contract.

What a single queue pair makes of a refused post is tests/unit/verbs/test_queue_pair.py's.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.runtime.retained import retained
from orbit.verbs import records
from orbit.verbs.queue_pair import BulkQueuePair, Posting
from orbit.verbs.scripted_fabric import ScriptedDevice
from orbit.verbs.turn import PostResult, Turn
from tests.integration.cases.fake_hosts import HostPair
from tests.soak import SOAK

Run = Callable[[Any], Any]
MIB = 1 << 20
RANGES = 5000 if SOAK else 250
RANGE = 4096
KINDS = {"read": records.READ, "write": records.WRITE}


class Posts:
    """READs and WRITEs by the memory that they reach, and how full the send queues were."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.taken: Counter[tuple[int, int]] = Counter()  # by address and key
        self.in_doubt: Counter[tuple[int, int]] = Counter()
        self.outstanding_max = 0
        post_send, turn_post = BulkQueuePair.post_send, Turn.post_send

        def post(queue_pair: BulkQueuePair, postings: Sequence[Posting]) -> None:
            assert len(postings) <= queue_pair.send_free
            self.outstanding_max = max(self.outstanding_max, queue_pair.sends + len(postings))
            post_send(queue_pair, postings)

        def turn(turn: Turn, qp: int, requests: Sequence[bytes]) -> PostResult:
            result = turn_post(turn, qp, requests)
            count = len(requests) if result.accepted is None else result.accepted
            for packed in requests[:count]:
                fields = records.WR.unpack(packed)
                if fields[8] in KINDS.values() and fields[5]:
                    kept = self.in_doubt if result.accepted is None else self.taken
                    kept[fields[2], fields[7]] += 1
            return result

        patch.setattr(BulkQueuePair, "post_send", post)
        patch.setattr(Turn, "post_send", turn)

    def check_none_twice(self) -> None:
        both = self.taken + self.in_doubt
        assert max(both.values(), default=1) == 1, "posted again"


@pytest.mark.parametrize("max_send_wr", [16, 8])
@pytest.mark.parametrize("op", KINDS)
def test_more_ranges_than_any_queue_holds(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, max_send_wr: int
) -> None:
    """With calls in between, which have queue pairs of their own."""

    async def main() -> None:
        nbytes = 2 * RANGES * RANGE
        async with HostPair.opened(tmp_path, nbytes=nbytes, max_send_wr=max_send_wr) as pair:
            source, requester = pair.engines
            source.node.handler("echo", lambda message: message.payload)
            offsets = np.random.default_rng(1).permutation(RANGES) * (2 * RANGE)
            local, remote = pair.regions[1], pair.regions[0].remote()
            sizes = np.full(RANGES, RANGE)

            def ranges(count: int) -> orbit.RangeRequest:
                of = offsets[:count], offsets[::-1][:count], sizes[:count]
                return orbit.RangeRequest(op, local, remote, *of, "rdma")

            await requester.submit(ranges(50))  # what is made once is there
            await requester.node.unary(source.node.identity, "echo", b"")
            before = [bytes(memory) for memory in pair.memory]
            posts, seen = Posts(monkeypatch), set()
            tracemalloc.start()
            try:
                batch = requester.submit(ranges(RANGES))
                for number in itertools.count():
                    if batch.done:
                        break
                    text = b"%d" % number
                    answer = await requester.node.unary(source.node.identity, "echo", text)
                    assert answer == text
                    seen.add(requester.statistics().budgets["max_grants"][0])
                gc.collect()
                grown = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
            assert max(seen) <= 64
            (result,) = await batch
            assert result.nbytes == RANGES * RANGE
            assert grown < MIB / 2 + 200 * RANGES, "memory grows"  # with what this test notes
            assert sum(posts.taken.values()) == RANGES
            assert not posts.in_doubt
            posts.check_none_twice()
            assert posts.outstanding_max <= max_send_wr
            check_moved(before, pair, op, offsets)

    run_async(main())


@pytest.mark.parametrize("op", KINDS)
def test_more_requests_at_once_than_a_source_has_receives(
    run_async: Run, tmp_path: Path, op: str
) -> None:
    """Two queue pairs of 8 receives: the others wait, and none is refused."""

    async def main() -> None:
        count, size = 64, 64 << 10
        async with HostPair.opened(tmp_path, nbytes=count * size, max_send_wr=8) as pair:
            requests = [pair.request(op, n * size, (n + 1) * size) for n in range(count)]
            batch = pair.engines[1].submit(requests)
            await batch
            assert batch.nbytes == count * size
            assert pair.memory[0] == pair.memory[1]
            assert any("wait for receives" in result.phases for result in batch.results())

    run_async(main())


def check_moved(before: list[bytes], pair: HostPair, op: str, offsets: Any) -> None:
    """Those ranges and no others, each once."""
    source, target = (0, 1) if op == "read" else (1, 0)
    expected = bytearray(before[target])
    for here, there in zip(offsets.tolist(), offsets[::-1].tolist(), strict=True):
        low, at = (there, here) if op == "read" else (here, there)
        expected[at : at + RANGE] = before[source][low : low + RANGE]
    assert pair.memory[target] == expected
    assert pair.memory[source] == before[source]


@pytest.mark.parametrize("known", [True, False], ids=["bad_wr", "no bad_wr"])
@pytest.mark.parametrize("op", KINDS)
def test_a_chain_that_is_refused_in_the_middle(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, known: bool
) -> None:
    """At each place. The request fails with the device's word, its memory is free again, nothing is
    posted a second time, and the next one works.
    """

    async def main() -> None:
        nbytes = 6 * MIB + 17
        kept = retained()
        async with HostPair.opened(tmp_path, nbytes=nbytes) as pair:
            device: ScriptedDevice = pair.hosts[1].devices["dev2"]
            await pair.move(op)
            for place in itertools.count():  # the first round of both queue pairs, and later ones
                posts = Posts(monkeypatch)
                device.refuse_post(KINDS[op], errno.ENOMEM, known=known, skip=place)
                batch = pair.engines[1].submit(pair.request(op))
                await batch.wait()
                (result,) = batch.results()
                posts.check_none_twice()
                monkeypatch.undo()
                device.clear_rules()
                if result.error is None:  # it has no more than that many
                    assert place >= 6
                    break
                assert bool(posts.in_doubt) is not known
                assert (result.state, result.nbytes) == (orbit.TransferState.FAILED, 0)
                assert isinstance(result.error, orbit.PathFailed | orbit.DeviceError)
                assert "Cannot allocate memory" in str(result.error)
                assert result.locally_drained
                await again(pair, op)
        assert retained() == kept

    run_async(main())


async def again(pair: HostPair, op: str) -> None:
    """The same request, once the queue pairs are there again."""
    for _ in range(50):
        try:
            await pair.move(op)
        except orbit.PathUnavailable:  # the back-off after a failure
            await asyncio.sleep(0.02)
        else:
            return
    raise AssertionError("it never works again")


@pytest.mark.parametrize("known", [True, False], ids=["bad_wr", "no bad_wr"])
def test_a_get_by_any_path_hears_nothing_of_it(run_async: Run, tmp_path: Path, known: bool) -> None:
    async def main() -> None:
        async with HostPair.opened(tmp_path) as pair:
            owner, consumer = (engine.node for engine in pair.engines)
            device = pair.hosts[1].devices["dev2"]
            payload = bytes(pair.memory[0])
            handle = await owner.register_data_pinned(payload, orbit.RegisterOptions(retain=True))
            paths = Counter()
            for place in range(4):
                device.refuse_post(records.READ, errno.ENOMEM, known=known, skip=place % 2)
                data, lease = await consumer.get(handle)
                device.clear_rules()
                assert data == payload
                await consumer.detach(handle, lease)
                paths[lease.path, lease.reason] += 1
            assert paths[orbit.PathName.TCP, orbit.PathReason.GET_FAILED] >= 1
            await owner.withdraw(handle)

    run_async(main())
