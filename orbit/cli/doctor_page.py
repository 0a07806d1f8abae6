"""The page of `orbit doctor`: a heading for each area, a line for each finding, the fix below it.

Lines that are ok are counted beside their heading unless all are wanted: what is left fits a
screen. Colours and folding are for terminals only; a pipe gets one line a finding.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..doctor.finding import Diagnosis, Finding, Level

_STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}
# Of these every line is shown: they are what was done, and not what was looked at.
_IN_FULL = ("transfer over tcp", "grants", "peer")
_VERDICT = "paths"  # which the summary says again
_INDENT = "  "
_FIX = _INDENT + " " * 5 + "fix: "
_WORD_WIDTH = 5


@dataclass(frozen=True, slots=True)
class Line:
    """`mark` is its first word, in `style`. A line with `whole` is to be pasted: never folded."""

    mark: str
    text: str
    style: str = ""
    whole: bool = False


def page(diagnosis: Diagnosis, summary: str, *, verbose: bool) -> Iterator[Line]:
    """The lines, from the first area to the summary."""
    shown = [finding for finding in diagnosis.findings if finding.area != _VERDICT]
    for area, findings in _areas(shown):
        yield from _area(area, list(findings), verbose=verbose or area in _IN_FULL)
    yield Line("", "")
    yield Line("", summary, _STYLES[diagnosis.level])


def show(diagnosis: Diagnosis, summary: str, *, verbose: bool) -> None:
    """On stdout."""
    lines = list(page(diagnosis, summary, verbose=verbose))
    if not sys.stdout.isatty():
        print("\n".join(f"{line.mark}{line.text}" for line in lines), flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        for row in _folded(line, console.width):
            mark = line.mark if row.startswith(line.mark) else ""
            rest = (row[len(mark) :], "" if line.mark else line.style)
            console.print(Text.assemble((mark, line.style), rest), soft_wrap=True)


def _areas(findings: Sequence[Finding]) -> Iterable[tuple[str, Iterable[Finding]]]:
    """By first appearance; an area that comes back later is one area."""
    order = {area: place for place, area in enumerate(dict.fromkeys(f.area for f in findings))}
    return groupby(sorted(findings, key=lambda f: order[f.area]), key=lambda f: f.area)


def _area(area: str, findings: list[Finding], *, verbose: bool) -> Iterator[Line]:
    fine = sum(finding.level is Level.OK for finding in findings)
    shown = [f for f in findings if verbose or f.level is not Level.OK]
    yield Line("", f"{area}  ({fine} ok)" if fine and len(shown) < len(findings) else area, "bold")
    for finding in shown:
        style = _STYLES[finding.level]
        yield Line(f"{_INDENT}{finding.level.word:{_WORD_WIDTH}}", finding.text, style)
        if finding.fix and finding.level >= Level.WARN:
            yield Line(_FIX, finding.fix, "cyan", whole=True)


def _folded(line: Line, width: int) -> list[str]:
    """Rows of a terminal of that width, with what follows below the first word's text."""
    text = line.mark + line.text
    if line.whole or len(text) <= width:
        return [text]
    hanging = " " * len(line.mark)
    return textwrap.wrap(text, max(width, 40), subsequent_indent=hanging, break_on_hyphens=False)
