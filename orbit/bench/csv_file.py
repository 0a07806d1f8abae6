"""Reports as CSV: one line for each row, flat names, empty where something is not known. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Final

from . import figures
from .report import Report, Row

COLUMNS: Final = (
    "started verb transport source size_bytes batch inflight ops errors seconds gb_per_s "
    "gbit_per_s p50_us p90_us p99_us p999_us max_us client_cpu_s server_cpu_s "
    "client_cpu_s_per_gib server_cpu_s_per_gib client_crossings server_crossings "
    "client_copied_bytes server_copied_bytes verify verified path reason orbit_over_this "
    "client_host server_host client_kernel server_kernel problems"
).split()


def to_csv(reports: Iterable[Report]) -> str:
    """With a heading line. Phases have a column each: phase_NAME_s."""
    reports = tuple(reports)
    phases = dict.fromkeys(name for r in reports for row in r.rows for name in row.phases)
    file = io.StringIO()
    names = [*COLUMNS, *(f"phase_{name}_s" for name in phases)]
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    for report in reports:
        for row in report.rows:
            line = _line(report, row) | {f"phase_{k}_s": v for k, v in row.phases.items()}
            writer.writerow({name: "" if v is None else v for name, v in line.items()})
    return file.getvalue()


def _line(report: Report, row: Row) -> dict[str, object]:
    found: dict[str, object] = {
        "started": report.started,
        "verb": report.plan.verb,
        "transport": report.plan.transport,
        "source": row.source,
        "size_bytes": row.size,
        "gb_per_s": figures.gb_per_s(row),
        "gbit_per_s": figures.gbit_per_s(row),
        "orbit_over_this": figures.ratio_to(report, row),
        "problems": len(report.problems),
    }
    for name in ("batch", "inflight", "ops", "errors", "seconds", "verify", "verified"):
        found[name] = getattr(row, name)
    for name in ("p50", "p90", "p99", "p999", "max"):
        found[f"{name}_us"] = getattr(row.latency, name) or None  # 0: nobody told one
    found["path"] = figures.path_text(row)
    found["reason"] = row.reason
    for end, usage, facts in (
        ("client", row.client, report.client),
        ("server", row.server, report.server),
    ):
        found[f"{end}_cpu_s"] = usage.cpu_s
        found[f"{end}_cpu_s_per_gib"] = figures.cpu_s_per_gib(row, usage)
        found[f"{end}_crossings"] = usage.crossings
        found[f"{end}_copied_bytes"] = usage.copied_bytes
        found[f"{end}_host"] = facts.get("host")
        found[f"{end}_kernel"] = facts.get("kernel")
    return found
