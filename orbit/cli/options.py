"""Options that several commands share, and values people type."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..model import Transport

Command = TypeVar("Command", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)\Z", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """A number of bytes: 4096, 64MiB, 1.5G (binary) or 100MB (decimal)."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write 4096, 64MiB or 100MB")
    number, prefix, unit = match.groups()
    step = 1000 if unit.lower() == "b" and prefix else 1024
    return int(float(number) * step ** _POWERS[prefix.lower()])


def transport_option(default: Transport = Transport.AUTO) -> Callable[[Command], Command]:
    return click.option(
        "--transport",
        type=click.Choice([str(t) for t in Transport]),
        default=str(default),
        show_default=True,
        help="auto may fall back to TCP; rdma and tcp are demands.",
    )


secret_file_option = click.option(
    "--secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the secret that both sides must have.",
)

METRICS_PORT = 9464  # where exporters of applications are looked for by custom

metrics_option = click.option(
    "--metrics",
    metavar="HOST[:PORT]",
    help=f"Serve metrics for Prometheus and `orbit top` there; default port {METRICS_PORT}.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
