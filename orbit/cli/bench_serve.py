"""The serving end of `orbit bench run`: what it says when it is there, and until when it serves."""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import stat
import sys

from ..bench.ends import NodeSettings
from ..bench.server import BenchServer
from ..model import Transport
from ..protocol.address import NodeAddress
from . import output
from .exporting import exporting

_LOOK_EVERY_S = 1.0


async def serve_clients(settings: NodeSettings, metrics: str | None, *, as_json: bool) -> None:
    """Until cancelled; with `as_json` also until nobody can read the line that it printed."""
    async with (
        BenchServer(settings) as server,
        exporting(metrics, server.end.node, server.end.engine) as url,
    ):
        line = client_line(server.address, settings)
        if not as_json:
            _tell(server.address, settings, url)
            print(line, flush=True)
            await server.serve_forever()
        endpoints = [str(endpoint) for endpoint in server.address.endpoints]
        record = {"address": str(server.address), "endpoints": endpoints, "client": line}
        output.print_json(record if url is None else {**record, "metrics": url})
        await _unread()


def client_line(address: NodeAddress, settings: NodeSettings) -> str:
    """To be pasted; the secret's file may have another name there."""
    words = ["orbit", "bench", "run", str(address.endpoints[0])]
    if settings.transport is not Transport.AUTO:
        words += ["--transport", str(settings.transport)]
    if settings.secret_file is not None:
        words += ["--secret-file", str(settings.secret_file)]
    return shlex.join(words)


def _tell(address: NodeAddress, settings: NodeSettings, metrics: str | None) -> None:
    if metrics is not None:
        output.note(f"metrics at {metrics}")
    if all(endpoint.is_loopback for endpoint in address.endpoints):
        output.note("for clients on this host; --listen 0.0.0.0:PORT lets others in")
    elif settings.secret_file is None:
        output.note("whoever can connect here may use it; --secret-file admits only those you know")
    output.note("measure with this line; Ctrl-C stops")


async def _unread() -> None:
    """Until the other end of standard output is gone, where that is a pipe: then whoever started
    this end has died without ending it.
    """
    number = sys.stdout.fileno()
    kind = os.fstat(number).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        await asyncio.Event().wait()
    poll = select.poll()
    poll.register(number, 0)  # what is left are errors and the end
    while not poll.poll(0):  # noqa: ASYNC110  (nothing tells of it but asking)
        await asyncio.sleep(_LOOK_EVERY_S)
