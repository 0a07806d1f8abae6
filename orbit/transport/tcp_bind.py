"""Listening sockets for one host and port: every address of the host, IPv4 and IPv6, on one port.

A fixed port that is taken is an error; nothing is ever moved to another one. Only what the kernel
reports after the bind is published.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from ..errors import ConfigError
from .tcp_wire import Endpoint, endpoint_of, format_endpoint

# With port 0 the first address chooses; the others may find that port taken, and all start over.
_PORT_TRIES = 16
_WILDCARDS = ("", "*", "::")

_Address = tuple[int, Sequence[object]]


def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Bound, listening, non-blocking sockets that the caller owns. "" and "::" mean every address
    of both families.

    Raises ConfigError("listen", ...) naming host and port.
    """
    addresses = _resolve(host, port)
    tries = _PORT_TRIES if port == 0 and len(addresses) > 1 else 1
    while True:
        tries -= 1
        try:
            return _bind_all(addresses, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or tries <= 0:
                raise _refused(host, port, error) from error


def _resolve(host: str, port: int) -> list[_Address]:
    if host in _WILDCARDS and socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, ("::", port))]
    try:
        found = socket.getaddrinfo(
            host if host not in _WILDCARDS else "0.0.0.0",
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError("listen", format_endpoint((host, port)), f"{error}") from error
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))


def _bind_all(addresses: Sequence[_Address], backlog: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, wanted in addresses:
            port = endpoint_of(sockets[0].getsockname())[1] if sockets else wanted[1]
            try:
                sockets.append(_bind_one(family, (wanted[0], port, *wanted[2:]), backlog))
            except OSError as error:
                # "localhost" may name ::1 on a host without IPv6: the other address will do.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if not sockets:
            raise missing or OSError(errno.EADDRNOTAVAIL, "no address")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bind_one(family: int, sockaddr: Sequence[object], backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # For a quick restart while old connections are in TIME_WAIT. Never SO_REUSEPORT: that
        # shares.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            both = sockaddr[0] == "::"
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        sock.bind(tuple(sockaddr))
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    endpoint: Endpoint = (host, port)
    hints = {
        errno.EADDRINUSE: "another process listens there; choose another port, or 0 for a free one",
        errno.EADDRNOTAVAIL: "listen on an address of this host, or on 0.0.0.0 or ::",
        errno.EACCES: "ports below 1024 need privileges",
    }
    problem = error.strerror or str(error)
    return ConfigError(
        "listen", format_endpoint(endpoint), problem, hint=hints.get(error.errno or 0, "")
    )
