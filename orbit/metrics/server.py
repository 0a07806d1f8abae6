"""Serves one node's series over HTTP, from threads of its own.

Every scrape is answered: with the series, or with 503 and one line when the node is closed or its
event loop does not answer within COLLECT_TIMEOUT_S.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import socketserver
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from ..errors import ConfigError, OrbitError
from .exporter import EngineReporting, Exporter, Reporting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger("orbit.metrics")
_SILENCE_S = 10.0  # a client that connects and asks for nothing is let go of
_HINTS = {
    errno.EADDRINUSE: "another process listens there; choose another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "listen on an address of this host",
    errno.EACCES: "ports below 1024 need privileges",
}


class MetricsServer:
    """Serves one node's series over HTTP until `close`. Also a context manager."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, name="orbit metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        """What to give to Prometheus, or to `orbit top`."""
        return f"http://{_text(str(self._server.server_name), self.port)}/metrics"

    def close(self) -> None:
        """Takes half a second at most, whatever a scrape is waiting for. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_http_server(
    node: Reporting,
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    engine: EngineReporting | None = None,
) -> MetricsServer:
    """Serve the series of this node and of the engine on it, and those of the process (memory,
    descriptors, start), at http://host:port/metrics, from a thread. Port 0: a free one. It listens
    on loopback unless told otherwise: the series name peers' behaviour, and whoever reaches the
    port may read them. Raises ConfigError when it cannot listen there.
    """
    registry = CollectorRegistry()
    Exporter(node, engine=engine).register(registry)
    ProcessCollector(registry=registry)
    server = _listening(host, port)
    server.set_app(_answering(make_wsgi_app(registry)))
    here = ipaddress.ip_address(str(server.server_address[0]).partition("%")[0])
    if not here.is_loopback:
        _log.warning(
            "metrics are served on %s, to everybody who reaches it",
            _text(str(here), server.server_port),
        )
    return MetricsServer(server)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a scrape that waits keeps no process alive

    def server_bind(self) -> None:
        # HTTPServer's own would ask DNS for the name of the host, which nobody needs here.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape from %s was not finished", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, *_: object) -> None:
        """Scrapes are no news."""


def _answering(inner: WSGIApplication) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return inner(environ, start_response)
        except OrbitError as error:
            # Before anything was sent: the series are collected first.
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"{error}\n".encode()]

    return answer


def _listening(host: str, port: int) -> _Server:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]

        class Server(_Server):
            address_family = family

        return Server((str(address[0]), port), _Handler)
    except (OSError, OverflowError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        problem = getattr(error, "strerror", None) or str(error)
        hint = _HINTS.get(number or 0, "")
        raise ConfigError("metrics", _text(host, port), problem, hint=hint) from error


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
