"""Live progress of `orbit bench`, on a terminal only: which size is measured, how far, how fast."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from ..bench.measuring import Progress
from ..bench.plan import Verb
from .output import short_bytes


@contextlib.contextmanager
def live(verb: Verb) -> Iterator[Callable[[Progress], None]]:
    """Yields what to call with each step. The line is gone when it is over."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TextColumn("{task.fields[rate]}"),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(str(verb), total=1.0, rate="")

        def step(now: Progress) -> None:
            rate = f"{now.bytes_per_s / 1e9:.3f} GB/s" if now.bytes_per_s else ""
            what = f"{verb} {short_bytes(now.size)} by {now.source}"
            bar.update(task, description=what, completed=now.done, rate=rate)

        yield step
