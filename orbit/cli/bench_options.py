"""Options that `orbit bench loop`, `serve` and `run` have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ..bench.plan import Verb, Verify
from ..config import HOST_MEMORY, PROGRESS_MODES
from .bench_values import DURATION_DEFAULT_S, SIZES_DEFAULT, parse_sizes, parse_verbs
from .options import json_option, secret_file_option, transport_option

Command = TypeVar("Command", bound=Callable[..., Any])
Options = tuple[Callable[[Any], Any], ...]

_FILE: Final = click.Path(dir_okay=False, path_type=Path)

_OF_PLAN: Options = (
    click.option(
        "--op",
        "verbs",
        multiple=True,
        default=(Verb.GET_INTO,),
        callback=parse_verbs,
        metavar="VERB[,VERB]...",
        help=f"{', '.join(Verb)}; default {Verb.GET_INTO}.",
    ),
    click.option(
        "--size",
        "sizes",
        type=parse_sizes,
        default=SIZES_DEFAULT,
        show_default=True,
        metavar="SIZES",
        help="4K, a list 4K,1M or a sweep 4K..64M that doubles.",
    ),
    click.option(
        "--batch",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Items of one operation.",
    ),
    click.option(
        "--inflight",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Operations at once.",
    ),
    click.option(
        "--duration",
        type=float,
        metavar="S",
        help=f"Seconds for each size (default {DURATION_DEFAULT_S:g}).",
    ),
    click.option("--iterations", type=int, metavar="N", help="Operations of each size instead."),
    click.option(
        "--warmup",
        type=int,
        default=3,
        show_default=True,
        metavar="N",
        help="Operations of each size that are not counted.",
    ),
    click.option(
        "--verify",
        type=click.Choice([str(v) for v in Verify]),
        default=str(Verify.SAMPLE),
        show_default=True,
        help="Which bytes are compared with what the seed says.",
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Of the payload's bytes.",
    ),
    click.option("--no-baseline", is_flag=True, help="Measure orbit alone."),
    click.option(
        "--perftest",
        is_flag=True,
        help="Measure perftest, too, where RDMA ran and both ends have it.",
    ),
)

_OF_NODE: Options = (
    transport_option(),
    click.option(
        "--device",
        "devices",
        multiple=True,
        metavar="NAME",
        help="RDMA device to use; may be repeated. Default: all.",
    ),
    click.option(
        "--rails",
        type=click.IntRange(1, 64),
        metavar="N",
        help="How many rails to use. Default: all.",
    ),
    click.option(
        "--gid-index",
        type=click.IntRange(0, 65_535),
        metavar="N",
        help="Row of the GID table to use, and no other.",
    ),
    click.option(
        "--lanes",
        type=click.IntRange(1, 16),
        default=2,
        show_default=True,
        metavar="N",
        help="Queue pairs between two rails.",
    ),
    click.option(
        "--progress",
        type=click.Choice(PROGRESS_MODES),
        default="event",
        show_default=True,
        help="How completions are found.",
    ),
    click.option(
        "--host-memory",
        type=click.Choice(HOST_MEMORY),
        default="direct",
        show_default=True,
        help="Whether read and write work in place, or through a copy.",
    ),
    secret_file_option,
)

_OF_OUTPUT: Options = (
    click.option(
        "--csv",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        metavar="FILE",
        help="Also as CSV; - for standard output instead of tables.",
    ),
    click.option("--out", type=_FILE, metavar="FILE", help="Also as JSON, for `compare`."),
    click.option("--plot", type=_FILE, metavar="FILE", help="Also as a picture, .svg or .png."),
    json_option,
)

listen_option = click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where this end listens; port 0 takes a free one.",
)


def _apply(command: Command, options: Options) -> Command:
    for option in reversed(options):  # the last decorator is the first in the help
        command = option(command)
    return command


def plan_options(command: Command) -> Command:
    """What is measured."""
    return _apply(command, _OF_PLAN)


def node_options(command: Command) -> Command:
    """How this end's node is set up."""
    return _apply(command, _OF_NODE)


def output_options(command: Command) -> Command:
    """Where the figures go, beside the screen."""
    return _apply(command, _OF_OUTPUT)
