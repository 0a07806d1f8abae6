"""The `orbit` command group and its entry point.

Subcommands are imported when they are named, so that `orbit --help` and the lab's guest start fast.
What a command raises becomes one line and an exit status here, and nowhere else.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from ..errors import OrbitError
from .failures import ExitStatus, Stopped, report, status_of

# name -> the one-line help that `orbit --help` shows without importing the command's module
COMMANDS: Mapping[str, str] = {
    "demo": "Move a file between two processes by handle, and prove it.",
    "serve": "Offer files; prints a ticket for each.",
    "get": "Fetch what a ticket names.",
    "top": "Watch a node by its metrics: budgets, rails, leases, rates.",
    "bench": "Measure orbit, and what the same bytes cost without it.",
    "doctor": "Say what works on this host, and how to repair what does not.",
    "softroce": "Run a command in a VM with software RDMA devices.",
}


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__package__}.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"orbit {_version()}")
        ctx.exit()


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("orbit")
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "(not installed)"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Write what orbit logs from this level up to stderr. Default: warnings, as bare text.",
)
@click.option("--log-json", is_flag=True, help="The log as one JSON object a line.")
def cli(log_level: str | None, log_json: bool) -> None:
    """Move large payloads between machines by handle, over RDMA verbs or TCP."""
    if log_level is not None or log_json:
        from ..logs import configure_logging

        configure_logging(log_level or "warning", log_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        outcome = cli.main(args=given, prog_name="orbit", standalone_mode=False)
        sys.stdout.flush()
    except (OrbitError, click.ClickException) as error:
        report(error, as_json=_asks_for_json(given))
        return status_of(error)
    except (KeyboardInterrupt, Stopped, click.Abort) as error:
        stopped = KeyboardInterrupt() if isinstance(error, click.Abort) else error
        return status_of(stopped)
    except BrokenPipeError:
        # The reader of our output went away; what is left to flush has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.FAILED
    return outcome if isinstance(outcome, int) else ExitStatus.OK


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether errors of the option parser itself should be JSON too; `--` ends our own options."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own
