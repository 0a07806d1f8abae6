"""Blocking TCP connections as the socket loop uses them: whole messages, and no wait for ever."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ...errors import PeerUnreachable
from .asking import STALL_S

_WHOLE: Final = getattr(socket, "MSG_WAITALL", 0)  # one system call for one message


def connect(hosts: Sequence[str], port: int) -> socket.socket:
    """To the first host that answers. Raises PeerUnreachable."""
    problems = []
    for host in hosts:
        try:
            return set_up(socket.create_connection((host, port), STALL_S / len(hosts)))
        except OSError as error:
            problems.append(f"{host}: {error}")
    raise PeerUnreachable(f"port {port} of the server", "refused", "; ".join(problems))


def set_up(connection: socket.socket) -> socket.socket:
    """Blocking; a call that makes no progress for STALL_S raises BlockingIOError."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("@ll", int(STALL_S), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return connection


def receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill `target`; False when the peer ended before its first byte. Raises OSError."""
    got = 0
    while got < len(target):
        count = connection.recv_into(target[got:], 0, _WHOLE)
        if not count:
            if got:
                raise ConnectionResetError("the peer ended in the middle of a message")
            return False
        got += count
    return True


def end(connection: socket.socket) -> None:
    """A thread that blocks on it returns with an error."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
