"""`orbit get`: fetch what a ticket names into a file, whole and verified or not at all.

Order: take the space on disk, fetch into memory, give the lease back, verify the digest, write,
rename.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from ..config import NodeConfig
from ..errors import BudgetExceeded
from ..model import Lease
from ..node import Node
from ..protocol.ticket import Ticket
from . import output
from .failures import IntegrityError
from .landing import Landing, destination
from .options import json_option, secret_file_option, transport_option
from .running import run

_HASH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Fetched:
    """A finished fetch. `seconds` runs from the first byte asked for to the last one in memory."""

    final: Path
    lease: Lease
    seconds: float
    sha256: str


@click.command()
@click.argument("ticket")
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="File to write, or a directory for the ticket's own file name.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@transport_option()
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for the whole fetch. Default: only silence ends it.",
)
@secret_file_option
@json_option
def get(
    ticket: str,
    target: Path,
    force: bool,
    transport: str,
    timeout: float | None,
    secret_file: Path | None,
    as_json: bool,
) -> None:
    """Fetch what TICKET names (or the ticket on standard input, when TICKET is -)."""
    wanted = Ticket.parse(sys.stdin.readline() if ticket == "-" else ticket)
    config = NodeConfig(transport=transport, secret_file=secret_file)
    final = destination(target, wanted.name)
    with Landing(final, wanted.size, replace=force) as landing:
        fetched = run(_fetch(wanted, landing, config, timeout, show=not as_json))
    _report(fetched, as_json)


async def _fetch(
    ticket: Ticket, landing: Landing, config: NodeConfig, timeout: float | None, *, show: bool
) -> Fetched:
    memory = _memory(ticket.size)
    with output.progress_bar(landing.final.name, ticket.size, wanted=show) as progress:
        async with Node(config) as node:
            node.add_peer(ticket.address)
            held = await node.metadata(ticket.handle)
            if held.total_bytes != ticket.size:
                raise IntegrityError(
                    f"the ticket names {ticket.size} bytes, the peer holds {held.total_bytes}",
                    hint="ask for a fresh ticket",
                )
            started = time.perf_counter()
            lease = await node.get_into(
                ticket.handle,
                memory,
                transport=config.transport,
                timeout=timeout,
                progress=progress,
            )
            seconds = time.perf_counter() - started
            # The lock only: the payload stays for whoever else has the ticket.
            await node.detach(ticket.handle, lease)
    digest = await _digest(memory)
    if digest != ticket.sha256:
        raise IntegrityError(
            f"sha256 is {digest}, the ticket says {ticket.sha256}",
            hint="the file changed while it was served, or the ticket is not for it",
        )
    await landing.write(memory)
    landing.commit()
    return Fetched(landing.final, lease, seconds, digest)


def _memory(nbytes: int) -> memoryview:
    """Untouched pages, so that a large payload costs nothing before it arrives."""
    if nbytes == 0:
        return memoryview(bytearray())
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError, ValueError) as error:
        raise BudgetExceeded("memory of this process", nbytes, 0, 0, "its limits") from error


async def _digest(payload: memoryview) -> str:
    digest = hashlib.sha256()
    for offset in range(0, len(payload), _HASH_BYTES):
        digest.update(payload[offset : offset + _HASH_BYTES])
        await asyncio.sleep(0)  # a place for a signal to be noticed
    return digest.hexdigest()


def _report(fetched: Fetched, as_json: bool) -> None:
    lease = fetched.lease
    rate = output.rate_gb_s(lease.nbytes, fetched.seconds)
    if as_json:
        output.print_json(
            {
                "output": str(fetched.final),
                "path": lease.path,
                "reason": lease.reason,
                "bytes": lease.nbytes,
                "seconds": round(fetched.seconds, 6),
                "gb_per_s": round(rate, 4),
                "sha256": fetched.sha256,
                "phases": {name: round(s, 6) for name, s in lease.phases.items()},
            }
        )
        return
    print(
        f"{fetched.final}: {output.human_bytes(lease.nbytes)} by {lease.path} ({lease.reason}) "
        f"in {fetched.seconds:.3f} s, {rate:.3f} GB/s"
    )
    print(f"sha256 {fetched.sha256} as the ticket says")
