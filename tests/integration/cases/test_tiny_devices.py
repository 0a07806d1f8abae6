"""C36 with fake capabilities: a device that has very little works, or fails by the name of what it
has too little of; an InfiniBand port is addressed by its LID; queue pairs come and go by hundreds.

Path MTUs are tests/softroce's, routes and partitions tests/unit/verbs/test_addressing.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit.errors import BudgetExceeded, OrbitError, PathUnavailable
from orbit.verbs.device import DeviceContext
from orbit.verbs.offload import Offload
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider, ScriptedQueuePair
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import rail_of
from tests.integration.cases.fake_hosts import FakeHost, HostPair

Run = Callable[[Any], Any]
KINDS = {
    "max_qp_wr=16": {"max_qp_wr": 16},
    "max_cqe=15": {"max_cqe": 15},
    "max_sge=1": {"max_sge": 1},
    "max_qp_rd_atom=1": {"max_rd_atomic": 1},
    "max_qp_init_rd_atom=1": {"max_init_rd_atomic": 1},
    "max_inline=0": {},
    "everything": {"max_qp_wr": 16, "max_sge": 1, "max_rd_atomic": 1, "max_init_rd_atomic": 1},
}


def limit(host: FakeHost, name: str, kind: str) -> None:
    facts = host.devices[name].facts
    facts.limits = replace(facts.limits, **KINDS[kind])
    if kind in ("max_inline=0", "everything"):
        facts.inline_max = 0


@pytest.mark.parametrize("side", [0, 1, 2], ids=["source", "requester", "both"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "max_cqe=15"])
def test_a_device_that_has_little_works(
    run_async: Run, tmp_path: Path, kind: str, side: int
) -> None:
    def prepare(hosts: list[FakeHost]) -> None:
        for host in hosts if side == 2 else [hosts[side]]:
            limit(host, f"dev{host.number}", kind)

    async def main() -> None:
        async with HostPair.opened(tmp_path, prepare) as pair:
            await pair.move("read", "write", "read")

    run_async(main())


def test_two_short_completion_queues_hold_two_queue_pairs_and_no_third(
    run_async: Run, tmp_path: Path
) -> None:
    """READs work; then WRITEs, which have queue pairs of their own, name what is too short."""

    def prepare(hosts: list[FakeHost]) -> None:
        limit(hosts[1], "dev2", "max_cqe=15")

    async def main() -> None:
        async with HostPair.opened(tmp_path, prepare) as pair:
            await pair.move("read", "read")
            with pytest.raises(
                (BudgetExceeded, PathUnavailable), match="completion queues of dev2"
            ):
                await pair.move("write")
            await pair.move("read")

    run_async(main())


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_rd_atomic": 0}, "max_qp_rd_atom"),
        ({"max_init_rd_atomic": 0}, "max_qp_init_rd_atom"),
        ({"max_qp_wr": 3}, "max_qp_wr 3"),
        ({"max_cqe": 6}, "max_cqe 6"),
    ],
)
def test_too_little_is_a_reason_that_names_it(
    run_async: Run, tmp_path: Path, limits: dict[str, int], named: str
) -> None:
    def prepare(hosts: list[FakeHost]) -> None:
        facts = hosts[1].devices["dev2"].facts
        facts.limits = replace(facts.limits, **limits)

    async def main() -> None:
        async with HostPair.opened(tmp_path, prepare) as pair:
            with pytest.raises(PathUnavailable, match=named) as caught:
                await pair.move("read")
            assert caught.value.reason == "device_failed"

    run_async(main())


def test_one_that_has_too_little_costs_the_others_nothing(run_async: Run, tmp_path: Path) -> None:
    def prepare(hosts: list[FakeHost]) -> None:
        for host in hosts:
            host.add(f"more{host.number}")
        facts = hosts[1].devices["dev2"].facts
        facts.limits = replace(facts.limits, max_qp_wr=3)

    async def main() -> None:
        async with HostPair.opened(tmp_path, prepare) as pair:
            await pair.move("read", "write")
            rails = pair.engines[1].statistics().rails
            assert rails is not None
            assert [rail.device for rail in rails.rails] == ["more2"]

    run_async(main())


def test_infiniband_ports_are_addressed_by_their_lids(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ScriptedQueuePair] = []
    modify = ScriptedQueuePair.modify

    def noted(self: ScriptedQueuePair, attributes: Any) -> None:
        modify(self, attributes)
        if attributes.state == 3:  # RTS
            made.append(self)

    def prepare(hosts: list[FakeHost]) -> None:
        for host, lid in zip(hosts, (5, 6), strict=True):
            host.devices[f"dev{host.number}"].set_lid(lid)

    async def main() -> None:
        monkeypatch.setattr(ScriptedQueuePair, "modify", noted)
        async with HostPair.opened(tmp_path, prepare) as pair:
            made.clear()  # of the start probes, which connect a port to itself
            await pair.move("read", "write")
            lids = {pair.hosts[0].devices["dev1"]: 6, pair.hosts[1].devices["dev2"]: 5}
            assert {qp._device for qp in made} == set(lids)
            for qp in made:
                assert qp.attributes.dlid == lids[qp._device]
                assert not qp.attributes.is_global  # one subnet

    run_async(main())


def test_two_hundred_queue_pairs_come_and_go() -> None:
    async def main() -> None:
        fabric = ScriptedFabric()
        fake = fabric.add_device("fake")
        fake.facts.limits = replace(fake.facts.limits, max_qp_wr=16, max_cqe=64)
        offload = Offload()
        provider = ScriptedProvider(fabric)
        device = await DeviceContext.open(provider, rail_of(fake), RdmaPathConfig(), offload)
        device.create_queue_pair(_nothing)  # opens a lane
        kept = fake.counters().live_objects
        for _ in range(200):
            queue_pair = device.create_queue_pair(_nothing)
            await queue_pair.drain(OrbitError("over"))
            await device.destroy_queue_pair(queue_pair)
            assert fake.counters().live_objects == kept + (device.queue_pairs - 1) + _lanes(device)
        await _end(device)
        offload.close()
        assert fake.counters().live_objects == 0

    asyncio.run(main())


def _lanes(device: DeviceContext) -> int:
    """Objects of the lanes beside the first: a queue and its channel."""
    return 2 * (len(device.lanes) - 1)


def _nothing(cause: OrbitError) -> None:
    """It fails when the test ends it."""


async def _end(device: DeviceContext) -> None:
    for domain in device.domains:
        for queue_pair in list(domain.queue_pairs):
            await queue_pair.drain(OrbitError("over"))
            await device.destroy_queue_pair(queue_pair)
    await device.close()
