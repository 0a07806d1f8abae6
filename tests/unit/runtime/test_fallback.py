"""Every way to lose the RDMA path gives the same bytes over TCP, with the right reason, once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from orbit import events
from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import (
    BudgetExceeded,
    PathFailed,
    PathUnavailable,
    TransferFailed,
    UnknownHandle,
    Unquiesced,
)
from orbit.model import Handle, Lease, PathName, PathReason, Transport
from orbit.runtime import retained
from orbit.runtime.sinks import FreshSink
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode
from orbit.transport.interface import Exposure, PullReport, Target

PAYLOAD = pattern(100_000)
SWITCHED_OFF = NodeConfig(rendezvous=RendezvousConfig(enabled=False))


@dataclass
class Pair:
    owner: WorldNode
    consumer: WorldNode

    def fallbacks(self) -> int:
        return self.consumer.count(events.FALLBACKS_TOTAL)

    def decisions(self, node: WorldNode, side: str) -> dict[str, int]:
        found = {}
        for reason in PathReason:
            for path in PathName:
                count = node.count(events.PATH_TOTAL, side=side, reason=reason, path=path)
                if count:
                    found[f"{path}/{reason}"] = count
        return found


def add_pair(
    world: World,
    owner: NodeConfig | None = None,
    consumer: NodeConfig | None = None,
    *,
    owner_rdma: bool = True,
    consumer_rdma: bool = True,
) -> Pair:
    pair = Pair(
        world.add_node(owner, rdma=owner_rdma), world.add_node(consumer, rdma=consumer_rdma)
    )
    world.introduce()
    return pair


async def fetch(pair: Pair, payload: bytes = PAYLOAD, transport: str = "auto") -> Lease:
    handle = await pair.owner.rendezvous.owner.register_data_pinned(payload)
    return await fetch_handle(pair, handle, payload, transport)


async def fetch_handle(pair: Pair, handle: Handle, payload: bytes, transport: str) -> Lease:
    data, lease = await pair.consumer.rendezvous.consumer.get(
        handle, transport=transport, timeout=None
    )
    assert data == payload
    assert data.readonly
    await pair.consumer.rendezvous.consumer.release(handle, lease)
    with pytest.raises(UnknownHandle):
        await pair.consumer.rendezvous.consumer.metadata(handle)
    return lease


def expect(
    path: PathName, reason: PathReason, fallbacks: int, prepare: Callable[[Pair], None]
) -> Pair:
    async def main() -> Pair:
        async with World() as world:
            pair = add_pair(world)
            prepare(pair)
            lease = await fetch(pair)
            assert (lease.path, lease.reason, lease.nbytes) == (path, reason, len(PAYLOAD))
            assert pair.fallbacks() == fallbacks
            return pair

    return run_virtual(main())


def rdma_of(node: WorldNode) -> object:
    assert node.rdma is not None
    return node.rdma


def test_rdma_when_nothing_is_wrong() -> None:
    pair = expect(PathName.RDMA, PathReason.OK, 0, lambda pair: None)
    assert pair.decisions(pair.owner, "owner") == {"rdma/ok": 1}
    assert pair.decisions(pair.consumer, "consumer") == {"rdma/ok": 1}


@pytest.mark.parametrize(
    "reason", [PathReason.GET_FAILED, PathReason.DECODE_ERROR, PathReason.POOL_EXHAUSTED]
)
def test_a_failed_read_falls_back_once_with_its_label(reason: PathReason) -> None:
    def break_it(pair: Pair) -> None:
        assert pair.consumer.rdma is not None
        pair.consumer.rdma.faults.failures = [(50_000, reason)]

    pair = expect(PathName.TCP, reason, 1, break_it)
    assert pair.decisions(pair.consumer, "consumer") == {f"tcp/{reason}": 1}
    # The owner sent a descriptor, and then served a consumer that offered nothing.
    assert pair.decisions(pair.owner, "owner") == {"rdma/ok": 1, "tcp/no_offer": 1}


def test_a_device_that_fails_otherwise_counts_as_get_failed() -> None:
    def break_it(pair: Pair) -> None:
        assert pair.consumer.rdma is not None
        pair.consumer.rdma.faults.failures = [(0, PathReason.CONNECT_FAILED)]

    expect(PathName.TCP, PathReason.GET_FAILED, 1, break_it)


@pytest.mark.parametrize(
    "reason", [PathReason.WINDOW_KEYS, PathReason.WINDOWS_BUSY, PathReason.DRAINING]
)
def test_an_owner_that_cannot_expose_says_why(reason: PathReason) -> None:
    def break_it(pair: Pair) -> None:
        assert pair.owner.rdma is not None
        pair.owner.rdma.faults.expose = reason

    pair = expect(PathName.TCP, reason, 0, break_it)
    assert pair.decisions(pair.owner, "owner") == {f"tcp/{reason}": 1}


def test_a_dial_that_fails_is_not_offered() -> None:
    def break_it(pair: Pair) -> None:
        assert pair.consumer.rdma is not None
        pair.consumer.rdma.faults.prepare = PathReason.CONNECT_FAILED

    pair = expect(PathName.TCP, PathReason.CONNECT_FAILED, 0, break_it)
    assert pair.decisions(pair.owner, "owner") == {"tcp/no_offer": 1}


def test_a_peer_without_rails_is_known_without_a_dial() -> None:
    def break_it(pair: Pair) -> None:
        assert pair.consumer.rdma is not None
        pair.consumer.rdma.faults.availability = PathReason.PEER_WITHOUT

    pair = expect(PathName.TCP, PathReason.PEER_WITHOUT, 0, break_it)
    assert pair.consumer.rdma is not None
    assert pair.consumer.rdma.prepares == 0


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"ensure_reason": PathReason.BUDGET}, PathReason.BUDGET),
        ({"ensure_reason": PathReason.POOL_EXHAUSTED}, PathReason.POOL_EXHAUSTED),
        ({"over_budget": True}, PathReason.BUDGET),
    ],
)
def test_an_arena_that_cannot_be_had_stages_on_the_heap(
    faults: dict[str, object], reason: PathReason
) -> None:
    def break_it(pair: Pair) -> None:
        for name, value in faults.items():
            setattr(pair.owner.memory, name, value)

    pair = expect(PathName.TCP, PathReason.NOT_PINNED, 0, break_it)
    assert pair.decisions(pair.owner, "owner") == {f"tcp/{reason}": 1, "tcp/not_pinned": 1}


def test_a_payload_that_the_budget_has_no_arena_for_stages_on_the_heap() -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            assert pair.owner.memory is not None
            pair.owner.memory.budget.limit_bytes = 1 << 20
            lease = await fetch(pair, pattern((1 << 20) + 1))
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason.NOT_PINNED)
            assert pair.decisions(pair.owner, "owner")["tcp/budget"] == 1

    run_virtual(main())


@pytest.mark.parametrize(
    ("owner", "consumer", "owner_rdma", "consumer_rdma", "reason", "at_owner"),
    [
        (SWITCHED_OFF, None, True, True, "kill_switch", {"tcp/kill_switch": 2}),
        (None, SWITCHED_OFF, True, True, "kill_switch", {"tcp/no_offer": 1}),
        (None, None, False, True, "no_device", {"tcp/no_device": 2}),
        (None, None, True, False, "no_device", {"tcp/no_offer": 1}),
    ],
)
def test_either_side_alone_turns_the_path_off(
    owner: NodeConfig | None,
    consumer: NodeConfig | None,
    owner_rdma: bool,
    consumer_rdma: bool,
    reason: str,
    at_owner: dict[str, int],
) -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(
                world, owner, consumer, owner_rdma=owner_rdma, consumer_rdma=consumer_rdma
            )
            lease = await fetch(pair)
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason(reason))
            assert pair.fallbacks() == 0
            assert pair.decisions(pair.owner, "owner") == at_owner

    run_virtual(main())


@pytest.mark.parametrize(
    ("nbytes", "path", "reason"),
    [
        (65_535, PathName.TCP, PathReason.BELOW_MIN),
        (65_536, PathName.RDMA, PathReason.OK),
        (65_537, PathName.RDMA, PathReason.OK),
    ],
)
def test_the_threshold_is_exact(nbytes: int, path: PathName, reason: PathReason) -> None:
    async def main() -> None:
        async with World() as world:
            lease = await fetch(add_pair(world), pattern(nbytes))
            assert (lease.path, lease.reason) == (path, reason)

    run_virtual(main())


def test_demanded_rdma_skips_the_threshold_and_takes_zero_bytes() -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            for nbytes in (0, 1, 65_535):
                lease = await fetch(pair, pattern(nbytes), "rdma")
                assert (lease.path, lease.reason) == (PathName.RDMA, PathReason.OK)

    run_virtual(main())


def test_demanded_tcp_makes_no_offer() -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            lease = await fetch(pair, transport="tcp")
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason.ASKED)
            assert pair.consumer.rdma is not None
            assert (pair.consumer.rdma.pulls, pair.consumer.rdma.prepares) == (0, 0)

    run_virtual(main())


def test_demanded_rdma_never_falls_back() -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            assert pair.consumer.rdma is not None
            pair.consumer.rdma.faults.failures = [(10, PathReason.GET_FAILED)]
            handle = await pair.owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            with pytest.raises(PathFailed):
                await pair.consumer.rendezvous.consumer.get(handle, transport="rdma", timeout=None)
            assert (pair.fallbacks(), pair.consumer.tcp.pulls) == (0, 0)
            heap = await pair.owner.rendezvous.owner.register_data(PAYLOAD)
            with pytest.raises(PathUnavailable) as caught:
                await pair.consumer.rendezvous.consumer.get(heap, transport="rdma", timeout=None)
            assert caught.value.reason == "not_pinned"
            assert "register_data_pinned" in caught.value.hint

    run_virtual(main())


@pytest.mark.parametrize("config", [None, SWITCHED_OFF])
def test_demanded_rdma_that_is_missing_here_dials_nobody(config: NodeConfig | None) -> None:
    async def main() -> None:
        async with World() as world:
            owner = world.add_node()
            consumer = world.add_node(config, rdma=config is not None)
            world.introduce()
            handle = await owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            with pytest.raises(PathUnavailable) as caught:
                await consumer.rendezvous.consumer.get(
                    handle, transport=Transport.RDMA, timeout=None
                )
            assert caught.value.reason == ("no_device" if config is None else "kill_switch")
            assert caught.value.hint
            assert world.network.links == []

    run_virtual(main())


def test_a_fallback_that_fails_too_tells_both_causes() -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            assert pair.consumer.rdma is not None
            pair.consumer.rdma.faults.failures = [(10, PathReason.GET_FAILED)]
            pair.consumer.tcp.faults.failures = [(10, PathReason.GET_FAILED)]
            handle = await pair.owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            with pytest.raises(TransferFailed) as caught:
                await pair.consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
            assert len(caught.value.attempts) == 2
            assert pair.fallbacks() == 1

    run_virtual(main())


def test_one_warning_for_each_peer_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            assert pair.consumer.rdma is not None
            for reason in (PathReason.GET_FAILED, PathReason.GET_FAILED, PathReason.DECODE_ERROR):
                pair.consumer.rdma.faults.failures = [(10, reason)]
                await fetch(pair)
            assert pair.fallbacks() == 3

    with caplog.at_level(logging.WARNING, "orbit"):
        run_virtual(main())
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == [
        "get_failed",
        "decode_error",
    ]


def test_a_target_that_may_still_be_written_is_kept_and_not_filled_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def pull(*args: object) -> PullReport:
        raise Unquiesced("queue pair 7", len(PAYLOAD), "the drain timed out")

    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            monkeypatch.setattr(pair.consumer.rdma, "pull", pull)
            handle = await pair.owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            dest = bytearray(len(PAYLOAD))
            with pytest.raises(Unquiesced):
                await pair.consumer.rendezvous.consumer.get_into(
                    handle, dest, transport=None, timeout=None, progress=None
                )
            assert (pair.fallbacks(), pair.consumer.tcp.pulls) == (0, 0)
            with pytest.raises(BufferError):
                dest.append(0)  # its export is held
            found = pair.consumer.rendezvous.statistics()
            assert [entry.nbytes for entry in found.retained] == [len(PAYLOAD)]

    run_virtual(main())


def test_a_payload_that_may_still_be_read_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)

    async def retract(*args: object, **kwargs: object) -> None:
        raise Unquiesced("window 7", len(PAYLOAD), "the queue pair did not drain")

    async def main() -> None:
        world = World()
        pair = add_pair(world)
        monkeypatch.setattr(pair.owner.rdma, "retract", retract)
        handle = await pair.owner.rendezvous.owner.register_data_pinned(PAYLOAD)
        await pair.consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
        with pytest.raises(Unquiesced):
            await pair.owner.rendezvous.owner.withdraw(handle)
        assert pair.owner.memory is not None
        assert pair.owner.memory.allocated_count == 1
        await world.close()
        assert pair.owner.memory.allocated_count == 1
        assert len(kept) == 1

    run_virtual(main())


def test_a_second_descriptor_is_an_error_and_not_a_third_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An owner that answers an acquire without an offer with a descriptor is broken."""
    from orbit.protocol.messages import AcquireReply, AcquireRequest, RdmaAnswer
    from orbit.runtime.owner import Owner
    from orbit.runtime.shelved import Access

    async def answer(
        owner: Owner, session: object, access: Access, request: AcquireRequest
    ) -> AcquireReply:
        return AcquireReply(rdma=RdmaAnswer(access.lease_id, b"d", b"g", 0, len(PAYLOAD)))

    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            monkeypatch.setattr(Owner, "_answer", answer)
            handle = await pair.owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            with pytest.raises(Exception, match="without an offer"):
                await pair.consumer.rendezvous.consumer.get(handle, transport=None, timeout=None)
            assert pair.fallbacks() == 1
            monkeypatch.undo()
            await asyncio.sleep(1)
            assert pair.owner.rendezvous.statistics().slots.leases_held == 0

    run_virtual(main())


