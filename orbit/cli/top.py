"""`orbit top`: what a node does now, read from its metrics endpoint again and again.

On a terminal it takes the whole screen until `q` or Ctrl-C; elsewhere it prints. An endpoint that
is gone is said in one line and asked again; with `--once` it ends the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..errors import DeadlineExceeded, OrbitError, PeerError, PeerUnreachable, UsageError
from . import output
from .failures import Stopped
from .options import METRICS_PORT, json_option
from .running import run

if TYPE_CHECKING:
    from ..scraping import Snapshot
    from .top_facts import TopFacts

_PRINTED_COLUMNS = 120  # in a pipe, where nothing says how wide a line may be


@click.command()
@click.argument("endpoint", required=False, default=f"127.0.0.1:{METRICS_PORT}")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks, which is what rates are of.",
)
@click.option("--once", is_flag=True, help="Print one screen, after one interval, and end.")
@json_option
def top(endpoint: str, interval: float, once: bool, as_json: bool) -> None:
    """Watch the node whose metrics are at ENDPOINT: a URL or HOST:PORT, default 127.0.0.1:9464."""
    _check(endpoint)
    if once:
        run(_once(endpoint, interval, as_json))
    elif as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        run(_print(endpoint, interval, as_json))
    else:
        try:
            run(_live(endpoint, interval))
        except Stopped as stopped:
            if stopped.number != signal.SIGINT:  # which is how a person leaves
                raise


def _check(endpoint: str) -> None:
    """Raises UsageError before anything is drawn."""
    try:
        from ..scraping import endpoint_url
    except ImportError as error:
        raise UsageError(str(error), hint="pip install 'orbit[metrics]'") from error
    endpoint_url(endpoint)


async def _once(endpoint: str, interval_s: float, as_json: bool) -> None:
    looks = _looks(endpoint, interval_s)
    for _ in range(2):
        found = await anext(looks)
        if isinstance(found, DeadlineExceeded):
            raise PeerUnreachable(endpoint, "timeout", str(found)) from found
        if isinstance(found, OrbitError):
            raise found
    await looks.aclose()
    assert not isinstance(found, OrbitError)
    _show(found, endpoint, as_json)


async def _print(endpoint: str, interval_s: float, as_json: bool) -> None:
    told = ""
    async for found in _looks(endpoint, interval_s):
        problem = str(found) if isinstance(found, OrbitError) else ""
        if problem and problem != told:
            output.note(f"orbit top: {problem}; trying again")
        told = problem
        if not isinstance(found, OrbitError):
            _show(found, endpoint, as_json)


def _show(facts: TopFacts, endpoint: str, as_json: bool) -> None:
    if as_json:
        output.print_json(asdict(facts))
        return
    from rich.console import Console

    from .top_screen import screen

    width = None if sys.stdout.isatty() else _PRINTED_COLUMNS
    console = Console(width=width, highlight=False)
    console.print(screen(facts, endpoint, console.width))
    console.print()
    sys.stdout.flush()


async def _live(endpoint: str, interval_s: float) -> None:
    """Until `q`, or until it is cancelled. Gives the terminal back as it was."""
    with _keys() as leave:
        drawing = asyncio.ensure_future(_draw(endpoint, interval_s))
        leaving = asyncio.ensure_future(leave.wait())
        try:
            await asyncio.wait((drawing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drawing


async def _draw(endpoint: str, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from .top_screen import screen, waiting

    console = Console(highlight=False)
    facts: TopFacts | None = None
    problem = ""
    with Live(waiting(endpoint, ""), console=console, screen=True, auto_refresh=False) as live:

        def redraw() -> None:
            if facts is None:
                live.update(waiting(endpoint, problem), refresh=True)
            else:
                width, height = console.size
                live.update(screen(facts, endpoint, width, problem, height), refresh=True)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, redraw)
        try:
            async for found in _looks(endpoint, interval_s):
                if isinstance(found, OrbitError):
                    problem = str(found)
                else:
                    facts, problem = found, ""
                redraw()
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Set when somebody presses `q`. Keys come one by one and unseen meanwhile."""
    import os
    import termios
    import tty

    leave, loop, terminal = asyncio.Event(), asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed() -> None:
        if not (keys := os.read(terminal, 64)) or b"q" in keys.lower():
            leave.set()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, pressed)
    try:
        yield leave
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _looks(
    endpoint: str, interval_s: float
) -> AsyncGenerator[TopFacts | PeerError | DeadlineExceeded, None]:
    """What there is now, or why that cannot be told; without end."""
    from .top_facts import facts_of

    before: Snapshot | None = None
    while True:
        try:
            now = await _scrape(endpoint)
        except (PeerError, DeadlineExceeded) as error:
            yield error
        else:
            yield facts_of(now, before)
            before = now
        await asyncio.sleep(interval_s)


async def _scrape(endpoint: str) -> Snapshot:
    """In a thread of its own that nobody waits for: leaving must not take as long as an endpoint
    that does not answer.
    """
    from ..scraping import scrape

    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Snapshot] = loop.create_future()

    def settle(found: Snapshot | BaseException) -> None:
        if answer.done():
            return
        if isinstance(found, BaseException):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def work() -> None:
        found: Snapshot | BaseException
        try:
            found = scrape(endpoint)
        except Exception as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the command has ended
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=work, name="orbit top", daemon=True).start()
    return await answer
