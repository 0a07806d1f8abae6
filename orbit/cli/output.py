"""What commands show: sizes and rates for people, and a progress bar on a terminal only.

rich is imported when a bar is really drawn: pipes and `--json` never pay for it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(nbytes: int) -> str:
    """64.0 MiB, 1.5 GiB, 17 bytes."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min((nbytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def short_bytes(nbytes: int) -> str:
    """64 KiB, 1 GiB, 1000 B: exact, for columns."""
    power = 0
    while nbytes and nbytes % 1024 == 0 and power < len(_UNITS) - 1:
        nbytes //= 1024
        power += 1
    return f"{nbytes} {_UNITS[power] if power else 'B'}"


def rate_gb_s(nbytes: int, seconds: float) -> float:
    """Decimal gigabytes a second, as network figures are given; 0 where nothing was measured."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def print_json(record: Mapping[str, object]) -> None:
    print(json.dumps(record), flush=True)


def note(text: str) -> None:
    """Something for a person beside the result, which has stdout to itself."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields what to call with the bytes that have arrived so far."""
    if not (wanted and total and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda arrived: bar.update(task, completed=arrived)
