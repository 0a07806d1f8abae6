"""What a scrape of a real endpoint becomes, and what it says when there is none."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from orbit.errors import (
    DeadlineExceeded,
    PeerProtocolError,
    PeerRefused,
    PeerUnreachable,
    UsageError,
)
from orbit.scraping import Snapshot, endpoint_url, quantile, scrape

TEXT = b"""# TYPE orbit_x counter
orbit_x_total{path="rdma",side="owner"} 1
orbit_x_total{path="rdma",side="consumer"} 2
orbit_x_total{path="tcp",side="owner"} 4
orbit_y 0.5
"""
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def text(body: bytes, status: int = 200) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_samples_by_their_labels() -> None:
    with answering(text(TEXT)) as endpoint:
        found = scrape(endpoint)
    assert found.value("orbit_x_total") == 7
    assert found.value("orbit_x_total", path="rdma") == 3
    assert found.value("orbit_x_total", path="rdma", side="owner") == 1
    assert found.by("path", "orbit_x_total") == {"rdma": 3, "tcp": 4}
    assert found.by("path", "orbit_x_total", side="owner") == {"rdma": 1, "tcp": 4}
    assert found.value("orbit_y") == 0.5
    assert found.value("orbit_z") == 0
    assert [dict(labels) for labels, _ in found.rows("orbit_y")] == [{}]


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and not listening
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(PeerUnreachable) as caught:
            scrape(endpoint)
    assert (caught.value.endpoint, caught.value.kind) == (endpoint, "refused")
    assert "--metrics" in caught.value.hint


def test_a_refusal_has_the_servers_words() -> None:
    with (
        answering(text(b"the node is closed\n", 503)) as endpoint,
        pytest.raises(PeerRefused, match=r"503.*the node is closed"),
    ):
        scrape(endpoint)


@pytest.mark.parametrize("body", [b"<html><p class=x>", b"orbit_x not_a_number", b"\xff\xfe"])
def test_what_is_no_metrics(body: bytes) -> None:
    with answering(text(body)) as endpoint, pytest.raises(PeerProtocolError):
        scrape(endpoint)


def test_more_than_is_wanted() -> None:
    with answering(text(TEXT)) as endpoint, pytest.raises(PeerProtocolError, match="more than 99"):
        scrape(endpoint, bytes_max=99)


def test_an_answer_that_breaks_off() -> None:
    def cut(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"orbit_y 1\norb")

    with answering(cut) as endpoint, pytest.raises(PeerProtocolError):
        scrape(endpoint)


def test_silence_and_dripping_have_a_deadline() -> None:
    over = threading.Event()

    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                handler.wfile.write(b"#\n")

    def silence(_: http.server.BaseHTTPRequestHandler) -> None:
        over.wait(10)

    for answer in (drip, silence):
        with answering(answer) as endpoint:
            with pytest.raises(DeadlineExceeded):
                scrape(endpoint, timeout_s=0.1)
            over.set()
        over.clear()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("h:1", "http://h:1/metrics"),
        (":1", "http://127.0.0.1:1/metrics"),
        ("[::1]:9", "http://[::1]:9/metrics"),
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("https://h/other?x=1", "https://h/other?x=1"),
    ],
)
def test_endpoints(given: str, url: str) -> None:
    assert endpoint_url(given) == url


@pytest.mark.parametrize(
    "given", ["", "a b:1", "file:///etc/passwd", "h:x", "http://u:p@h:1", "h:99999"]
)
def test_no_endpoints(given: str) -> None:
    with pytest.raises(UsageError, match="no metrics endpoint"):
        endpoint_url(given)


def test_quantiles_lie_on_a_line_within_their_bucket() -> None:
    inf = float("inf")
    buckets = [(inf, 10.0), (1.0, 0.0), (2.0, 8.0), (4.0, 9.0)]
    assert quantile(buckets, 0.4) == 1.5
    assert quantile(buckets, 0.85) == 3.0
    assert quantile(buckets, 0.99) == 4.0  # above every bound: the last one
    assert quantile([(1.0, 0.0), (inf, 0.0)], 0.5) is None
    assert quantile([], 0.5) is None


def test_a_snapshot_is_a_value() -> None:
    assert Snapshot({}, 1.0) == Snapshot({}, 1.0)
