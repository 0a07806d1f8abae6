"""`orbit doctor`: whether this host, and the way to a peer, can do what orbit would do there.

Looks, then moves real bytes, then says on one page what is wrong and how to put it right. What is
looked at is orbit/doctor's business; this module asks, shows and exits.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import click

from ..config import NodeConfig, RdmaConfig, RdmaPoolConfig, parse_transport, resolve
from ..doctor.checks import host_findings
from ..doctor.environment import with_environment
from ..doctor.finding import Diagnosis, Finding, Level
from ..doctor.grant import grant_findings
from ..doctor.greeting import Target
from ..doctor.host import Host
from ..doctor.offer import serve_payload
from ..doctor.peer import peer_findings
from ..doctor.verdict import rdma_verdict, summary
from ..errors import UsageError
from . import output
from .doctor_page import show
from .failures import ExitStatus, Stopped
from .options import json_option, parse_size, secret_file_option, transport_option
from .running import run

_STATUS = {Level.WARN: ExitStatus.WARNINGS, Level.FAIL: ExitStatus.UNFIT}


@click.command()
@click.option("--device", metavar="NAME", help="The device to use; several with commas.")
@transport_option()
@click.option("--no-grant", is_flag=True, help="Only look: move no bytes.")
@click.option(
    "--peer", metavar="TICKET", help="Try the way to it: a ticket, an address or HOST:PORT."
)
@click.option("--serve", is_flag=True, help="Offer a 4 KiB payload for the other host's --peer.")
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where a node is to listen; with --serve, where it does.",
)
@click.option("--budget", type=parse_size, metavar="SIZE", help="Registered memory to plan for.")
@click.option(
    "--sysfs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Look at a copied tree and not at this host.",
)
@secret_file_option
@click.option("--verbose", is_flag=True, help="Every line, also those that are ok.")
@json_option
def doctor(
    device: str | None,
    transport: str,
    no_grant: bool,
    peer: str | None,
    serve: bool,
    listen: str,
    budget: int | None,
    sysfs: Path | None,
    secret_file: Path | None,
    verbose: bool,
    as_json: bool,
) -> int:
    """Say what works here, over TCP and over RDMA, and how to repair what does not."""
    # What nodes log while they are tried is on the page, with a fix.
    logging.getLogger("orbit").addHandler(logging.NullHandler())
    config = _config(device, transport, listen, budget, secret_file)
    if serve:
        if peer or sysfs:
            raise UsageError("--serve offers a payload; it looks at nothing beside it")
        return _serve(config, as_json)
    if peer is not None:
        Target.parse(peer)  # a wrong word is said before anything is looked at
        if sysfs:
            raise UsageError("--sysfs looks at a copied tree: no peer can be tried from there")
    host = Host() if sysfs is None else Host.at(sysfs)
    findings = run(_diagnose(host, config, peer, grant=sysfs is None and not no_grant))
    verdict = rdma_verdict(host, with_environment(host, config), findings)
    diagnosis = Diagnosis.of([*findings, verdict])
    line = summary(findings, verdict)
    if as_json:
        everything = [finding.to_json() for finding in diagnosis.findings]
        output.print_json({"level": diagnosis.level.word, "findings": everything, "summary": line})
    else:
        show(diagnosis, line, verbose=verbose)
    return _STATUS.get(diagnosis.level, ExitStatus.OK)


def _config(
    device: str | None,
    transport: str,
    listen: str,
    budget: int | None,
    secret_file: Path | None,
) -> NodeConfig:
    """Without the environment, which may be what is wrong. Raises ConfigError."""
    pool = RdmaPoolConfig()
    if budget is not None:
        pool = RdmaPoolConfig(registered_bytes_budget=budget)
    config = NodeConfig(
        listen=listen,
        secret_file=secret_file,
        transport=parse_transport("--transport", transport),
        rdma=RdmaConfig(device=device, pool=pool),
    )
    resolve(config, {})  # a secret file that cannot be read
    return config


async def _diagnose(
    host: Host, config: NodeConfig, peer: str | None, *, grant: bool
) -> Sequence[Finding]:
    findings = await asyncio.to_thread(host_findings, host, config)
    if grant:
        findings += await grant_findings(host, with_environment(host, config))
    if peer is not None:
        findings += await peer_findings(peer, config)
    return findings


def _serve(config: NodeConfig, as_json: bool) -> int:
    try:
        run(_offer(config, as_json))
    except Stopped as stopped:
        if stopped.number != signal.SIGTERM:  # being told to stop is how serving ends well
            raise
    return ExitStatus.OK


async def _offer(config: NodeConfig, as_json: bool) -> None:
    async with serve_payload(config) as offer:
        if as_json:
            output.print_json({"ticket": str(offer.ticket), "memory": offer.memory})
        else:
            output.note(f"4 KiB in {offer.memory} memory; on the other host:")
            secret = " --secret-file FILE" if config.secret else ""
            print(f"orbit doctor --peer {offer.ticket}{secret}", flush=True)
            if all(endpoint.is_loopback for endpoint in offer.ticket.address.endpoints):
                output.note("only this host reaches it; --listen 0.0.0.0:7000 lets others")
            output.note("Ctrl-C stops")
        await asyncio.Event().wait()