MALFORMED = {
    "empty": b"",
    "short": b"sim\x00\x00\x00",
    "foreign": b"ucx\x00" + bytes(8),
    "trailing": b"sim\x00" + bytes(9),
}


@pytest.mark.parametrize("descriptor", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_descriptor_falls_back(
    descriptor: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            assert pair.owner.rdma is not None
            really = pair.owner.rdma.expose

            async def expose(*args: Any, **kwargs: Any) -> Exposure:
                await really(*args, **kwargs)
                return Exposure(descriptor=descriptor)

            monkeypatch.setattr(pair.owner.rdma, "expose", expose)
            lease = await fetch(pair)
            assert (lease.path, lease.reason) == (PathName.TCP, PathReason.DECODE_ERROR)
            assert pair.fallbacks() == 1
            await asyncio.sleep(0.1)
            assert pair.owner.rendezvous.statistics().slots.leases_held == 0

    run_virtual(main())


@pytest.mark.parametrize("opens", [1, 2])
def test_memory_that_cannot_be_had_returns_every_lease(
    opens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the fallback gets it. Twice: the lease of the fallback is given back, too."""
    refused = 0
    really = FreshSink.open

    async def open_late(sink: FreshSink, total_bytes: int) -> Target:
        nonlocal refused
        refused += 1
        if refused <= opens:
            raise BudgetExceeded("memory of this process", total_bytes, 0, 0, "its limits")
        return await really(sink, total_bytes)

    async def main() -> None:
        async with World() as world:
            pair = add_pair(world)
            monkeypatch.setattr(FreshSink, "open", open_late)
            handle = await pair.owner.rendezvous.owner.register_data_pinned(PAYLOAD)
            if opens == 1:
                lease = await fetch_handle(pair, handle, PAYLOAD, "auto")
                assert (lease.path, lease.reason) == (PathName.TCP, PathReason.POOL_EXHAUSTED)
            else:
                with pytest.raises(TransferFailed):
                    await pair.consumer.rendezvous.consumer.get(
                        handle, transport=None, timeout=None
                    )
            assert pair.fallbacks() == 1
            await asyncio.sleep(0.1)
            assert pair.owner.rendezvous.statistics().slots.leases_held == 0

    run_virtual(main())
