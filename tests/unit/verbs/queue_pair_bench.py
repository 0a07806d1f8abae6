"""Two connected bulk queue pairs on a scripted device, for tests of queue pairs and lanes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from orbit.errors import OrbitError
from orbit.verbs import records
from orbit.verbs.device import DeviceContext
from orbit.verbs.offload import Offload
from orbit.verbs.queue_pair import BulkQueuePair, Posting, QueuePairState, RemoteEnd
from orbit.verbs.records import Completion
from orbit.verbs.registration import RegisteredBlock
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import rail_of

CONFIG = RdmaPathConfig(send_depth=8, recv_depth=8, drain_timeout_s=0.1, connect_timeout_s=0.2)
CAUSE = OrbitError("the test ended it")


@dataclass(eq=False)
class Bench:
    """A requester queue pair connected to a source, a block that it reads into, and one to read."""

    fake: ScriptedDevice
    device: DeviceContext
    source: BulkQueuePair
    requester: BulkQueuePair
    block: RegisteredBlock
    causes: list[OrbitError]
    completions: list[Completion]

    def read(self) -> Posting:
        """A zero-length READ: it needs no key."""
        return Posting(
            "read", lambda i: records.pack_read(i, 0, 0, 0, 0, 0), self.completions.append
        )

    def send(self) -> Posting:
        return Posting("send", lambda i: records.pack_send(i, 0, 0, 0), self.completions.append)

    def receive(self) -> Posting:
        block = self.block
        return Posting(
            "receive",
            lambda i: records.pack_recv(i, block.address, 16, block.lkey),
            self.completions.append,
        )


async def connect(bench_qp: BulkQueuePair, other: BulkQueuePair, device: DeviceContext) -> None:
    rail = device.rail
    remote = RemoteEnd(rail.gid, 0, other.qp_num, 7, rail.mtu, 1)
    await bench_qp.connect(device.local_end(7, remote_read=True), remote, CONFIG.connect_timeout_s)


@contextlib.asynccontextmanager
async def open_bench(
    *, rxe: bool = False, connected: bool = True, config: RdmaPathConfig = CONFIG
) -> AsyncIterator[Bench]:
    fabric = ScriptedFabric(rxe=rxe)
    fake = fabric.add_device("fake")
    offload = Offload()
    device = await DeviceContext.open(ScriptedProvider(fabric), rail_of(fake), config, offload)
    causes: list[OrbitError] = []
    source = device.create_queue_pair(lambda cause: None)
    requester = device.create_queue_pair(causes.append)
    block = await RegisteredBlock.open(device.domain, 4096, records.ACCESS_LOCAL_WRITE)
    bench = Bench(fake, device, source, requester, block, causes, [])
    if connected:
        await connect(source, requester, device)
        await connect(requester, source, device)
    yield bench
    fake.clear_rules()
    fake.release()
    for qp in (bench.requester, bench.source):
        if qp.state is not QueuePairState.CLOSED:
            await qp.drain(CAUSE)
            await device.destroy_queue_pair(qp)
    await block.close()
    await device.close()
    offload.close()
    assert fake.counters().live_objects == 0
    assert not fake.counters().misuse
