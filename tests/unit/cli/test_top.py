"""What `orbit top` makes of two scrapes, and that it fits on the screen."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console

from orbit.cli.top_facts import TopFacts, facts_of
from orbit.cli.top_screen import screen, waiting
from orbit.scraping import Snapshot

MIB = 1 << 20
Row = tuple[Mapping[str, str], float]
RAIL = {"port": "1", "nic": "0"}
START = "process_start_time_seconds"


def snapshot(at: float, **rows: float | list[Row]) -> Snapshot:
    samples = {
        name: tuple(row) if isinstance(row, list) else (({}, row),) for name, row in rows.items()
    }
    return Snapshot(samples, at)


def taken(at: float, grown: int = 0, **rows: float | list[Row]) -> Snapshot:
    """A node with rails at work, `grown` times one step further."""
    path = "orbit_rendezvous_rdma_path_total"
    given: dict[str, float | list[Row]] = {
        START: 5.0,
        "orbit_node_info": [({"node": "ab", "version": "1", "rdma": "ok"}, 1)],
        "orbit_rendezvous_fetched_bytes_total": [({"path": "rdma"}, 1000 + 3e9 * grown)],
        path: [
            ({"side": "owner", "path": "tcp", "reason": "budget"}, 900),
            ({"side": "consumer", "path": "rdma", "reason": "ok"}, 10 + 20 * grown),
        ],
        "orbit_rendezvous_fallbacks_total": [({"reason": "get_failed"}, 1)],
        "orbit_engine_budget_in_use": [({"budget": "max_grants"}, 63), ({"budget": "max_x"}, 0)],
        "orbit_engine_budget_limit": [({"budget": "max_grants"}, 64), ({"budget": "max_x"}, 8)],
        "orbit_engine_budget_waiting": [({"budget": "max_grants"}, 7)],
        "orbit_engine_rail_active": [
            ({"device": "mlx5_0", **RAIL}, 1),
            ({"device": "mlx5_1", **RAIL}, 0),
        ],
        "orbit_engine_rail_paused": [
            ({"device": "mlx5_1", **RAIL, "reason": "device_failed"}, 0),
            ({"device": "mlx5_1", **RAIL, "reason": "port_down"}, 1),
        ],
        "orbit_engine_rail_planned_bytes_total": [({"device": "mlx5_0", **RAIL}, 4e6 * grown)],
        "orbit_engine_rail_in_flight_bytes": [({"device": "mlx5_0", **RAIL}, MIB)],
        "orbit_rdma_device_window_keys_remaining": [({"device": "mlx5_0"}, 5)],
        "orbit_rdma_device_window_keys_limit": [({"device": "mlx5_0"}, 100)],
        "orbit_rdma_grants_active": 12.0,
        "orbit_rdma_grant_age_seconds": 2.5,
        "orbit_rdma_grants_total": 40.0 * grown,
        "orbit_rendezvous_rdma_get_duration_seconds_bucket": [
            ({"le": "0.001"}, 10.0),
            ({"le": "0.003"}, 10.0 + 100 * grown),
            ({"le": "+Inf"}, 10.0 + 100 * grown),
        ],
    }
    return snapshot(at, **(given | rows))


def shown(facts: TopFacts, width: int, problem: str = "", height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(screen(facts, "127.0.0.1:9464", width, problem, height))
    return console.export_text().splitlines()


def test_rates_are_of_what_happened_between_the_two() -> None:
    facts = facts_of(taken(102.0, 1), taken(100.0))
    assert facts.interval_s == 2.0
    assert facts.transports[0].fetched_bytes_per_s == 1.5e9
    assert facts.rates["grants"] == 20.0
    assert [row.bytes_per_s for row in facts.rails] == [2e6, 0.0]
    first = facts.decisions[0]  # the one that happens now stands before those that happened
    assert (first.side, first.count, first.per_s) == ("consumer", 30, 10.0)
    assert facts.read_p50_s == pytest.approx(0.002)  # not of the ten quick ones before


def test_one_look_has_no_rates() -> None:
    facts = facts_of(taken(100.0))
    assert facts.interval_s is None
    assert {*facts.rates.values(), facts.transports[0].fetched_bytes_per_s} == {None}


def test_a_restarted_node_has_no_rates_either() -> None:
    facts = facts_of(taken(102.0, 1, **{START: 6.0}), taken(100.0))
    assert facts.interval_s is None
    # Of a process that does not tell its start: no count goes down.
    assert facts_of(taken(102.0), taken(100.0, 1)).rates["grants"] is None


@pytest.mark.parametrize("width", [80, 120])
def test_everything_fits_and_nothing_is_cut(width: int) -> None:
    lines = shown(facts_of(taken(102.0, 1), taken(100.0)), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\u2026" not in text
    for wanted in (
        "node ab",
        "1.50 GB/s",
        "12 active, oldest 2.50 s, 20.0/s",
        "get_failed",
        "mlx5_0:1 active 1.0 MiB 2.00 MB/s 5.0 %",
        "mlx5_1:1 paused: port_down",
        "retained nothing",
    ):
        assert wanted in " ".join(text.split()), wanted
    (grants,) = [line for line in lines if "██" in line]
    assert grants.split()[-3:] == ["63", "64", "7"]
    assert ("1 idle" in text) == (width == 80)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 24)])
def test_a_low_screen_keeps_what_matters(width: int, height: int) -> None:
    names = [f"max_{name}" for name in "abcdefghijklmnop"]
    limits: list[Row] = [({"budget": name}, 100) for name in names]
    used: list[Row] = [({"budget": name}, 90 if name == "max_o" else 1) for name in names]
    waiting: list[Row] = [({"budget": "max_p"}, 3)]
    budgets = {
        "orbit_engine_budget_limit": limits,
        "orbit_engine_budget_in_use": used,
        "orbit_engine_budget_waiting": waiting,
    }
    lines = shown(facts_of(taken(102.0, 1, **budgets), taken(100.0)), width, height=height)
    assert len(lines) <= height
    text = "\n".join(lines)
    for wanted in ("o   ", "p   ", "with more left", "mlx5_1:1", "retained  nothing"):
        assert wanted in text, wanted


def test_what_is_kept_for_ever_stands_on_top() -> None:
    kept = {"orbit_memory_retained": 2.0, "orbit_memory_retained_bytes": 3.0 * MIB}
    facts = facts_of(taken(102.0, orbit_memory_retained_age_seconds=7200.0, **kept))
    assert "retained  2 pieces, 3.0 MiB, oldest 2 h 00 min" in shown(facts, 80)[:4]


def test_a_node_without_rdma_is_short() -> None:
    info: list[Row] = [({"node": "ab", "version": "1", "rdma": "no_device"}, 1)]
    lines = shown(facts_of(snapshot(1.0, orbit_node_info=info)), 120)
    text = "\n".join(lines)
    assert "rdma: no_device" in text
    assert "nobody yet" in text
    assert not [word for word in ("rail", "budget", "grants", "READ") if word in text]


def test_a_foreign_endpoint_breaks_nothing() -> None:
    assert "node ?" in "\n".join(shown(facts_of(snapshot(1.0, up=1.0)), 80))


def test_a_problem_is_one_line() -> None:
    lines = shown(facts_of(taken(1.0)), 80, "connection refused")
    assert [line for line in lines if "refused" in line] == ["connection refused; trying again"]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(waiting("h:1", "connection refused"))
    assert "connection refused; trying again" in console.export_text()
