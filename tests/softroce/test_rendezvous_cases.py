"""The cases of registered memory between two devices of the lab, and what needs a slow network or a
process with limits of its own.

Both nodes live in this process, as in test_rendezvous; what dies or stands still is in
test_rendezvous_deaths. The counts are CI's; ORBIT_SOAK (`make soak`) makes them the cases' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit import node as node_module
from orbit.errors import PeerLost
from orbit.model import LeaseId, PathReason
from orbit.testing.pattern import pattern
from orbit.transport.interface import Span, Target
from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.opening import open_rdma_path
from tests.contract.rdma_pairs import join
from tests.scenarios.key_cases import KEY_CASES, fetched_by_rdma
from tests.scenarios.memory_cases import CASES, IN_PARTS
from tests.scenarios.rig import MIB, Rig, Scenario, leases, until
from tests.soak import SOAK
from tests.softroce.node_hosts import Hosts
from tests.softroce.rails import rail_of
from tests.softroce.test_rdma_path import DEVICE
from tests.softroce.test_rendezvous import RDMA, Shared

CANCELLED_READS, CANCEL_ROUNDS = (64, 300) if SOAK else (8, 2)
REGISTRATIONS = 20_000 if SOAK else 100


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    pair = Shared(RDMA)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def in_parts() -> Iterator[Shared]:
    """No registration has more than 1 MiB."""
    real: Callable[..., Any] = node_module._rdma_path_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            node_module, "_rdma_path_config", lambda config: replace(real(config), mr_bytes_max=MIB)
        )
        pair = Shared(RDMA)
    yield pair
    pair.close()


@pytest.mark.parametrize("scenario", CASES + KEY_CASES, ids=lambda scenario: scenario.__name__)
def test_case(scenario: Scenario, shared: Shared) -> None:
    shared.run(scenario)


@pytest.mark.parametrize("scenario", IN_PARTS, ids=lambda scenario: scenario.__name__)
def test_in_parts(scenario: Scenario, in_parts: Shared) -> None:
    in_parts.run(scenario)


# --- C19: twice, with two rails -------------------------------------------------------------------


def test_memory_registered_twice_serves_every_rail() -> None:
    """The owner's two devices share one charge each; the consumer has the second rail alone."""

    async def main() -> None:
        provider = PyverbsProvider()
        rails = [rail_of("rxa1"), rail_of("rxa2")]
        owner, reason, detail = await open_rdma_path(provider, DEVICE, rails=rails)
        assert owner is not None, (reason, detail)
        consumer, reason, detail = await open_rdma_path(provider, DEVICE, rails=[rail_of("rxb2")])
        assert consumer is not None, (reason, detail)
        payload = pattern(MIB, 19)
        memory = bytearray(payload)
        before = owner.memory.registered_bytes
        first = await owner.memory.register(memoryview(memory))
        once = owner.memory.registered_bytes
        assert once - before == 2 * first.page_bytes  # on each device
        second = await owner.memory.register(memoryview(memory))
        assert owner.memory.registered_bytes == once
        ours, theirs = join(owner, consumer)
        assert await consumer.prepare(theirs) is PathReason.OK
        for lease, guard in ((1, first), (2, None)):
            part = second.parts[0]
            exposure = await owner.expose(ours, Span(part.view, part), LeaseId(lease))
            dest = bytearray(len(payload))
            await consumer.pull(theirs, exposure, LeaseId(lease), Target(memoryview(dest)))
            await owner.retract(ours, LeaseId(lease), transferred=True)
            assert dest == payload
            if guard is not None:
                await owner.memory.deregister(guard)
        await owner.memory.deregister(second)
        assert owner.memory.registered_bytes == before
        await consumer.close()
        await owner.close()

    asyncio.run(main())


# --- C43: buffers and the drain of their queue pair -----------------------------------------------


@contextlib.contextmanager
def delayed(device: str, delay: str) -> Iterator[None]:
    subprocess.run(
        ["tc", "qdisc", "add", "dev", device, "root", "netem", "delay", delay, "limit", "100000"],
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)


def test_cancelled_reads_and_a_closed_peer_leave_exact_free_lists(shared: Shared) -> None:
    """READs that are under way for 300 ms, cancelled after 100; the connection goes at once."""

    async def scenario(rig: Rig) -> None:
        kept = orbit.RegisterOptions(retain=True)
        payload = pattern(MIB, 43)
        handle = await rig.owner.register_data_pinned(payload, kept)
        await fetched_by_rdma(rig, handle, payload)  # the pools are there
        begin = free_lists(rig)
        for _ in range(CANCEL_ROUNDS):
            with delayed("a1", "300ms"):
                gets = [
                    asyncio.ensure_future(rig.consumer.get(handle, transport="rdma"))
                    for _ in range(CANCELLED_READS)
                ]
                await until(lambda: leases(rig.owner) == CANCELLED_READS)
                await asyncio.sleep(0.1)
                for get in gets:
                    get.cancel()
                session = await rig.consumer._open().session_to(handle.worker_id)
                session.abort(PeerLost("the owner", "closed by the test"))
                ends = await asyncio.gather(*gets, return_exceptions=True)
                assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
            await rig.settled()
            await until(lambda: not queue_pairs(rig))
            assert free_lists(rig) == begin
            await fetched_by_rdma(rig, handle, payload)
        await rig.owner.withdraw(handle)

    shared.run(scenario)


def queue_pairs(rig: Rig) -> int:
    nodes = (rig.owner, rig.consumer)
    return sum(found.queue_pairs for node in nodes if (found := node.statistics().rdma) is not None)


def free_lists(rig: Rig) -> list[tuple[int, ...]]:
    found = []
    for node in (rig.owner, rig.consumer):
        statistics = node.statistics()
        assert statistics.rdma is not None
        found.append(
            (
                statistics.memory.arena_bytes_used,
                statistics.memory.registered_bytes,
                statistics.rdma.grants_active,
                statistics.rdma.retained_bytes,
                statistics.leases_held,
                len(statistics.retained),
            )
        )
    return found


# --- C51: what registering does to the process ----------------------------------------------------


@contextlib.contextmanager
def sysctl(name: str, value: str) -> Iterator[None]:
    entry = Path("/proc/sys") / name
    before = entry.read_text()
    entry.write_text(value)
    try:
        yield
    finally:
        entry.write_text(before)


def test_registering_leaves_the_process_as_it_was(node_hosts: Hosts) -> None:
    """With and without fork protection, side by side."""
    plain, protected = node_hosts.owner, node_hosts.consumer
    for host in (plain, protected):
        host.kill()  # the new life has registered nothing yet
    with sysctl("vm/nr_hugepages", "16"), sysctl("vm/max_map_count", "4000"):
        for host, device in ((plain, "rxa1"), (protected, "rxb1")):
            host.tell(
                "register_much",
                device=device,
                count=REGISTRATIONS,
                fork_safe=host is protected,
            )
        for host in (plain, protected):
            found = host.heard()
            print(found)
            assert abs(found["mappings_grown"]) <= 50
            assert found["warnings"] == []
            assert found["huge"].keys() == {"whole", "half", "unaligned"}
            assert found["huge"]["whole"] == "registered"
            for text in found["huge"].values():
                # Fork protection marks pages, and a huge page cannot be cut for that.
                assert text == "registered" or "whole huge pages" in text
            assert found["crowded"] == "registered" or "max_map_count" in found["crowded"]
            assert found["left"] == 0
    for host in (plain, protected):
        host.kill()
