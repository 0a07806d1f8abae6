"""`orbit bench`: measure what moving bytes costs, between two processes or two hosts.

`loop` starts the other end itself; `serve` prints the line that `run` needs. What is measured, and
how, is orbit/bench/'s.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Final

import click

from ..availability import available
from ..bench.client import Incomplete, run_plan
from ..bench.compare import compare as compare_runs
from ..bench.ends import NodeSettings
from ..bench.plan import Plan
from ..bench.slots import check_memory
from ..errors import PathUnavailable
from ..model import Transport
from ..protocol.address import ADDRESS_PREFIX, NodeAddress
from ..protocol.endpoint import Endpoint
from . import output
from .bench_options import listen_option, node_options, output_options, plan_options
from .bench_output import BadFigures, Outputs, outputs_of, read_reports
from .bench_progress import live
from .bench_serve import serve_clients
from .bench_values import bytes_of, plans_of, settings_of, words_of
from .children import Child
from .failures import LocalFileError, Stopped
from .options import json_option, metrics_option, parse_size
from .running import run as run_command

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0


@click.group()
def bench() -> None:
    """Measure orbit, and what the same bytes cost without it."""


@bench.command(short_help="Measure between two processes on this host.")
@plan_options
@node_options
@output_options
def loop(**given: Any) -> None:
    """Measure between two processes on this host."""
    plans, outputs = plans_of(given), outputs_of(given)
    settings = settings_of(given, bytes_of(plans))
    _check_demand(settings)
    for plan in plans:
        check_memory(plan, ends=2)
    _measured(_loop(plans, settings, outputs, perftest=given["perftest"]), outputs)


@bench.command(short_help="Measure against another host.")
@click.argument("host")
@plan_options
@listen_option
@node_options
@output_options
def run(host: str, **given: Any) -> None:
    """Measure against HOST, a host:port or an address, where `orbit bench serve` runs."""
    server = _server(host)
    plans, outputs = plans_of(given), outputs_of(given)
    settings = settings_of(given, bytes_of(plans))
    _measured(_against(server, plans, settings, outputs, perftest=given["perftest"]), outputs)


@bench.command(short_help="Be the other end of run, until stopped.")
@listen_option
@click.option(
    "--advertise",
    multiple=True,
    metavar="HOST[:PORT]",
    help="What clients dial instead, for example after --listen 0.0.0.0:7000.",
)
@click.option(
    "--max-bytes",
    type=parse_size,
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Most payload that a client may have in memory here at once.",
)
@node_options
@metrics_option
@json_option
def serve(max_bytes: int, metrics: str | None, as_json: bool, **given: Any) -> None:
    """Be the other end of `orbit bench run`, until stopped (Ctrl-C or SIGTERM)."""
    try:
        run_command(serve_clients(settings_of(given, max_bytes), metrics, as_json=as_json))
    except Stopped as stopped:
        if stopped.number != signal.SIGTERM:  # being told to stop is how serving ends well
            raise


@bench.command(short_help="Set two runs beside each other.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--fail-below",
    type=click.FloatRange(0, min_open=True),
    metavar="RATIO",
    help="Exit with 1 where B's GB/s over A's is below it, for example 0.95.",
)
@json_option
def compare(a: Path, b: Path, fail_below: float | None, as_json: bool) -> None:
    """Set the reports in B beside those in A, and list what else differed."""
    found = compare_runs(read_reports(a), read_reports(b))
    if as_json:
        output.print_json(found.to_mapping())
    else:
        from .bench_table import show_comparison

        show_comparison(found)
    slower = found.slower_than(fail_below) if fail_below is not None else ()
    if slower:
        names = ", ".join(f"{pair.verb} {output.short_bytes(pair.size)}" for pair in slower)
        raise BadFigures(f"B is below {fail_below:g} of A: {names}")


async def _loop(
    plans: tuple[Plan, ...], settings: NodeSettings, outputs: Outputs, *, perftest: bool
) -> None:
    words = ["bench", "serve", "--json", "--max-bytes", str(settings.buffer_bytes)]
    async with Child.orbit((), [*words, *words_of(settings)]) as child:
        server = NodeAddress.parse(str((await child.read_report(_START_TIMEOUT_S))["address"]))
        await _against(server, plans, settings, outputs, perftest=perftest)
        await child.stop(_STOP_TIMEOUT_S)


async def _against(
    server: NodeAddress | Endpoint,
    plans: tuple[Plan, ...],
    settings: NodeSettings,
    outputs: Outputs,
    *,
    perftest: bool,
) -> None:
    for plan in plans:
        try:
            with live(plan.verb) as step:
                report = await run_plan(plan, server, settings, perftest=perftest, progress=step)
        except Incomplete as ended:
            outputs.add(ended.report)
            raise ended.cause from None
        outputs.add(report)


def _measured(work: Any, outputs: Outputs) -> None:
    """Run it, and write down what was measured whatever ends it."""
    try:
        run_command(work)
        outputs.judge()
    except BaseException:
        try:
            outputs.write()
        except LocalFileError as error:  # beside what is worse
            output.note(f"orbit: {error}")
        raise
    outputs.write()


def _server(text: str) -> NodeAddress | Endpoint:
    """Raises UsageError."""
    if text.strip().startswith(ADDRESS_PREFIX):
        return NodeAddress.parse(text)
    return Endpoint.parse(text)


def _check_demand(settings: NodeSettings) -> None:
    """Said once and at once, before the other end is started. Raises PathUnavailable."""
    if settings.transport is not Transport.RDMA:
        return
    found = available()
    if not found:
        raise PathUnavailable(Transport.RDMA, found.rdma, "; ".join(found.missing))
