"""Draws one screen of `orbit top`: the same words on a terminal and, without colours, in a pipe.

Rates of bytes are decimal, as network figures are given; amounts of memory are binary.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..model import PathReason
from .output import human_bytes
from .top_facts import BudgetRow, RailRow, TopFacts

WIDE = 118  # columns from which two blocks fit side by side
_BAR = 8
_NOTHING = "-"
_WARN_PART, _FULL_PART = 0.8, 0.95
_KEYS_LOW = 0.1
# TCP for these is what somebody asked for, or what small payloads are meant to take.
_EXPECTED = (
    PathReason.OK,
    PathReason.ASKED,
    PathReason.BELOW_MIN,
    PathReason.KILL_SWITCH,
    PathReason.NOT_CONFIGURED,
)


@dataclass(frozen=True, slots=True)
class _Room:
    """How many rows a table may have, and whether blocks stand apart."""

    rows: int
    gaps: bool = False

    def stacked(self, blocks: Sequence[RenderableType]) -> RenderableType:
        apart: list[RenderableType] = [Text()] if self.gaps else []
        first, *others = blocks
        return Group(first, *(part for block in others for part in (*apart, block)))


_ROOMS = (_Room(16, gaps=True), _Room(8, gaps=True), *map(_Room, (8, 6, 5, 4, 3, 2)))


def screen(
    facts: TopFacts, endpoint: str, width: int, problem: str = "", height: int | None = None
) -> RenderableType:
    """`problem`: why there is nothing newer than these facts. Tables lose their least important
    rows until all fits into `height`; None: it may be as long as it is.
    """
    drawn = _screen(facts, endpoint, width, problem, _ROOMS[0])
    for room in _ROOMS[1:]:
        if height is None or _height(drawn, width) <= height:
            break
        drawn = _screen(facts, endpoint, width, problem, room)
    return drawn


def _screen(
    facts: TopFacts, endpoint: str, width: int, problem: str, room: _Room
) -> RenderableType:
    wide = width >= WIDE
    left = [_transports(facts), _decisions(facts, room.rows)]
    if facts.rails:
        left.append(_rails(facts.rails, room.rows))
    right = [_work(facts, lines=wide)]
    if facts.budgets:
        right.append(_budgets(facts.budgets, room.rows, idle=wide))
    body = [*left, *right]
    if wide:
        columns = Table.grid(padding=(0, 3))
        columns.add_row(room.stacked(left), room.stacked(right))
        body = [columns]
    parts = [*body, _retained(facts)]
    if facts.retained.anything:  # stands first: the end of a long screen may not be seen
        parts = [_retained(facts), *body]
    return room.stacked([_header(facts, endpoint, problem), *parts])


def _height(drawn: RenderableType, width: int) -> int:
    return len(Console(width=width, file=io.StringIO()).render_lines(drawn, pad=False))


def waiting(endpoint: str, problem: str) -> RenderableType:
    """The screen before the first answer."""
    text = Text.assemble(("orbit top", "bold"), "  ", endpoint)
    if problem:
        return Group(text, Text(f"{problem}; trying again", style="bold red"))
    return text


def _header(facts: TopFacts, endpoint: str, problem: str) -> Text:
    line = Text.assemble(("orbit top", "bold"), "  node ", (facts.node or "?", "bold"))
    if facts.uptime_s is not None:
        line.append(f"  up {_duration(facts.uptime_s)}")
    line.append("  rdma: ")
    usable = facts.rdma_reason == PathReason.OK
    line.append(facts.rdma_reason or "?", style="green" if usable else "yellow")
    line.append(f"  {endpoint}", style="dim")
    cpu, memory = facts.rates.get("cpu_s"), facts.gauges.get("resident_bytes", 0.0)
    line.append(f"\norbit {facts.version or '?'}", style="dim")
    if memory:
        fds = facts.gauges.get("open_fds", 0.0)
        line.append(f"  memory {_bytes(memory)}  descriptors {fds:.0f}", style="dim")
    if cpu is not None:
        line.append(f"  cpu {cpu * 100:.0f} %", style="dim")
    if facts.interval_s is not None:
        line.append(f"  rates over {facts.interval_s:.1f} s", style="dim")
    if problem:
        line.append(f"\n{problem}; trying again", style="bold red")
    return line


def _transports(facts: TopFacts) -> Table:
    table = _table("path", "fetched/s", "fetched", "leases", "links", "msg out/s", "in/s")
    for row in facts.transports:
        table.add_row(
            row.name,
            _rate_bytes(row.fetched_bytes_per_s),
            _bytes(row.fetched_bytes),
            str(row.leases),
            str(row.links),
            _rate(row.frames_out_per_s),
            _rate(row.frames_in_per_s),
        )
    return table


def _decisions(facts: TopFacts, rows: int) -> Table:
    table = _table("decided by", "path", "reason", "count", "per s", left=3)
    for row in facts.decisions[:rows]:
        bad = row.side == "fallback" or (row.path == "tcp" and row.reason not in _EXPECTED)
        style = "yellow" if bad else ""
        cells = (row.side, row.path, row.reason, str(row.count), _rate(row.per_s))
        table.add_row(*cells, style=style)
    if not facts.decisions:
        table.add_row("nobody yet", style="dim")
    if (left_out := len(facts.decisions) - rows) > 0:
        table.add_row(f"{left_out} more", style="dim")
    return table


def _work(facts: TopFacts, *, lines: bool) -> RenderableType:
    """`lines`: one for each, where there is room for them beside the tables."""
    pairs = _pairs(facts)
    if lines:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, text in pairs:
            table.add_row(name, text)
        return table
    flowing = Text()
    for name, text in pairs:
        flowing.append(name, style="cyan").append(f" {text}   ".replace(" ", "\u00a0", 1))
    return flowing


def _pairs(facts: TopFacts) -> list[tuple[str, str]]:
    gauges, rates = facts.gauges, facts.rates
    held, armed = gauges["leases_held"], gauges["leases_armed"]
    ended, reaped = _rate(rates["leases_ended"]), _rate(rates["leases_reaped"])
    queued, waiting_sends = gauges["queued_frames"], gauges["waiting_sends"]
    leased = _bytes(gauges["leased_bytes"])
    pairs = [
        ("sessions", f"{gauges['sessions']:.0f}"),
        ("slots", f"{gauges['slots']:.0f}, {_bytes(gauges['staged_bytes'])}"),
        ("leases held", f"{held:.0f}, {armed:.0f} with a deadline, {leased}"),
        ("leases ended", f"{ended}/s, reaped {reaped}/s"),
        ("leases held here", f"{gauges['leases_held_here']:.0f}"),
        ("calls", f"{_rate(rates['calls_served'])}/s, {gauges['pending_calls']:.0f} wait"),
        (
            "sends",
            f"{queued:.0f} queued, {waiting_sends:.0f} wait, {_rate(rates['sends_failed'])}/s fail",
        ),
    ]
    if facts.rdma_reason == PathReason.OK or gauges["queue_pairs"]:
        active, age_s = gauges["grants_active"], gauges["grant_age_s"]
        oldest = f", oldest {_seconds(age_s)}" if active else ""
        pairs += [
            ("grants", f"{active:.0f} active{oldest}, {_rate(rates['grants'])}/s"),
            ("queue pairs", f"{gauges['queue_pairs']:.0f}, {_rate(rates['aborts'])}/s killed"),
            ("READ p50, p99", f"{_seconds(facts.read_p50_s)}, {_seconds(facts.read_p99_s)}"),
        ]
    if any(row.name.startswith("max_") for row in facts.budgets):
        running, moved = gauges["requests_running"], _rate_bytes(rates["moved_bytes"])
        pairs.append(("engine", f"{running:.0f} running, {_rate(rates['requests'])}/s, {moved}"))
    return pairs


def _budgets(budgets: Sequence[BudgetRow], rows: int, *, idle: bool) -> Table:
    """The fullest ones. `idle`: also those of which nothing is in use."""
    busy = [row for row in budgets if idle or row.used or row.waiting]
    fullest = sorted(busy, key=lambda row: (-row.waiting, -row.part))[:rows]
    shown = [row for row in busy if row in fullest]  # each keeps its place from look to look
    wait = any(row.waiting for row in shown)
    table = _table("budget", "", "in use", "limit", *(["waiting"] if wait else []), left=2)
    for row in shown:
        full = row.part >= _FULL_PART or row.waiting
        style = "red" if full else "yellow" if row.part >= _WARN_PART else "green"
        amount = _bytes if row.in_bytes else _count
        cells: list[RenderableType] = [
            row.name.removeprefix("max_"),
            Text(_bar(row.part), style=style),
        ]
        cells += [amount(row.used), amount(row.limit)]
        if wait:
            cells.append(Text(str(row.waiting), style="red" if row.waiting else "dim"))
        table.add_row(*cells)
    if left_out := len(budgets) - len(shown):
        less = "with more left" if len(shown) < len(busy) else "idle"
        table.add_row(f"{left_out} {less}", style="dim")
    return table


def _rails(rails: Sequence[RailRow], rows: int) -> Table:
    """The paused ones first where not all have room."""
    table = _table("rail", "", "in flight", "bytes/s", "keys left", left=2)
    first = sorted(rails, key=lambda row: row.active)[:rows]
    for row in (row for row in rails if row in first):
        low = row.keys_left is not None and row.keys_left < _KEYS_LOW
        keys = _NOTHING if row.keys_left is None else f"{row.keys_left * 100:.1f} %"
        table.add_row(
            f"{row.device}:{row.port}",
            Text("active", style="green") if row.active else Text(_paused(row), style="bold red"),
            _bytes(row.in_flight_bytes),
            _rate_bytes(row.bytes_per_s),
            Text(keys, style="red" if low else ""),
        )
    if (left_out := len(rails) - rows) > 0:
        table.add_row(f"{left_out} more", style="dim")
    return table


def _paused(row: RailRow) -> str:
    return f"paused: {row.reason}" if row.reason else "paused"


def _retained(facts: TopFacts) -> Text:
    kept = facts.retained
    if not kept.anything:
        return Text("retained  nothing", style="dim")
    text = f"retained  {kept.pieces} pieces, {_bytes(kept.nbytes)}, oldest {_duration(kept.age_s)}"
    if kept.device_bytes:
        text += f"; {_bytes(kept.device_bytes)} that no device has let go of"
    return Text(text, style="bold red")


def _table(*headings: str, left: int = 1) -> Table:
    """The first `left` columns are words, the others figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold cyan")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=True)
    return table


def _bar(part: float) -> str:
    filled = round(part * _BAR)
    if part > 0 and not filled:
        filled = 1
    return "█" * filled + "░" * (_BAR - filled)


def _bytes(value: float) -> str:
    return human_bytes(round(value)).replace(" bytes", " B")


def _count(value: float) -> str:
    return f"{value:.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.0f}" if value >= 100 or not value else f"{value:.1f}"


def _rate_bytes(per_s: float | None) -> str:
    if per_s is None:
        return _NOTHING
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if per_s >= size:
            return f"{per_s / size:.2f} {unit}"
    return f"{per_s:.0f} B/s"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if hours < 1:
        return f"{minutes} min {whole % 60:02d} s"
    return f"{hours} h {minutes % 60:02d} min" if days < 1 else f"{days} d {hours % 24} h"
