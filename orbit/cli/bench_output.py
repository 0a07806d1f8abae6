"""Where reports of `orbit bench` go: the screen, JSON, CSV, a file, a picture; and how it ends.

What a report's problems mean for the exit status is decided here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..bench.csv_file import to_csv
from ..bench.memcpy import memcpy_rates
from ..bench.plot import check_plot, plot
from ..bench.problems import Kind, kind_of, problems_of
from ..bench.report import Report, reports_from_json
from ..errors import OrbitError, PathUnavailable, UsageError
from . import output
from .failures import IntegrityError, LocalFileError

_STDOUT = Path("-")


class BadFigures(OrbitError):
    """The run is over, and its figures must not be believed, or something went wrong in it."""

    code = "bench"


@dataclass
class Outputs:
    """Reports as they come; files are written at the end, with what there is by then."""

    as_json: bool
    csv: Path | None
    out: Path | None
    plot: Path | None
    reports: list[Report] = field(default_factory=list)

    def check(self) -> None:
        """Before anything is measured. Raises UsageError, LocalFileError."""
        if self.as_json and self.csv == _STDOUT:
            raise UsageError("--json and --csv - both want standard output")
        for path in (self.csv, self.out, self.plot):
            if path is not None and (path is not self.csv or path != _STDOUT):
                _check_place(path)
        if self.plot is not None:
            check_plot(self.plot)

    def add(self, report: Report) -> None:
        """Judge it, and show it. Raises LocalFileError: standard output takes no more."""
        found = problems_of(report, memcpy_rates(report.plan.sizes))
        report = replace(report, problems=(*report.problems, *found))
        self.reports.append(report)
        if self.as_json:
            output.print_json(report.to_mapping())
        elif self.csv != _STDOUT:
            from .bench_table import show_report

            try:
                show_report(report)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise LocalFileError.of("standard output", error) from error

    def write(self) -> None:
        """All files, also when one of them cannot be had. Raises LocalFileError: the first such."""
        failed: list[LocalFileError] = []
        for path, write in self._files():
            try:
                write()
            except BrokenPipeError:
                raise
            except OSError as error:
                failed.append(LocalFileError.of(path, error))
        for one in failed[1:]:
            output.note(f"orbit: {one}")
        if failed:
            raise failed[0]

    def _files(self) -> Iterator[tuple[Path, Callable[[], object]]]:
        if not self.reports:
            return
        if self.out is not None:
            lines = "".join(f"{json.dumps(r.to_mapping())}\n" for r in self.reports)
            yield self.out, partial(self.out.write_text, lines, "utf-8")
        if self.csv == _STDOUT:
            yield _STDOUT, partial(print, to_csv(self.reports), end="", flush=True)
        elif self.csv is not None:
            yield self.csv, partial(self.csv.write_text, to_csv(self.reports), "utf-8")
        if self.plot is not None and any(row.ops for r in self.reports for row in r.rows):
            yield self.plot, partial(plot, self.reports, self.plot)

    def judge(self) -> None:
        """Raises what makes the command fail: other bytes, another path, figures not to believe."""
        problems = tuple(problem for report in self.reports for problem in report.problems)
        if not problems:
            return
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        kind = kind_of(problems)
        first = next((p for p in problems if kind is not None and p.startswith(kind)), problems[0])
        if kind is Kind.BYTES:
            raise IntegrityError(first + more)
        if kind is Kind.PATH:
            plan = self.reports[0].plan
            raise PathUnavailable(plan.transport, "not_taken", first.partition(": ")[2] + more)
        raise BadFigures(first + more)


def read_reports(path: Path) -> tuple[Report, ...]:
    """What --out or --json wrote. Raises LocalFileError, UsageError."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise LocalFileError.of(path, error) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a report of orbit bench") from error
    try:
        return reports_from_json(text)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _check_place(path: Path) -> None:
    """Raises UsageError, LocalFileError: no file can be written there."""
    if path == _STDOUT:
        raise UsageError("only --csv writes to standard output as -")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise LocalFileError(f"{path}: cannot be written")


def outputs_of(given: dict[str, Any]) -> Outputs:
    """Raises UsageError."""
    found = Outputs(given["as_json"], given["csv"], given["out"], given["plot"])
    found.check()
    return found
