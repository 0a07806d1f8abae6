"""The command `orbit softroce`: words to LabOptions, and LabError to one line and an exit
status."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Literal

import click

from orbit.errors import ConfigError, LabError, UsageError
from orbit.softroce.lab import (
    SABOTAGES,
    STATUS_LAB,
    LabOptions,
    cache_folder,
    prepare_guest,
    run_lab,
)
from orbit.softroce.run_folder import Surroundings
from orbit.softroce.supervisor import write_all
from orbit.softroce.topology import Topology

STDOUT, STDERR = 1, 2


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--hosts", type=click.IntRange(1, 2), default=2, show_default=True, help="Hosts in the guest."
)
@click.option(
    "--vms",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="Machines; 2 have one host each.",
)
@click.option("--rails", type=int, default=1, show_default=True, help="RDMA devices per host.")
@click.option(
    "--mtu",
    type=int,
    default=1500,
    show_default=True,
    help="MTU of the links in bytes; 4200 gives 4096 byte RDMA packets.",
)
@click.option(
    "--netem",
    default="",
    metavar="SPEC",
    help='tc-netem words for both ends of every rail, for example "loss 1%".',
)
@click.option(
    "--peer-command", default="", metavar="CMD", help="With --vms 2: what machine B runs."
)
@click.option(
    "--memory",
    type=click.IntRange(512),
    default=3072,
    show_default=True,
    metavar="MB",
    help="Memory of each machine.",
)
@click.option(
    "--cpus",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Processors of each machine.",
)
@click.option(
    "--numa",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Memory nodes, with the rails on each in turn; 2 needs --hosts 1.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=None,
    metavar="S",
    help="End the run after S seconds with status 124.",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    metavar="DIR",
    help="Folder that the command finds as $ORBIT_RESULTS.",
)
@click.option(
    "--accel",
    type=click.Choice(["auto", "kvm", "tcg"]),
    default="auto",
    show_default=True,
    help="KVM, software emulation, or a quick try.",
)
@click.option("--native", is_flag=True, help="Use the running kernel, which must have rdma_rxe.")
@click.option(
    "--fetch-only", is_flag=True, help="Prepare the guest kernel and initramfs, run nothing."
)
@click.option("--quiet", is_flag=True, help="Say nothing about the lab unless it fails.")
@click.option("--sabotage", type=click.Choice(sorted(SABOTAGES)), default=None, hidden=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def softroce(
    hosts: int,
    vms: int,
    rails: int,
    mtu: int,
    netem: str,
    peer_command: str,
    memory: int,
    cpus: int,
    numa: int,
    timeout: float | None,
    results: Path | None,
    accel: Literal["auto", "kvm", "tcg"],
    native: bool,
    fetch_only: bool,
    quiet: bool,
    sabotage: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in a virtual machine that has RDMA devices (SoftRoCE).

    The host's file system is the machine's root, copy on write; the working directory, the virtual
    environment and the exit status are carried over. Before COMMAND the lab proves that RDMA works
    between its two ends.

    Exit status: COMMAND's own; 97 kernel fault (the run is invalid), 124 --timeout, 125 the lab
    failed, 128+N signal.
    """
    if not command and not fetch_only:
        raise click.UsageError("no COMMAND: give one after --")
    if peer_command and vms != 2:
        raise click.UsageError("--peer-command needs --vms 2")
    try:
        options = LabOptions(
            topology=Topology(hosts, vms, rails, mtu, netem, numa),
            memory_mb=memory,
            cpus=cpus,
            timeout_s=timeout,
            results=results.resolve() if results else None,
            accelerator=accel,
            peer_command=tuple(shlex.split(peer_command)),
            native=native,
            sabotage=sabotage or "",
        )
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    surroundings = Surroundings(
        directory=Path.cwd(),
        environment=os.environ,
        cache=cache_folder(os.environ),
        note=(lambda _text: None) if quiet else _say,
        alert=_say,
        stdout=write_all(STDOUT),
        stderr=write_all(STDERR),
    )
    sys.exit(_run(options, command, surroundings, fetch_only))


def _run(
    options: LabOptions, command: tuple[str, ...], surroundings: Surroundings, fetch_only: bool
) -> int:
    try:
        if fetch_only:
            prepare_guest(options, surroundings)
            return 0
        return run_lab(options, command, surroundings)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:  # whoever read the output is gone; the machines are too by now
        return 128 + signal.SIGPIPE
    except LabError as error:
        _say(str(error))
        if error.hint:
            _say(f"hint: {error.hint}")
        return STATUS_LAB


def _say(text: str) -> None:
    print(f"orbit softroce: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    softroce()
