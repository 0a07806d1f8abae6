"""From host and port to a connected wire: every resolved address in turn, within one deadline.

Says which of the ways to fail it was: refused, nothing answered, not resolvable, or a shortage of
this host. It sends no byte of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence

from ..errors import PeerUnreachable
from .tcp_wire import Endpoint, format_endpoint, tune

_LOCAL_ERRNOS = frozenset(
    (
        errno.EADDRNOTAVAIL,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENETUNREACH,
        errno.EAFNOSUPPORT,
        errno.EACCES,
        errno.EPERM,
    )
)
_LOCAL_HINTS = {
    errno.EADDRNOTAVAIL: "all outgoing ports are taken (see `ss -s`): widen"
    " net.ipv4.ip_local_port_range; or this address family is off",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise fs.file-max",
    errno.ENETUNREACH: "there is no route to that network",
}
# The kinds from what says least to what says most about the peer: a refusal proves that a host is
# there.
_KIND_ORDER = ("address", "local", "timeout", "refused")

_SockAddr = tuple[int, object]  # address family, and what connect takes


async def connect(
    endpoints: Sequence[Endpoint], timeout_s: float
) -> tuple[socket.socket, Endpoint]:
    """A connected, tuned, non-blocking socket that the caller owns, and the endpoint it leads to.
    Every address gets its share of what is left of `timeout_s`, so that one black hole does not eat
    the chance of the next.

    Raises PeerUnreachable with the kind that says most.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    name = ", ".join(format_endpoint(e) for e in endpoints) or "(no endpoint)"
    failures: list[tuple[str, str, str]] = []  # kind, detail, hint
    addresses: list[tuple[Endpoint, _SockAddr]] = []
    for endpoint in endpoints:
        try:
            async with asyncio.timeout_at(deadline):
                addresses += [(endpoint, found) for found in await _resolve(endpoint)]
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            failures.append(("address", f"{endpoint[0]}: {_text(error)}", ""))
    for index, (endpoint, address) in enumerate(addresses):
        share = (deadline - loop.time()) / (len(addresses) - index)
        try:
            async with asyncio.timeout(max(share, 0)):
                return await _connect_one(loop, address), endpoint
        except TimeoutError:
            failures.append(("timeout", f"{timeout_s:g} s", ""))
        except OSError as error:
            failures.append(_classify(error))
    if not failures:
        failures.append(("address", "no address", ""))
    kind, detail, hint = max(failures, key=lambda failure: _KIND_ORDER.index(failure[0]))
    raise PeerUnreachable(name, kind, detail, hint=hint)


async def _resolve(endpoint: Endpoint) -> list[_SockAddr]:
    host, port = endpoint
    if not 0 < port < 65536:
        raise OSError(errno.EINVAL, f"port {port} cannot be dialed")
    try:  # most endpoints are numbers, and need no resolver thread
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in found))


async def _connect_one(loop: asyncio.AbstractEventLoop, address: _SockAddr) -> socket.socket:
    family, sockaddr = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune(sock)
        code = sock.connect_ex(sockaddr)  # type: ignore[arg-type]
        if code == errno.EINPROGRESS:
            await _writable(loop, sock)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if sock.getsockname() == sock.getpeername():
            # A dial to a free port of the ephemeral range can meet itself in the middle.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
    except BaseException:
        sock.close()
        raise
    return sock


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _classify(error: OSError) -> tuple[str, str, str]:
    code = error.errno or 0
    if code in _LOCAL_ERRNOS:
        return "local", _text(error), _LOCAL_HINTS.get(code, "")
    if code in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refused", "", "is the peer running, and is this its port?"
    return "timeout", _text(error), ""  # EHOSTUNREACH, ETIMEDOUT: nobody answered


def _text(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "the resolver did not answer"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:120]
