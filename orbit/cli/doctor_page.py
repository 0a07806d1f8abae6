"""The page of `orbit doctor`: a heading for each area, a line for each finding, the fix below it.

Lines that are ok or skipped are counted beside their heading unless all are wanted, and areas with
nothing else share a line: what is left fits a screen. Nothing is wider than the terminal, or than
reads well; but a command of a fix is never broken, so that it can be pasted.
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
_WIDTH_MIN, _WIDTH_MAX = 40, 110


@dataclass(frozen=True, slots=True)
class Line:
    """`mark` is its first word, in `style`; what is folded hangs below the word after it. Of a line
    with `parts` each "; " begins a row, which is not broken.
    """

    mark: str
    text: str
    style: str = ""
    parts: bool = False

    def rows(self, width: int) -> list[str]:
        """At most that wide, but for words and parts that are wider."""
        hanging = " " * len(self.mark)
        if self.parts:
            rows = self.text.split("; ")
            return [(hanging if place else self.mark) + row for place, row in enumerate(rows)]
        width = min(max(width, _WIDTH_MIN), _WIDTH_MAX)
        folded = textwrap.wrap(
            self.text,
            width,
            initial_indent=self.mark,
            subsequent_indent=hanging,
            break_on_hyphens=False,
            break_long_words=False,
        )
        return folded or [""]


def page(diagnosis: Diagnosis, summary: str, *, verbose: bool) -> Iterator[Line]:
    """The lines, from the first area to the summary."""
    shown = [finding for finding in diagnosis.findings if finding.area != _VERDICT]
    quiet: list[str] = []
    for area, findings in _areas(shown):
        heading, *rest = _area(area, list(findings), verbose=verbose or area in _IN_FULL)
        if not rest:
            quiet.append(heading.text)
            continue
        if quiet:
            yield Line("", ", ".join(quiet), "dim")
            quiet = []
        yield from (heading, *rest)
    if quiet:
        yield Line("", ", ".join(quiet), "dim")
    yield Line("", "")
    if counts := _counts(shown):
        yield Line("", counts, _STYLES[diagnosis.level])
    yield Line("", summary, _STYLES[diagnosis.level])


def show(diagnosis: Diagnosis, summary: str, *, verbose: bool) -> None:
    """On stdout; without colours unless it is a terminal."""
    lines = page(diagnosis, summary, verbose=verbose)
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = console.width if console.is_terminal else _WIDTH_MAX
    for line in lines:
        for row in line.rows(width):
            mark = line.mark if row.startswith(line.mark) else ""
            rest = (row[len(mark) :], "" if line.mark else line.style)
            console.print(Text.assemble((mark, line.style), rest), soft_wrap=True)
    sys.stdout.flush()


def _areas(findings: Sequence[Finding]) -> Iterable[tuple[str, Iterable[Finding]]]:
    """By first appearance; an area that comes back later is one area."""
    order = {area: place for place, area in enumerate(dict.fromkeys(f.area for f in findings))}
    return groupby(sorted(findings, key=lambda f: order[f.area]), key=lambda f: f.area)


def _area(area: str, findings: list[Finding], *, verbose: bool) -> Iterator[Line]:
    shown = [f for f in findings if verbose or f.level >= Level.WARN]
    left = [f.level for f in findings if f not in shown]
    fine = ((Level.OK, "ok"), (Level.SKIPPED, "skipped"))
    counted = [f"{left.count(level)} {word}" for level, word in fine if level in left]
    yield Line("", f"{area} ({', '.join(counted)})" if left else area, "bold")
    for place, finding in enumerate(shown):
        bad = finding.level >= Level.WARN
        text = f"{finding.text}  [{finding.code}]" if bad else finding.text
        yield Line(f"{_INDENT}{finding.level.word:{_WORD_WIDTH}}", text, _STYLES[finding.level])
        following = shown[place + 1].fix if place + 1 < len(shown) else ""
        if bad and finding.fix and finding.fix != following:  # once for all that need the same
            yield Line(_FIX, finding.fix, "cyan", parts=True)


def _counts(findings: Sequence[Finding]) -> str:
    levels = [finding.level for finding in findings]
    return ", ".join(
        f"{count} {word if count == 1 else word + 's'}"
        for level, word in ((Level.FAIL, "failure"), (Level.WARN, "warning"))
        if (count := levels.count(level))
    )
