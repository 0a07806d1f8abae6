"""The synchronous twin: the names of the asynchronous node, from any thread."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import orbit
import orbit.sync
from orbit.model import Address
from orbit.runtime.messaging.draining import ShutdownPolicy
from orbit.runtime.messaging.handlers import Dispatch, Message
from orbit.runtime.messaging.results import SendResult
from orbit.runtime.messaging.stream_objects import StreamInbox, StreamSender
from orbit.runtime.sinks import PinnedPayload, PinnedWriter
from orbit.sync import _twin_for
from orbit.testing.pattern import pattern
from orbit.transport.interface import PinnedBuffer

TCP = orbit.NodeConfig(transport="tcp")
CALLS = 200


@pytest.fixture
def pair() -> Iterator[tuple[orbit.sync.Node, orbit.sync.Node]]:
    with orbit.sync.Node(TCP) as server, orbit.sync.Node(TCP) as client:
        client.add_peer(server.address)
        yield server, client
    assert not [t.name for t in threading.enumerate() if t.name == "orbit node"]


@pytest.mark.parametrize(
    ("twin", "source"),
    [
        (orbit.sync.Node, orbit.Node),
        (orbit.sync.PinnedPayload, orbit.PinnedPayload),
        (orbit.sync.PinnedWriter, orbit.PinnedWriter),
        (orbit.sync.RegionGuard, orbit.RegionGuard),
        (orbit.sync.RegionWatch, orbit.RegionWatch),
        (orbit.sync.SendResult, SendResult),
        (orbit.sync.StreamInbox, StreamInbox),
        (orbit.sync.StreamSender, StreamSender),
    ],
)
def test_the_twin_has_the_same_names_and_signatures(twin: type, source: type) -> None:
    names = {name for name in dir(source) if not name.startswith("_")}
    own = {name for name in dir(twin) if not name.startswith("_")}
    assert names <= own
    assert own - names <= {"result"}
    for name in names:
        theirs = inspect.getattr_static(source, name)
        ours = inspect.getattr_static(twin, name)
        assert ours.__doc__ == theirs.__doc__, name
        if not inspect.isdatadescriptor(theirs):
            assert inspect.signature(ours) == inspect.signature(theirs), name
            assert not inspect.iscoroutinefunction(ours), name


def test_handles_and_calls(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    server, client = pair
    payload = pattern(300_000)
    handle = server.register_data(payload)
    data, lease = client.get(handle)
    assert data == payload
    client.release(handle, lease)

    server.handler("back", lambda message: bytes(message.payload)[::-1])
    server.typed_handler("add", lambda value, message: value + 1)
    assert client.unary(server.identity, "back", b"abc") == b"cba"
    assert client.typed_unary(server.identity, "add", 41) == 42
    assert client.sync(server.identity, "back") is None
    assert client.list_handlers(server.identity) == ["add", "back"]
    assert client.check_health(server.identity).reachable
    with pytest.raises(orbit.RequestFailed) as failed:
        client.unary(server.identity, "nobody")
    assert failed.value.reason == "unknown_handler"
    with pytest.raises(orbit.UsageError):
        client.unary(server.identity, "_mine")


def test_regions_serve_and_end(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    owner, consumer = pair
    payload = bytearray(pattern(100_000))
    with owner.register_owned(payload) as guard:
        assert isinstance(guard, orbit.sync.RegionGuard)
        assert (guard.nbytes, guard.registered) == (100_000, False)
        assert len(guard.effective_range) >= 100_000
        watch = guard.watch()
        assert isinstance(watch, orbit.sync.RegionWatch)
        handle = owner.register_data_in_region(guard, range(10, 90_000))
        data, lease = consumer.get(handle)
        assert data == payload[10:90_000]
        with pytest.raises(orbit.OutOfRange):
            owner.register_data_in_region(guard, range(100_001))
        consumer.release(handle, lease)
        assert watch.live
    assert watch.deregistered() is orbit.Deregistered.DRAINED
    assert not watch.live
    with pytest.raises(orbit.ClosedError):
        owner.register_data_in_region(guard)
    guard = owner.register_owned(payload)
    assert guard.unregister_owned() == (orbit.Deregistered.DRAINED, payload)
    payload.append(1)  # nothing holds it


def test_a_dropped_guard_ends_in_the_background(
    pair: tuple[orbit.sync.Node, orbit.sync.Node],
) -> None:
    owner, _ = pair
    guards = [owner.register_owned(bytearray(5000))]
    watch = guards[0].watch()
    registered_here = rf"registered at {re.escape(__file__)}:\d+, was dropped.*unregister"
    with pytest.warns(ResourceWarning, match=registered_here):
        guards.clear()
    assert watch.deregistered() is orbit.Deregistered.DRAINED


def test_lists_and_slices_of_regions(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    owner, consumer = pair
    payload = pattern(60_000)
    with owner.register_owned(bytearray(payload)) as source:
        handle = owner.register_data([source.slice(0, 20_000), payload[20_000:50_000]])
        into = bytearray(50_000)
        with consumer.register_owned(into) as target:
            lease = consumer.get_into(handle, [target.slice(0, 7), target.slice(7)])
            assert into == payload[:50_000]
            consumer.release(handle, lease)


def test_puts(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    owner, consumer = pair
    payload = pattern(200_000)
    room = bytearray(300_000)
    handle = owner.register_destination(room)
    put = consumer.put(handle, [payload[:5], payload[5:]], offset=100)
    assert (put.nbytes, put.offset, put.path) == (200_000, 100, orbit.PathName.TCP)
    seen = owner.wait_put(handle, timeout=10)
    assert (seen.handle, seen.peer, seen.nbytes) == (handle, consumer.identity.worker_id, 200_000)
    assert room[100:200_100] == payload
    with pytest.raises(orbit.WrongDirection):
        consumer.get(handle)
    with pytest.raises(orbit.OutOfRange):
        consumer.put(handle, payload, offset=100_001)
    with pytest.raises(orbit.DeadlineExceeded):
        owner.wait_put(handle, timeout=0.01)
    owner.withdraw(handle)


def test_many_at_once(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    owner, consumer = pair
    payloads = [pattern(1000 * n + 70_000, seed=n) for n in range(12)]
    handles = [owner.register_data(payload) for payload in payloads]
    found = consumer.get_many(handles, concurrency=5)
    assert [bytes(data) for data, _ in found] == payloads
    into = [bytearray(len(payload)) for payload in payloads]
    again = consumer.get_many(handles, into=into)
    assert into == payloads
    for handle, (_, first), (nothing, second) in zip(handles, found, again, strict=True):
        assert nothing is None
        consumer.detach(handle, first)
        consumer.release(handle, second)
    assert owner.statistics().slots.slots == 0


def test_registered_memory_is_missing_here(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    owner, consumer = pair
    with pytest.raises(orbit.PathUnavailable):
        owner.alloc_pinned_writer(4096)
    handle = owner.register_data(b"x")
    with pytest.raises(orbit.PathUnavailable):
        consumer.get_pinned(handle)
    assert owner.statistics().slots.leases_held == 0


def test_pieces_of_registered_memory_are_freed_in_the_nodes_thread() -> None:
    node = orbit.sync.Node(TCP)
    node.open()
    assert node._thread is not None
    freed: list[str] = []

    class Memory:
        def free(self, buffer: PinnedBuffer) -> None:
            freed.append(threading.current_thread().name)

    def piece(kind: type) -> object:
        buffer = PinnedBuffer(memoryview(bytearray(8)), Address(0), None, None)
        return _twin_for(kind(Memory(), buffer), node._thread)

    payload, writer, last = piece(PinnedPayload), piece(PinnedWriter), piece(PinnedWriter)
    assert isinstance(payload, orbit.sync.PinnedPayload)
    assert isinstance(writer, orbit.sync.PinnedWriter)
    assert isinstance(last, orbit.sync.PinnedWriter)
    with payload:
        assert payload.nbytes == 8
    with pytest.raises(orbit.ClosedError):
        _ = payload.view
    with writer:
        writer.view[:] = b"12345678"
    assert freed == ["orbit node", "orbit node"]
    node.close()
    last.free()  # there is no such thread any more
    last.free()
    assert freed[2:] == [threading.current_thread().name]


def test_sends_have_results(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    server, client = pair
    seen: list[int] = []
    done = threading.Event()

    @server.handler("count", mode=Dispatch.ordered())
    def count(message: Message) -> None:
        seen.append(int.from_bytes(message.payload, "big"))
        if len(seen) == CALLS:
            done.set()

    results = [client.send(server.identity, "count", n.to_bytes(4, "big")) for n in range(CALLS)]
    assert all(isinstance(result, orbit.sync.SendResult) for result in results)
    for result in results:
        assert result.result(10) is None
        assert result.admitted() is None
        assert result.done
    assert done.wait(10)
    assert seen == list(range(CALLS))


def test_many_threads_call_at_once(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    server, client = pair
    server.handler("echo", lambda message: bytes(message.payload))
    wrong: list[object] = []

    def work(base: int) -> None:
        for n in range(25):
            payload = pattern(100 + n, seed=base + n)
            answer = client.unary(server.identity, "echo", payload)
            if answer != payload:
                wrong.append((base, n))

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_a_plain_handler_may_call_the_node_that_it_serves(
    pair: tuple[orbit.sync.Node, orbit.sync.Node],
) -> None:
    server, client = pair
    threads: set[int] = set()

    @client.handler("leaf")
    def leaf(message: Message) -> bytes:
        threads.add(threading.get_ident())
        return b"leaf " + bytes(message.payload)

    @server.handler("relay")
    def relay(message: Message) -> bytes:
        assert message.node is server
        return bytes(message.node.unary(message.sender, "leaf", message.payload))

    @server.handler("own")
    async def own(message: Message) -> bytes:
        assert isinstance(message.node, orbit.Node)
        answer = await message.node.unary(message.sender, "leaf", message.payload)
        return bytes(answer)

    assert client.unary(server.identity, "relay", b"1") == b"leaf 1"
    assert client.unary(server.identity, "own", b"2") == b"leaf 2"
    assert threading.get_ident() not in threads


def test_streams_block_too(pair: tuple[orbit.sync.Node, orbit.sync.Node]) -> None:
    server, client = pair
    items: list[int] = []
    with server.open_stream(int, capacity=8) as inbox:
        handle = inbox.handle

        def produce() -> None:
            with client.attach_stream(handle) as sender:
                for n in range(100):
                    sender.send(n)

        producer = threading.Thread(target=produce)
        producer.start()
        items.extend(inbox)
        producer.join(10)
    assert items == list(range(100))


def test_a_closed_node_says_so() -> None:
    node = orbit.sync.Node(TCP)
    with pytest.raises(orbit.ClosedError):
        _ = node.address
    with pytest.raises(orbit.ClosedError):
        node.get(orbit.Handle.parse("0000000000000001-1"))
    node.handler("early", lambda message: b"early")
    node.open()
    assert node.unary(node.identity, "early") == b"early"
    closers = [threading.Thread(target=node.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(10)
    node.close()
    with pytest.raises(orbit.ClosedError):
        node.unary(1, "early")
    assert node.statistics().sessions == 0


def test_the_nodes_own_thread_is_told_that_it_would_wait_for_itself(
    pair: tuple[orbit.sync.Node, orbit.sync.Node],
) -> None:
    server, client = pair
    refused: list[orbit.OrbitError] = []

    @server.handler("blocks")
    async def blocks(message: Message) -> None:
        for call in (server.close, server.statistics, lambda: server.unary(message.sender, "x")):
            try:
                call()
            except orbit.UsageError as error:
                refused.append(error)

    client.sync(server.identity, "blocks")
    assert len(refused) == 3
    client.sync(server.identity, "blocks")  # it is as open as before


def test_a_node_that_cannot_open_leaves_no_thread() -> None:
    with orbit.sync.Node(TCP) as node:
        port = node.address.endpoints[0].port
        taken = orbit.sync.Node(orbit.NodeConfig(transport="tcp", listen=f"127.0.0.1:{port}"))
        with pytest.raises(orbit.ConfigError):
            taken.open()
    assert not [t.name for t in threading.enumerate() if t.name == "orbit node"]


def test_a_graceful_shutdown_waits_for_a_handler(
    pair: tuple[orbit.sync.Node, orbit.sync.Node],
) -> None:
    server, client = pair
    began, go_on = threading.Event(), threading.Event()

    @server.handler("slow")
    def slow(message: Message) -> bytes:
        began.set()
        assert go_on.wait(10)
        return b"done"

    answers: list[object] = []
    calling = threading.Thread(
        target=lambda: answers.append(bytes(client.unary(server.identity, "slow")))
    )
    calling.start()
    assert began.wait(10)
    ending = threading.Thread(target=lambda: server.graceful_shutdown(ShutdownPolicy.timeout(30)))
    ending.start()
    go_on.set()
    ending.join(20)
    calling.join(10)
    assert answers == [b"done"]


def test_an_interrupt_ends_a_blocking_call() -> None:
    with orbit.sync.Node(TCP) as node:
        began = threading.Event()

        @node.handler("never")
        async def never(message: Message) -> None:
            import asyncio

            began.set()
            await asyncio.sleep(600)

        def interrupt() -> None:
            assert began.wait(10)
            os.kill(os.getpid(), signal.SIGINT)

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            node.unary(node.identity, "never")
        interrupter.join()
        assert node.check_health(node.identity).reachable


def test_a_forgotten_node_does_not_keep_the_process() -> None:
    program = (
        "import orbit, orbit.sync\n"
        "node = orbit.sync.Node(orbit.NodeConfig(transport='tcp'))\n"
        "node.open()\n"
        "node.handler('f', lambda message: b'x')\n"
        "assert node.unary(node.identity, 'f') == b'x'\n"
        "print('done')\n"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert time.monotonic() - begin < 50
