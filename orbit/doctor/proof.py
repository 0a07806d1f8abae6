"""A real transfer between two nodes of this process, step by step, and a device's own counters as
the proof of where its bytes went.

It judges nothing: what failed, and at which step, is in what it raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace

from ..config import MIB, NodeConfig, RdmaPoolConfig
from ..errors import DeadlineExceeded, OrbitError, PathFailed, PathUnavailable
from ..model import Handle, Lease, PathName, PathReason, Transport
from ..node import Node
from .advice import reason_of
from .host import Host

PAYLOAD_BYTES = 4096
STEP_S = 20.0  # for hangs: each part below it has a shorter deadline of its own
OPEN_S = 60.0  # the first one loads the verbs library; thousands of GID rows take their time
_RECEIPT_S = 5.0
_POLL_S = 0.01
_SETTLE_S = 0.05  # devices read some counters into sysfs only so often

# What says most about one grant comes first. The first is of rdma_rxe alone.
RXE_COUNTER = "hw_counters/sent_pkts"
_COUNTERS = (RXE_COUNTER, "hw_counters/rx_read_requests", "counters/port_xmit_data")


@dataclass(slots=True)
class Steps:
    """The step at hand, and how many seconds each took."""

    current: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def step(self, name: str, timeout_s: float = STEP_S) -> AsyncIterator[None]:
        """Raises DeadlineExceeded; `current` stays at the step that failed."""
        self.current = name
        started = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s) as bound:
                yield
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise DeadlineExceeded(f"the step {name!r}", timeout_s) from error
        self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def __str__(self) -> str:
        return ", ".join(f"{name} {s * 1e3:.1f} ms" for name, s in self.seconds.items())


@dataclass(frozen=True, slots=True)
class Counter:
    """One of a port's own counters. `value` as of when it was read."""

    name: str
    value: int

    @classmethod
    def of(cls, host: Host, device: str, port: int) -> Counter | None:
        """The one that says most, or None where this namespace shows none."""
        folder = host.sysfs / "class/infiniband" / device / "ports" / str(port)
        for name in _COUNTERS:
            text = host.read(folder / name)
            if text.isdigit():
                return cls(name, int(text))
        return None


async def moved(before: Counter | None, host: Host, device: str, port: int) -> int | None:
    """How far the counter went since; None where there is none."""
    for pause_s in (0.0, _SETTLE_S):
        await asyncio.sleep(pause_s)
        after = Counter.of(host, device, port)
        if before is None or after is None or after.name != before.name:
            return None
        if after.value > before.value:
            return after.value - before.value
    return 0


def payload() -> bytes:
    """Bytes that no fresh memory holds by chance."""
    return bytes((index * 151 + (index >> 8) + 7) & 0xFF for index in range(PAYLOAD_BYTES))


def trial_config(config: NodeConfig, transport: Transport, device: str = "") -> NodeConfig:
    """A node of the trial: loopback, little memory, every payload by the path that was asked for,
    messages over TCP.
    """
    rdma = replace(
        config.rdma,
        enabled=transport is not Transport.TCP,
        device=device or config.rdma.device,
        pool=RdmaPoolConfig(initial_arena_bytes=MIB, max_arena_bytes=MIB),
    )
    return replace(
        config,
        listen="127.0.0.1:0",
        advertise=(),
        worker_id=None,
        server_tls=None,
        client_tls=None,
        transport=transport,
        rdma=rdma,
        rendezvous=replace(config.rendezvous, rdma_min_bytes=0, inline_max_bytes=0),
        messaging=replace(config.messaging, transports=("tcp",)),
    )


async def transfer(config: NodeConfig, steps: Steps) -> Lease:
    """`payload` from one node to another, compared, and everything given back. Raises OrbitError,
    OSError; nothing is left open.
    """
    owner, consumer = Node(config), Node(config)
    try:
        async with steps.step("open", OPEN_S):
            await owner.open()
            await consumer.open()
        lease = await _moved(owner, consumer, Transport(config.transport), steps)
    except BaseException:
        failed = steps.current
        with contextlib.suppress(OrbitError, OSError):  # the first failure is the one to tell
            await _close(steps, consumer, owner)
        steps.current = failed
        raise
    await _close(steps, consumer, owner)
    return lease


async def _moved(owner: Node, consumer: Node, transport: Transport, steps: Steps) -> Lease:
    by_rdma = transport is Transport.RDMA
    async with steps.step("register"):
        handle = await (owner.register_data_pinned if by_rdma else owner.register_data)(payload())
        if by_rdma and not (await owner.metadata(handle)).pinned:
            reason = PathReason.NOT_PINNED
            raise PathUnavailable(PathName.RDMA, reason, "the payload could not be registered")
    async with steps.step("connect"):
        consumer.add_peer(owner.address)
        await consumer.metadata(handle)
    started = time.perf_counter()
    try:
        async with steps.step("transfer"):
            data, lease = await consumer.get(handle, transport=transport, timeout=STEP_S / 2)
    except (OrbitError, OSError) as error:
        steps.current = _reached(error, owner, consumer) if by_rdma else "read"
        raise
    _split(steps, lease, owner, time.perf_counter() - started)
    steps.current = "read"
    if bytes(data) != payload():
        raise PathFailed(lease.path, PathReason.GET_FAILED, "other bytes arrived")
    async with steps.step("receipt", _RECEIPT_S):
        await _given_back(owner, consumer, handle, lease)
    return lease


def _split(steps: Steps, lease: Lease, owner: Node, total_s: float) -> None:
    """The parts of the transfer in place of the whole."""
    steps.seconds.pop("transfer", None)
    phases = lease.phases
    steps.add("connect", phases.get("reach", 0.0) + phases.get("prepare", 0.0))
    rdma = owner.statistics().rdma
    if rdma is not None:
        steps.add("bind", rdma.bind_s)
    steps.add("acquire", phases.get("acquire", 0.0))
    steps.add("read", phases.get("pull", total_s))


def _reached(error: BaseException, owner: Node, consumer: Node) -> str:
    """The step at which a transfer by RDMA failed, by what both sides have counted."""
    if reason_of(error) is PathReason.CONNECT_FAILED:
        return "connect"
    source, requester = _counts(owner), _counts(consumer)
    if not (source.get("connects") and requester.get("connects")):
        return "connect"
    if not source.get("binds"):
        return "acquire"
    if not source.get("binds_completed"):
        return "bind"
    return "read" if requester.get("read_bytes", 0) < PAYLOAD_BYTES else "receipt"


def _counts(node: Node) -> Mapping[str, int]:
    rdma = node.statistics().rdma
    return {} if rdma is None else rdma.counts


async def _given_back(owner: Node, consumer: Node, handle: Handle, lease: Lease) -> None:
    """The lease, and by RDMA the device's own word that the grant is over."""
    await consumer.detach(handle, lease)
    while (rdma := owner.statistics().rdma) is not None:
        if rdma.grants_active == 0 and rdma.counts["receipts"] > 0:
            return
        await asyncio.sleep(_POLL_S)


async def _close(steps: Steps, *nodes: Node) -> None:
    async with steps.step("close"):
        for node in nodes:
            await node.close()
