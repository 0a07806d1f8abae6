"""The synchronous twin: the names of the asynchronous node, from any thread."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import orbit
import orbit.sync
from orbit.runtime.messaging.draining import ShutdownPolicy
from orbit.runtime.messaging.handlers import Dispatch, Message
from orbit.runtime.messaging.results import SendResult
from orbit.runtime.messaging.stream_objects import StreamInbox, StreamSender
from orbit.testing.pattern import pattern

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
        if not isinstance(theirs, property):
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
