"""Reads a metrics endpoint once: fetches its text under a deadline and parses it into a Snapshot.

It knows HTTP and the text format of Prometheus, and nothing of what any series means.
"""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    raise ImportError("orbit.scraping needs prometheus_client: install orbit[metrics]") from error

from .errors import DeadlineExceeded, PeerProtocolError, PeerRefused, PeerUnreachable, UsageError

TIMEOUT_S: Final = 7.0  # an endpoint waits 5 s for its node before it answers 503
BYTES_MAX: Final = 16 << 20  # of one answer; a node has some tens of KiB
_CHUNK_BYTES = 1 << 16
_DETAIL_MAX = 200

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One scrape: `samples` by series, each with its labels; taken at `at` (`time.monotonic`)."""

    samples: Mapping[str, tuple[tuple[Labels, float], ...]]
    at: float

    def rows(self, series: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Each sample of `series` whose labels include these."""
        for have, value in self.samples.get(series, ()):
            if labels.items() <= have.items():
                yield have, value

    def value(self, series: str, **labels: str) -> float:
        """The sum over these samples; 0 where there is none."""
        return sum(value for _, value in self.rows(series, **labels))

    def by(self, label: str, series: str, **labels: str) -> dict[str, float]:
        """The sums by the values of one label, in the order of the scrape."""
        sums: dict[str, float] = {}
        for have, value in self.rows(series, **labels):
            name = have.get(label, "")
            sums[name] = sums.get(name, 0.0) + value
        return sums


def endpoint_url(text: str) -> str:
    """The URL behind `http://host:port/path`, `host:port` or `:port`. Raises UsageError."""
    url = text if "://" in text else f"http://{text}"
    if any(character <= " " for character in url):
        raise _no_url(text)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _no_url(text) from error
    if parts.scheme not in ("http", "https") or parts.username is not None:
        raise _no_url(text)
    if not host and port is None:
        raise _no_url(text)
    if not host:
        parts = parts._replace(netloc=f"127.0.0.1:{port}")
    return parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()


def scrape(endpoint: str, *, timeout_s: float = TIMEOUT_S, bytes_max: int = BYTES_MAX) -> Snapshot:
    """Fetch and parse. Blocks: `timeout_s` for the answer to begin, and as long for it to end.
    Proxies of the environment are not used.

    Raises UsageError (no URL), PeerUnreachable (nobody listens there), PeerRefused (an HTTP status
    that is not 200), DeadlineExceeded, and PeerProtocolError (no metrics, or too many).
    """
    url = endpoint_url(endpoint)
    text = _fetch(url, timeout_s, bytes_max)
    return Snapshot(_parsed(url, text), time.monotonic())


def _fetch(url: str, timeout_s: float, bytes_max: int) -> str:
    deadline = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return b"".join(_pieces(url, answer, deadline, timeout_s, bytes_max)).decode()
    except urllib.error.HTTPError as error:
        with error:
            detail = error.read(_DETAIL_MAX).decode(errors="replace").strip()
        raise PeerRefused(f"HTTP {error.code}", f"{url}: {detail or error.reason}") from error
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(f"a scrape of {url}", timeout_s) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise DeadlineExceeded(f"a scrape of {url}", timeout_s) from error
        raise _unreachable(url, error.reason) from error
    except UnicodeDecodeError as error:
        raise PeerProtocolError(f"{url}: the answer is not text") from error
    except (OSError, http.client.HTTPException) as error:
        detail = str(error) or type(error).__name__
        raise PeerProtocolError(f"{url}: the answer broke off: {detail}") from error


def _pieces(
    url: str, answer: http.client.HTTPResponse, deadline: float, timeout_s: float, bytes_max: int
) -> Iterator[bytes]:
    total = 0
    while piece := answer.read1(_CHUNK_BYTES):
        total += len(piece)
        if total > bytes_max:
            raise PeerProtocolError(f"{url}: more than {bytes_max} bytes of metrics")
        yield piece
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"a scrape of {url}", timeout_s)


def _parsed(url: str, text: str) -> Mapping[str, tuple[tuple[Labels, float], ...]]:
    found: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise PeerProtocolError(f"{url}: the answer is not in Prometheus' text format") from error
    return {name: tuple(samples) for name, samples in found.items()}


def quantile(buckets: Iterable[tuple[float, float]], part: float) -> float | None:
    """What `part` (0 to 1) of all observations do not exceed, by cumulative counts at upper bounds,
    the last one infinite; within a bucket on a straight line. None: no observation. The last finite
    bound where they are above it.
    """
    counts = sorted(buckets)
    total = counts[-1][1] if counts else 0.0
    if total <= 0:
        return None
    wanted, below, lower = part * total, 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / max(count - below, 1e-12)
        below, lower = count, bound
    return lower


def _unreachable(url: str, reason: object) -> PeerUnreachable:
    parts = urlsplit(url)
    refused = isinstance(reason, ConnectionRefusedError)
    unknown = "address" if isinstance(reason, socket.gaierror) else "cannot be reached"
    kind = "refused" if refused else unknown
    detail = "" if refused else str(getattr(reason, "strerror", None) or reason)
    hint = "start the node with a metrics endpoint: orbit serve --metrics HOST:PORT"
    return PeerUnreachable(parts.netloc, kind, detail, hint=hint if refused else "")


def _no_url(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no metrics endpoint", hint="write host:port or http://host:port/metrics"
    )
