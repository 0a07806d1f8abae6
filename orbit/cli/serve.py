"""`orbit serve`: offer files by ticket until a signal stops it.

Tickets go to stdout, everything for people to stderr, so that both can be used.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ..config import NodeConfig, RdmaConfig, RdmaPoolConfig
from ..model import Handle, PathReason, Transport
from ..node import Node, RegisterOptions
from ..protocol.ticket import Ticket
from . import output
from .exporting import exporting
from .failures import Stopped
from .options import json_option, metrics_option, parse_size, secret_file_option, transport_option
from .payload import Payload, file_size, load, ticket_name
from .running import run

# A served file stays for everybody who has the ticket; consumers cannot use up its references.
_RETAINED = RegisterOptions(retain=True)
_ARENA_ALIGNMENT = 4096
_ARENA_BYTES_MIN = 64 << 20
_DEVICES_MAX = 64  # the budget counts a piece once on each


@dataclass(frozen=True, slots=True)
class Offer:
    """One served file, and where its bytes are: pinned, mapped or in memory."""

    ticket: Ticket
    memory: str


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."
)
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 takes a free one.",
)
@click.option(
    "--advertise",
    multiple=True,
    metavar="HOST[:PORT]",
    help="What tickets name instead, for example after --listen 0.0.0.0:7000.",
)
@transport_option()
@click.option(
    "--pinned-bytes",
    type=parse_size,
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Most memory to register for RDMA; larger files are served by TCP.",
)
@secret_file_option
@metrics_option
@json_option
def serve(
    files: tuple[Path, ...],
    listen: str,
    advertise: tuple[str, ...],
    transport: str,
    pinned_bytes: int,
    secret_file: Path | None,
    metrics: str | None,
    as_json: bool,
) -> None:
    """Offer FILEs and print a ticket for each, until stopped (Ctrl-C or SIGTERM)."""
    pinned = _pinned_set([file_size(path) for path in files], transport, pinned_bytes)
    arena_bytes = sum(_aligned(file_size(files[index])) for index in pinned)
    config = NodeConfig(
        listen=listen,
        advertise=advertise,
        secret_file=secret_file,
        transport=transport,
        rdma=RdmaConfig(pool=pool_for(arena_bytes)),
    )
    try:
        run(_serve(config, files, pinned, metrics, as_json))
    except Stopped as stopped:
        if stopped.number != signal.SIGTERM:  # being told to stop is how serving ends well
            raise


async def _serve(
    config: NodeConfig,
    files: Sequence[Path],
    pinned: frozenset[int],
    metrics: str | None,
    as_json: bool,
) -> None:
    async with Node(config) as node, exporting(metrics, node) as url:
        rdma = node.statistics().rdma_reason is PathReason.OK
        for index, path in enumerate(files):
            offer = await _offer(node, path, pin=rdma and index in pinned)
            _show(offer, as_json, url)
        if not as_json:
            if url is not None:
                output.note(f"metrics at {url}")
            output.note(f"serving {len(files)} file(s); Ctrl-C stops")
        await asyncio.Event().wait()


async def _offer(node: Node, path: Path, *, pin: bool) -> Offer:
    payload = await _load(path, into_memory=pin)
    memory = "mapped" if payload.mapped else "memory"
    if pin:
        handle = await node.register_data_pinned(payload.buffer, _RETAINED)
        if (await node.metadata(handle)).pinned:
            memory = "pinned"
    else:
        handle = await node.register_data(payload.buffer, _RETAINED)
    return Offer(_ticket(node, handle, payload), memory)


def _ticket(node: Node, handle: Handle, payload: Payload) -> Ticket:
    return Ticket(node.address, handle, ticket_name(payload.path), payload.nbytes, payload.sha256)


async def _load(path: Path, *, into_memory: bool) -> Payload:
    """Read in a thread, which is told to stop when this is cancelled."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(
            load, path, into_memory=into_memory, keep_going=lambda: not stop.is_set()
        )
    finally:
        stop.set()


def _pinned_set(sizes: Sequence[int], transport: str, budget: int) -> frozenset[int]:
    """Which files go into registered memory: in order, as far as the budget reaches."""
    if transport == Transport.TCP:
        return frozenset()
    chosen, left = set(), budget
    for index, nbytes in enumerate(sizes):
        if 0 < _aligned(nbytes) <= left:
            chosen.add(index)
            left -= _aligned(nbytes)
    return frozenset(chosen)


def pool_for(nbytes: int) -> RdmaPoolConfig:
    """For files of so many bytes, which `--pinned-bytes` has bounded: one arena for the short ones,
    and a budget with room for all on every device.
    """
    default = RdmaPoolConfig()
    arena_bytes = min(max(nbytes, _ARENA_BYTES_MIN), default.max_arena_bytes)
    budget = max(default.registered_bytes_budget, _DEVICES_MAX * (nbytes + arena_bytes))
    return RdmaPoolConfig(initial_arena_bytes=arena_bytes, registered_bytes_budget=budget)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ARENA_ALIGNMENT) * _ARENA_ALIGNMENT


def _show(offer: Offer, as_json: bool, metrics_url: str | None) -> None:
    ticket = offer.ticket
    if as_json:
        output.print_json(
            {
                "name": ticket.name,
                "bytes": ticket.size,
                "sha256": ticket.sha256,
                "memory": offer.memory,
                "ticket": str(ticket),
                **({} if metrics_url is None else {"metrics": metrics_url}),
            }
        )
        return
    output.note(
        f"{ticket.name}: {output.human_bytes(ticket.size)}, {offer.memory}, sha256 {ticket.sha256}"
    )
    print(ticket, flush=True)
