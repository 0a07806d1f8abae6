"""What travels by pickle and what does not: handles, addresses and leases are plain data; what
stands for something of this process says so, and what to send instead.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import orbit
import orbit.sync
from orbit.errors import UnknownHandle
from orbit.testing.leftovers import open_descriptors
from orbit.testing.pattern import pattern

TCP = orbit.NodeConfig(transport="tcp")
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
HANDLE = orbit.Handle.parse("00000000000000ff-1c")
REGION = orbit.RemoteRegion(HANDLE, 8, orbit.RegionAccess.READ)
PLAIN: list[object] = [
    HANDLE,
    orbit.Lease(HANDLE, 3, orbit.PathName.RDMA, orbit.PathReason.OK, 8, {"read": 0.5}),
    orbit.Metadata(8, 1, True),
    orbit.Put(HANDLE, 255, orbit.PathName.TCP, orbit.PathReason.NOT_PINNED, 0, 8, {"total": 1.0}),
    orbit.PeerIdentity(1, 2),
    orbit.RegisterOptions(retain=True, ttl=2.0),
    orbit.NodeConfig(secret="s", rdma=orbit.RdmaConfig(pool=orbit.RdmaPoolConfig())),
    orbit.RdmaConfig(device="mlx5_0"),
    orbit.RdmaPoolConfig(arena_reclaim_after=3.0),
    orbit.RendezvousConfig(),
    orbit.MessagingConfig(),
    orbit.TimeoutConfig(),
    orbit.ShutdownPolicy.timeout(3),
    orbit.OrderedConfig(),
    orbit.Health(orbit.HealthKind.OK),
    orbit.StreamHandle(1, 2),
    orbit.available(),
    orbit.EngineConfig(num_lanes=3),
    REGION,
    REGION[2:6],
    orbit.EnginePeer(orbit.PeerIdentity(1, 2), "direct"),
    orbit.EngineStatistics(1, 2, {"max_grants": (0, 64)}, {}, {"succeeded": 3}),
    orbit.RequestExplanation("read", "tcp", 8, "running", {}, (), ("why",), 1, 0),
    orbit.TransferResult(
        "read", 8, orbit.PathName.TCP, orbit.TransferState.SUCCEEDED, None, True, {"move": 0.5}
    ),
    *orbit.TransferState,
    *orbit.RegionAccess,
    *orbit.PathName,
    *orbit.PathReason,
    *orbit.Transport,
    *orbit.Direction,
    *orbit.Deregistered,
    *orbit.HealthKind,
    *orbit.SendState,
    *orbit.Overflow,
]
# Public classes of which there is an object above, or below, or that only the tests here make.
LIVE = {
    *("Node", "Message", "SendResult", "StreamInbox", "StreamSender"),
    *("RegionGuard", "RegionSlice", "RegionWatch", "PinnedPayload", "PinnedWriter"),
}
LIVE_OF_ENGINES = {
    *("TransferEngine", "Batch", "EngineRegion", "RegionRange", "TransferRequest", "RangeRequest"),
}
MADE_BELOW = {"NodeStatistics", "Dispatch"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}-{value}"[:40])
def test_plain_data_travels(value: object, protocol: int) -> None:
    descriptors = open_descriptors()
    again = pickle.loads(pickle.dumps(value, protocol))
    assert again == value
    assert type(again) is type(value)
    assert copy.copy(value) == copy.deepcopy(value) == value
    assert open_descriptors() == descriptors


def test_every_public_class_has_its_place() -> None:
    classes = {
        name
        for name in orbit.__all__
        if inspect.isclass(value := getattr(orbit, name)) and not issubclass(value, Exception)
    }
    plain = {type(value).__name__ for value in PLAIN}
    assert classes - plain == LIVE | LIVE_OF_ENGINES | MADE_BELOW


@pytest.fixture
def pair() -> Iterator[tuple[orbit.sync.Node, orbit.sync.Node]]:
    with orbit.sync.Node(TCP) as owner, orbit.sync.Node(TCP) as consumer:
        consumer.add_peer(owner.address)
        yield owner, consumer


def refused(value: object) -> set[str]:
    """What every way to copy it answers."""
    ways: list[Callable[[], object]] = [lambda: copy.copy(value), lambda: copy.deepcopy(value)]
    ways += [lambda p=p: pickle.dumps({"within": [value]}, p) for p in PROTOCOLS]  # type: ignore[misc]
    ways.append(lambda: pickle.dumps(functools.partial(print, value)))
    said = set()
    for way in ways:
        with pytest.raises(TypeError) as error:
            way()
        said.add(str(error.value))
    return said


def test_live_objects_say_so(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    owner, consumer = pair
    seen: list[object] = []
    owner.handler("keep", seen.append)
    consumer.sync(owner.identity, "keep")
    with (
        owner.register_owned(bytearray(64)) as guard,
        owner.open_stream() as stream,
        consumer.attach_stream(stream.handle) as producer,
    ):
        result = consumer.send(owner.identity, "keep")
        twins = [owner, guard, guard.watch(), stream, producer, result]
        live = [*(twin._inner for twin in twins), guard.slice(), *seen]
        for value in (*live, *twins):
            (said,) = refused(value)
            assert said.startswith(f"a {type(value).__name__} cannot be pickled or copied: ")
    names = {type(value).__name__ for value in live}
    assert names == LIVE - {"PinnedPayload", "PinnedWriter"}  # they need registered memory
    for kind in (orbit.PinnedPayload, orbit.PinnedWriter):
        assert kind.__name__ in refused(kind.__new__(kind)).pop()


def test_live_objects_of_an_engine_say_so() -> None:
    with orbit.sync.TransferEngine(orbit.EngineConfig(node=TCP)) as engine:
        region = engine.register(bytearray(8))
        request = orbit.TransferRequest("read", region, REGION, "tcp")
        ranges = orbit.RangeRequest("read", region, REGION, [0], [0], [8], "tcp")
        batch = engine.submit([])
        assert batch.result() == []
        live = [engine._inner, batch._inner, region._inner, region[2:4], request, ranges]
        for value in (*live, engine, batch, region):
            (said,) = refused(value)
            assert said.startswith(f"a {type(value).__name__} cannot be pickled or copied: ")
        assert {type(value).__name__ for value in live} == LIVE_OF_ENGINES


def test_statistics_travel_without_what_they_report_of(
    pair: tuple[orbit.sync.Node, orbit.sync.Node],
) -> None:
    from orbit.runtime.retained import proven, retain

    entry = retain(orbit.Unquiesced("a test", 3, "none"), pair[0])
    try:
        found = pair[0].statistics()
        again = pickle.loads(pickle.dumps(found))
    finally:
        proven(entry)
    assert again.slots == found.slots
    (kept,) = (e for e in again.retained if e.what == "a test")
    assert (kept.nbytes, kept.cause, kept.holder) == (3, "none", None)


ERRORS: list[orbit.OrbitError] = [
    orbit.ConfigError("knob", 3, "is odd", hint="take 4"),
    UnknownHandle(str(HANDLE)),
    orbit.BudgetExceeded("registered memory", 1, 2, 3, "rdma.pool.registered_bytes_budget"),
    orbit.DeadlineExceeded("a get", 2.5),
    orbit.PathUnavailable(orbit.PathName.RDMA, orbit.PathReason.NO_DEVICE, "none", hint="look"),
    orbit.Unquiesced("memory", 4096, "no flush"),
    orbit.DeviceError("mlx5_0", "reg_mr", 12),
    orbit.RegisterOwnedError(orbit.ClosedError("the node"), b"mine"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_travel_with_their_fields(error: orbit.OrbitError) -> None:
    for protocol in PROTOCOLS:
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert (str(again), again.hint, again.code) == (str(error), error.hint, error.code)
        fields = {name: str(value) for name, value in vars(error).items()}
        assert {name: str(value) for name, value in vars(again).items()} == fields


def test_nothing_secret_is_shown(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    from orbit.protocol.binding import GrantRecord
    from orbit.protocol.descriptor import Descriptor

    key = 0x5EC12E7A
    descriptor = Descriptor(1, 4096, 8, key)
    ids = [bytes([n]) * 16 for n in range(5)]
    record = GrantRecord(*ids, 0, 0, 7, 8, 1, 4096, 8, key)
    for text in (repr(descriptor), repr(record), repr(orbit.NodeConfig(secret="5EC12E7A"))):
        assert str(key) not in text
        assert f"{key:x}" not in text.lower()
    with pair[0].register_owned(bytearray(64)) as guard:
        assert hex(guard.effective_range.start)[2:] not in repr(guard) + repr(guard.watch())


def _fetch(address: bytes, handles: Any, digests: Any) -> None:
    async def main() -> tuple[int, str]:
        handle = handles.get(timeout=60)
        async with orbit.Node(TCP) as node:
            node.add_peer(address)
            data, lease = await node.get(handle)
            await node.detach(handle, lease)
            return len(data), str(data == pattern(len(data)))

    digests.put(asyncio.run(main()))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_handle_opens_the_payload_in_another_process(method: str) -> None:
    context = multiprocessing.get_context(method)
    with orbit.sync.Node(TCP) as owner:
        handle = owner.register_data(pattern(1 << 20), orbit.RegisterOptions(retain=True))
        handles, digests = context.Queue(), context.Queue()
        child = context.Process(target=_fetch, args=(bytes(owner.address), handles, digests))
        child.start()
        handles.put(handle)
        assert digests.get(timeout=60) == (1 << 20, "True")
        child.join(60)
        assert child.exitcode == 0
        for queue in (handles, digests):
            queue.close()
            queue.join_thread()


ROUNDS = 10_000 if os.environ.get("ORBIT_SOAK") else 500


def test_a_handle_whose_owner_is_gone_is_a_typed_error() -> None:
    with orbit.sync.Node(TCP) as consumer:
        with orbit.sync.Node(TCP) as owner:
            address = bytes(owner.address)
            handle = owner.register_data(b"x")
        consumer.add_peer(address)
        for _ in range(ROUNDS):
            handle = pickle.loads(pickle.dumps(handle))
        with pytest.raises(orbit.PeerError):
            consumer.get(handle, timeout=5)
    with orbit.sync.Node(TCP) as owner:
        stranger = orbit.Handle(owner.identity.worker_id, handle.slot_id)
        with pytest.raises(orbit.UnknownHandle):
            owner.get(stranger)
