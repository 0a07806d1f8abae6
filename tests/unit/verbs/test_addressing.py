"""How a queue pair learns where the other one is: RoCE and InfiniBand, service level, traffic
class and partition, as the device saw it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import DeviceError, OrbitError
from orbit.model import PathReason
from orbit.protocol.messages import RailHint
from orbit.verbs.device import DeviceContext
from orbit.verbs.offload import Offload
from orbit.verbs.probe import prove
from orbit.verbs.queue_pair import BulkQueuePair, LocalEnd, RemoteEnd, connect_steps
from orbit.verbs.records import STATE_RTR, QueuePairAttributes
from orbit.verbs.scripted import ScriptedProvider, ScriptedQueuePair
from orbit.verbs.scripted_fabric import ScriptedDevice, ScriptedFabric
from orbit.verbs.settings import RdmaPathConfig

CONFIG = RdmaPathConfig(send_depth=8, recv_depth=8, service_level=5, traffic_class=0xB8)
SUBNET_A, SUBNET_B = "fec0:0:0:a::", "fec0:0:0:b::"


def route_of(local: LocalEnd, remote: RemoteEnd) -> QueuePairAttributes:
    (rtr,) = [step for step in connect_steps(local, remote, CONFIG) if step.state == STATE_RTR]
    return QueuePairAttributes.unpack(rtr.pack())


@pytest.mark.parametrize(
    ("local", "remote", "is_global"),
    [
        (SUBNET_A + "1", SUBNET_A + "2", False),
        (SUBNET_A + "1", SUBNET_B + "2", True),
        ("", SUBNET_A + "2", True),  # its own subnet is not known
        (SUBNET_A + "1", "::", False),  # nothing but a LID
    ],
)
def test_infiniband_needs_a_global_route_to_another_subnet_only(
    local: str, remote: str, is_global: bool
) -> None:
    mine = LocalEnd(1, 0, 0, 7, remote_read=True, gid=local, service_level=3, traffic_class=4)
    theirs = RemoteEnd(remote, 12, 17, 8, 4096, 1, "infiniband")
    route = route_of(mine, theirs)
    assert (route.is_global, route.dlid, route.service_level) == (is_global, 12, 3)
    assert route.traffic_class == 4


def test_roce_has_no_lid_and_always_a_global_route() -> None:
    mine = LocalEnd(1, 3, 0, 7, remote_read=True, gid="fe80::1", traffic_class=0xB8)
    route = route_of(mine, RemoteEnd("fe80::2", 12, 17, 8, 1024, 1))
    assert (route.is_global, route.dlid, route.dgid) == (True, 0, "fe80::2")
    assert (route.sgid_index, route.traffic_class) == (3, 0xB8)


def test_attributes_survive_packing() -> None:
    given = QueuePairAttributes(
        STATE_RTR, 1, 2, 3, 4096, 5, 6, 7, 8, 9, 10, 11, 6, 5, False, 12, 13, 14, 15, 16, "fe80::9"
    )
    assert QueuePairAttributes.unpack(given.pack()) == given


class Pair:
    """Two devices of one fabric, and a queue pair on each, connected to each other."""

    def __init__(self, a: ScriptedDevice, b: ScriptedDevice, config: RdmaPathConfig) -> None:
        self.fakes = (a, b)
        self._config = config
        self._offload = Offload()
        self.devices: list[DeviceContext] = []

    async def open(self, **changes: object) -> None:
        for fake in self.fakes:
            hint = replace(RailHint(fake.name, 1, fake.gids[0], 0, 4096), **changes)  # type: ignore[arg-type]
            provider = ScriptedProvider(fake.fabric, [fake.name])
            device = await DeviceContext.open(provider, hint, self._config, self._offload)
            self.devices.append(device)

    async def connect(self) -> list[QueuePairAttributes]:
        """What each device was told."""
        made: list[BulkQueuePair] = [d.create_queue_pair(lambda _: None) for d in self.devices]
        try:
            for i in (0, 1):
                far, rail = made[1 - i], self.devices[1 - i].rail
                remote = RemoteEnd(rail.gid, rail.lid, far.qp_num, 1, 4096, 1, rail.link_layer)
                await made[i].connect(self.devices[i].local_end(1, remote_read=True), remote, 5.0)
            natives = [queue_pair._native for queue_pair in made]
            assert all(isinstance(native, ScriptedQueuePair) for native in natives)
            return [native.attributes for native in natives]  # type: ignore[attr-defined]
        finally:
            for device, queue_pair in zip(self.devices, made, strict=True):
                await queue_pair.drain(OrbitError("seen"))
                await device.destroy_queue_pair(queue_pair)

    async def close(self) -> None:
        for device in self.devices:
            await device.close()
        self._offload.close()
        for fake in self.fakes:
            assert fake.counters().live_objects == 0


def pair_of(gid_a: str, gid_b: str, *, lids: tuple[int, int] = (0, 0)) -> Pair:
    fabric = ScriptedFabric()
    a, b = fabric.add_device("a", gid_a), fabric.add_device("b", gid_b)
    for fake, lid in zip((a, b), lids, strict=True):
        fake.set_lid(lid)
    return Pair(a, b, CONFIG)


@pytest.mark.parametrize("far", [SUBNET_A + "2", SUBNET_B + "2"])
def test_two_infiniband_ports_reach_each_other(far: str) -> None:
    async def scenario() -> None:
        pair = pair_of(SUBNET_A + "1", far, lids=(11, 12))
        await pair.open()
        assert [device.rail.lid for device in pair.devices] == [11, 12]
        assert {device.rail.link_layer for device in pair.devices} == {"infiniband"}
        mine, theirs = await pair.connect()
        assert (mine.dlid, theirs.dlid) == (12, 11)
        assert mine.is_global == theirs.is_global == far.startswith(SUBNET_B)
        assert mine.service_level == 5
        # Two queue pairs of one port carry bytes: its own probe.
        found = [await prove(device) for device in pair.devices]
        assert found == [(PathReason.OK, "")] * 2
        await pair.close()

    asyncio.run(scenario())


def test_roce_carries_its_traffic_class() -> None:
    async def scenario() -> None:
        pair = pair_of("::ffff:10.0.0.1", "::ffff:10.0.0.2")
        await pair.open()
        for seen in await pair.connect():
            assert (seen.traffic_class, seen.dlid, seen.is_global) == (0xB8, 0, True)
        await pair.close()

    asyncio.run(scenario())


def test_a_partition_is_found_by_its_key_whenever_a_connection_is_made() -> None:
    async def scenario() -> None:
        pair = pair_of("::ffff:10.0.0.1", "::ffff:10.0.0.2")
        for fake in pair.fakes:
            fake.set_pkeys(0xFFFF, 0x8001)
        await pair.open(pkey=0x0001)
        assert [seen.pkey_index for seen in await pair.connect()] == [1, 1]
        pair.fakes[0].set_pkeys(0xFFFF, 0, 0x8007, 0x8001)  # the subnet was reconfigured
        assert [seen.pkey_index for seen in await pair.connect()] == [3, 1]
        pair.fakes[0].set_pkeys(0xFFFF)
        with pytest.raises(DeviceError, match="lost its partition key 0x0001"):
            await pair.connect()
        await pair.close()

    asyncio.run(scenario())
