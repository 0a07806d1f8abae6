"""One blocking node used by many threads at once: nobody holds the interpreter while they wait, and
the counts add up.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import orbit
import orbit.sync
from orbit.testing.leftovers import open_descriptors
from orbit.testing.pattern import pattern
from tests.integration.messages.settled import SOAK, TCP

THREADS = 8
CALLS = 10_000 if SOAK else 1000  # of all threads
TICK_S = 0.001
TICKS = 10_000 if SOAK else 100
JOIN_S = 60.0


class Ticks:
    """A thread that should run every millisecond."""

    def __init__(self) -> None:
        self.enough = threading.Event()
        self.gap_s_max = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticks")

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        count, last = 0, time.monotonic()
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            self.gap_s_max = max(self.gap_s_max, now - last)
            last = now
            count += 1
            if count == TICKS:
                self.enough.set()


@contextmanager
def two_nodes() -> Iterator[tuple[orbit.sync.Node, orbit.sync.Node]]:
    before = open_descriptors()
    with orbit.sync.Node(TCP) as server, orbit.sync.Node(TCP) as client:
        client.add_peer(server.address)
        yield server, client
    assert not open_descriptors() - before
    assert not [t.name for t in threading.enumerate() if t.name == "orbit node"]


def test_other_threads_run_while_calls_wait() -> None:
    """Each of these calls waits until the ticks were counted: it could not end otherwise."""
    with two_nodes() as (server, client):
        with Ticks() as ticks:

            def wait(message: orbit.Message) -> bytes:
                assert ticks.enough.wait(JOIN_S)
                return b"enough"

            server.handler("wait", wait)
            answers: list[bytes] = []
            peer = server.identity
            callers = [
                threading.Thread(target=lambda: answers.append(bytes(client.unary(peer, "wait"))))
                for _ in range(THREADS)
            ]
            callers.append(threading.Thread(target=lambda: client.sync(peer, "wait")))
            sending = client.send(peer, "wait")
            callers.append(threading.Thread(target=lambda: sending.result(JOIN_S)))
            with server.open_stream(int) as inbox:
                reader = threading.Thread(target=lambda: list(inbox))  # of what never comes
                callers.append(reader)
                for thread in callers:
                    thread.start()
                assert ticks.enough.wait(JOIN_S)
                sender = client.attach_stream(inbox.handle)
                sender.finalize()
                for thread in callers:
                    thread.join(JOIN_S)
            assert answers == [b"enough"] * THREADS
        if SOAK:
            assert ticks.gap_s_max < 0.05


class Crowd:
    """What many threads do to two nodes at once, and the counts of both ends."""

    KINDS = ("echo", "echo", "back", "count", "sync", "raise", "get", "health")

    def __init__(self, server: orbit.sync.Node, client: orbit.sync.Node) -> None:
        self.client = client
        self.peer = server.identity
        self.payload = pattern(100_000)
        self.handle = server.register_data(self.payload, orbit.RegisterOptions(retain=True))
        self.done: Counter[str] = Counter()
        self.handled: Counter[str] = Counter()  # by handlers, in threads of their own
        self.complaints: list[orbit.OrbitError] = []
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        for name in ("echo", "back", "count", "raise"):
            server.handler(name, self.handle_it)
        client.handler("leaf", self.handle_it)

    def handle_it(self, message: orbit.Message) -> memoryview | None:
        with self._lock:
            self.handled[message.name] += 1
        match message.name:
            case "back":
                answer: memoryview = message.node.unary(message.sender, "leaf", message.payload)
                return answer
            case "raise":
                raise ValueError("on purpose")
        return message.payload

    def work(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(CALLS // THREADS):
                kind = rng.choice(self.KINDS)
                self.do(kind, pattern(rng.choice((0, 10, 4096, 70_000)), rng.randrange(1000)))
                with self._lock:
                    self.done[kind] += 1
        except BaseException as error:
            self.errors.append(error)

    def do(self, kind: str, data: bytes) -> None:
        client, peer = self.client, self.peer
        match kind:
            case "echo" | "back":
                assert client.unary(peer, kind, data) == data
            case "count":
                client.send(peer, "count", wait=True).result(JOIN_S)
            case "sync":
                client.sync(peer, "count")
            case "raise":
                with pytest.raises(orbit.RequestFailed):
                    client.sync(peer, "raise", on_error=self.complaints.append)
            case "get":
                found, lease = client.get(self.handle)
                assert found == self.payload
                client.detach(self.handle, lease)
            case "health":
                assert client.check_health(peer).reachable

    def expected(self) -> Counter[str]:
        done = self.done
        return Counter(
            {
                "echo": done["echo"],
                "back": done["back"],
                "leaf": done["back"],
                "count": done["count"] + done["sync"],
                "raise": done["raise"],
            }
        )


def test_eight_threads_share_one_node() -> None:
    """Calls, sends, health checks and handles at once; handlers that raise are reported to their
    callers, and nothing stops.
    """
    with two_nodes() as (server, client):
        crowd = Crowd(server, client)
        threads = [threading.Thread(target=crowd.work, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600 if SOAK else JOIN_S)
        assert not crowd.errors, crowd.errors
        assert crowd.done.total() == CALLS // THREADS * THREADS
        client.sync(server.identity, "count")  # behind all plain sends, but not their handlers
        crowd.done["sync"] += 1
        deadline = time.monotonic() + JOIN_S
        while crowd.handled != crowd.expected() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert crowd.handled == crowd.expected()
        assert len(crowd.complaints) == crowd.done["raise"]
        messaging = client.statistics().messaging
        assert (messaging.pending_calls, messaging.queued_frames) == (0, 0)
        assert client.statistics().sessions == 1
        server.withdraw(crowd.handle)


def test_a_callback_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def bad_sink(event: object) -> None:
        heard.append(os.getpid())
        raise ValueError("a sink's mistake")

    with orbit.sync.Node(TCP, on_event=bad_sink) as server, orbit.sync.Node(TCP) as client:
        peer = client.add_peer(server.address)
        server.handler("echo", lambda message: message.payload)
        for _ in range(20):
            assert client.unary(peer, "echo", b"x") == b"x"
    assert heard
    assert "the event sink failed" in caplog.text
