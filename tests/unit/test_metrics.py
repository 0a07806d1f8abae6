"""What a scrape gets, and that nothing of a node is left out of it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import threading
import time
import urllib.error
import urllib.request
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import orbit
from orbit import metrics
from orbit.events import DURATION_BOUNDS_S, DurationCounts
from orbit.model import PathName, PathReason, WorkerId
from orbit.protocol.slots import SlotStatistics
from orbit.runtime.engine.core import EngineStatistics
from orbit.runtime.messaging.dispatch import DispatchStatistics, HandlerStatistics
from orbit.runtime.messaging.lanes import LaneStatistics
from orbit.runtime.messaging.statistics import LinkReport, MessagingStatistics, Traffic
from orbit.runtime.retained import Retained
from orbit.transport.interface import MemoryStatistics
from orbit.transport.messages import LinkStatistics
from orbit.transport.path_statistics import PathStatistics
from orbit.transport.rails import RailFacts, RailStatistics

HANDLER = HandlerStatistics(
    "echo",
    "ordered",
    requests=5,
    failures=1,
    in_flight=2,
    seconds=0.5,
    buckets=(1, 2, *(0,) * (len(DURATION_BOUNDS_S) - 2), 1),
    lanes=LaneStatistics(lanes=3, depth=4),
)
RDMA = PathStatistics(
    counts={"reads": 31},
    grants_active=32,
    queue_pairs=33,
    windows_parked=34,
    window_keys_used=35,
    window_keys_remaining=36,
    registered_bytes=37,
    unknown_completions=38,
    crossings=39,
    retained_bytes=40,
    bind_s=0.25,
    receipt_s=0.375,
    grant_age_s=1.5,
    device_window_keys={"mlx5_0": (45, 46)},
)
STATISTICS = orbit.NodeStatistics(
    slots=SlotStatistics(
        1,
        2,
        0,
        0,
        0,
        0,
        staged_bytes=16,
        leased_bytes=17,
        leases_armed=18,
        slots_expired=19,
        leases_by_path={PathName.RDMA: 20, PathName.TCP: 21},
    ),
    leases_held=3,
    sessions=4,
    tasks=5,
    registered_bytes=6,
    rdma_reason=PathReason.OK,
    rdma_detail="",
    retained=(),
    counters={
        'orbit_rendezvous_rdma_path_total{path="tcp",reason="ok",side="owner"}': 7,
        'orbit_rendezvous_rdma_path_total{path="rdma",reason="ok",side="owner"}': 8,
        "orbit_retained_bytes_total": 9,
        'orbit_of_tomorrow_total{kind="new"}': 10,
    },
    messaging=MessagingStatistics(
        pending_calls=11,
        links=(
            LinkReport(WorkerId(2), PathName.TCP, 0, 0, LinkStatistics(credits=60)),
            LinkReport(WorkerId(3), PathName.TCP, 0, 0, LinkStatistics(credits=4)),
        ),
        traffic=(Traffic(PathName.TCP, frames_sent=12, frames_received=13, bytes_sent=14),),
    ),
    dispatch=DispatchStatistics(draining=True, guards=15, handlers=(HANDLER,)),
    memory=MemoryStatistics(
        registered_bytes=6,
        budget_bytes=22,
        arena_bytes=400,
        arena_bytes_used=100,
        arenas=23,
        regions=24,
        registrations={"arena": 25, "external": 26},
    ),
    rdma=RDMA,
    rdma_get_seconds=DurationCounts((3, *(0,) * len(DURATION_BOUNDS_S)), 0.125),
)


ENGINE = EngineStatistics(
    regions=51,
    running=52,
    budgets={"max_grants": (53, 54), "max_direct_bytes (source)": (55, 56)},
    waiting={"max_grants": 57},
    outcomes={"succeeded": 58, "unquiesced": 59},
    in_flight_bytes=60,
    bytes_moved=61,
    rail_bytes={0: (71, 72)},
    rails=RailStatistics(
        rails=(
            RailFacts(0, "mlx5_0", 1, "::1", active=True),
            RailFacts(2, "mlx5_1", 1, "::2", active=False, reason=orbit.PathReason.PORT_DOWN),
        ),
        monitor_ticks=62,
        route_queries=63,
        route_recoveries=64,
        progress_recoveries=65,
        budgets={"completion_entries": (66, 67)},
    ),
)


MLX5_1 = {"device": "mlx5_1", "port": "1", "nic": "2"}


class Fixed:
    """A node that never changes."""

    identity = orbit.PeerIdentity(0xAB, 1)

    def __init__(self, statistics: orbit.NodeStatistics = STATISTICS) -> None:
        self._statistics = statistics

    def statistics(self) -> orbit.NodeStatistics:
        return self._statistics


class FixedEngine:
    """An engine that never changes, but for the age of what it keeps."""

    def __init__(self, statistics: EngineStatistics = ENGINE) -> None:
        self._statistics = statistics

    def statistics(self) -> EngineStatistics:
        return self._statistics

    def retained(self) -> tuple[Retained, ...]:
        since = time.monotonic()
        return (
            Retained("memory of a transfer", 68, "late", since - 3600, None),
            Retained("memory of a transfer", 2, "late", since, None),
        )


def families(
    statistics: orbit.NodeStatistics, engine: metrics.EngineReporting | None = None
) -> list[Metric]:
    text = generate_latest(scraped(Fixed(statistics), engine)).decode()
    return list(text_string_to_metric_families(text))


def scraped(
    node: metrics.Reporting, engine: metrics.EngineReporting | None = None
) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics.Exporter(node, engine=engine).register(registry)
    return registry


@pytest.mark.parametrize(
    ("series", "labels", "value"),
    [
        ("rendezvous_rdma_path_total", {"path": "tcp", "reason": "ok", "side": "owner"}, 7),
        ("rendezvous_rdma_path_total", {"path": "rdma", "reason": "ok", "side": "owner"}, 8),
        ("retained_bytes_total", {}, 9),
        ("of_tomorrow_total", {"kind": "new"}, 10),
        ("rendezvous_active_slots", {}, 1),
        ("rendezvous_leases_held", {}, 2),
        ("rendezvous_leases_held_here", {}, 3),
        ("sessions", {}, 4),
        ("rendezvous_leases", {"path": "rdma"}, 20),
        ("rendezvous_leases", {"path": "tcp"}, 21),
        ("rendezvous_leases_armed", {}, 18),
        ("rendezvous_staged_bytes", {}, 16),
        ("rendezvous_leased_bytes", {}, 17),
        ("rendezvous_slots_expired_total", {}, 19),
        ("rendezvous_rdma_get_duration_seconds_count", {}, 3),
        ("rendezvous_rdma_get_duration_seconds_sum", {}, 0.125),
        ("rdma_registered_bytes_budget", {}, 22),
        ("rdma_arena_utilization", {}, 0.25),
        ("rdma_arena_bytes", {}, 400),
        ("rdma_arenas", {}, 23),
        ("rdma_live_regions", {}, 24),
        ("rdma_registrations_total", {"kind": "arena"}, 25),
        ("rdma_registrations_total", {"kind": "external"}, 26),
        ("rdma_reads_total", {}, 31),
        ("rdma_bind_seconds_total", {}, 0.25),
        ("rdma_receipt_seconds_total", {}, 0.375),
        ("rdma_grants_active", {}, 32),
        ("rdma_queue_pairs", {}, 33),
        ("rdma_window_keys_remaining", {}, 36),
        ("rdma_crossings_total", {}, 39),
        ("rdma_device_window_keys_remaining", {"device": "mlx5_0"}, 45),
        ("rdma_grant_age_seconds", {}, 1.5),
        ("rdma_device_window_keys_limit", {"device": "mlx5_0"}, 46),
        ("rdma_retained_bytes", {}, 40),
        ("rdma_registered_bytes", {}, 6),
        ("messenger_pending_responses", {}, 11),
        ("transport_frames_total", {"transport": "tcp", "direction": "out"}, 12),
        ("transport_frames_total", {"transport": "tcp", "direction": "in"}, 13),
        ("transport_frame_bytes_total", {"transport": "tcp", "direction": "out"}, 14),
        ("transport_active_connections", {"transport": "tcp"}, 2),
        ("transport_credits", {"transport": "tcp"}, 64),
        ("messenger_draining", {}, 1),
        ("messenger_guards", {}, 15),
        ("messenger_handler_requests_total", {"handler": "echo", "mode": "ordered"}, 5),
        ("messenger_handler_in_flight", {"handler": "echo", "mode": "ordered"}, 2),
        ("messenger_ordered_lane_depth", {"handler": "echo", "mode": "ordered"}, 4),
        ("messenger_handler_duration_seconds_count", {"handler": "echo", "mode": "ordered"}, 4),
        ("messenger_handler_duration_seconds_sum", {"handler": "echo", "mode": "ordered"}, 0.5),
    ],
)
def test_a_series(series: str, labels: dict[str, str], value: float) -> None:
    assert scraped(Fixed()).get_sample_value(f"orbit_{series}", labels) == value


@pytest.mark.parametrize(
    ("series", "labels", "value"),
    [
        ("regions", {}, 51),
        ("requests_running", {}, 52),
        ("requests_total", {"state": "succeeded"}, 58),
        ("requests_total", {"state": "unquiesced"}, 59),
        ("moved_bytes_total", {}, 61),
        ("in_flight_bytes", {}, 60),
        ("budget_in_use", {"budget": "max_grants"}, 53),
        ("budget_limit", {"budget": "max_grants"}, 54),
        ("budget_in_use", {"budget": "max_direct_bytes (source)"}, 55),
        ("budget_limit", {"budget": "max_direct_bytes (source)"}, 56),
        ("budget_waiting", {"budget": "max_grants"}, 57),
        ("retained", {}, 2),
        ("retained_bytes", {}, 70),
        ("rail_active", {"device": "mlx5_0", "port": "1", "nic": "0"}, 1),
        ("rail_active", {"device": "mlx5_1", "port": "1", "nic": "2"}, 0),
        ("rail_paused", {**MLX5_1, "reason": "port_down"}, 1),
        ("rail_paused", {**MLX5_1, "reason": "device_failed"}, 0),
        ("rail_in_flight_bytes", {"device": "mlx5_0", "port": "1", "nic": "0"}, 71),
        ("rail_planned_bytes_total", {"device": "mlx5_0", "port": "1", "nic": "0"}, 72),
        ("rail_planned_bytes_total", {"device": "mlx5_1", "port": "1", "nic": "2"}, 0),
        ("rails_in_use", {"resource": "completion_entries"}, 66),
        ("rails_limit", {"resource": "completion_entries"}, 67),
        ("monitor_ticks_total", {}, 62),
        ("route_queries_total", {}, 63),
        ("route_recoveries_total", {}, 64),
        ("progress_recoveries_total", {}, 65),
    ],
)
def test_a_series_of_an_engine(series: str, labels: dict[str, str], value: float) -> None:
    registry = scraped(Fixed(), FixedEngine())
    assert registry.get_sample_value(f"orbit_engine_{series}", labels) == value


def test_the_oldest_of_what_an_engine_keeps_has_the_age() -> None:
    age_s = scraped(Fixed(), FixedEngine()).get_sample_value("orbit_engine_retained_age_seconds")
    assert age_s is not None
    assert age_s >= 3600


def test_what_the_process_keeps_is_told_with_its_age() -> None:
    since = time.monotonic()
    kept = (
        Retained("a region", 68, "late", since - 60, None),
        Retained("an arena", 2, "late", since, None),
    )
    registry = scraped(Fixed(replace(STATISTICS, retained=kept)))
    assert registry.get_sample_value("orbit_memory_retained") == 2
    assert registry.get_sample_value("orbit_memory_retained_bytes") == 70
    age_s = registry.get_sample_value("orbit_memory_retained_age_seconds")
    assert age_s is not None
    assert 60 <= age_s < 120


def test_a_node_says_who_it_is() -> None:
    (info,) = [f for f in families(STATISTICS) if f.name == "orbit_node_info"]
    labels = info.samples[0].labels
    assert (labels["node"], labels["rdma"]) == ("00000000000000ab", "ok")
    assert labels["version"]


def test_an_engine_without_rails_says_nothing_of_them() -> None:
    engine = FixedEngine(replace(ENGINE, rails=None))
    names = {family.name for family in families(STATISTICS, engine)}
    assert "orbit_engine_regions" in names
    assert not {name for name in names if "rail" in name or "route" in name}


def test_a_node_without_an_engine_has_none_of_its_series() -> None:
    assert not [family.name for family in families(STATISTICS) if "_engine_" in family.name]


def test_buckets_add_up() -> None:
    registry = scraped(Fixed())
    series = "orbit_messenger_handler_duration_seconds_bucket"
    labels = {"handler": "echo", "mode": "ordered"}
    found = [
        registry.get_sample_value(series, {**labels, "le": text})
        for text in (str(DURATION_BOUNDS_S[0]), str(DURATION_BOUNDS_S[1]), "10.0", "+Inf")
    ]
    assert found == [1, 3, 3, 4]


def test_the_text_form_is_valid_and_each_family_stands_once() -> None:
    found = families(STATISTICS, FixedEngine())
    names = [family.name for family in found]
    assert len(names) == len(set(names))
    undescribed = [f.name for f in found if f.documentation == metrics.UNDESCRIBED]
    assert undescribed == ["orbit_of_tomorrow"]


def test_every_series_of_the_package_is_described() -> None:
    """Whoever counts something new writes down what it means."""
    found = counted_series()
    assert found
    assert found <= metrics.HELP.keys(), sorted(found - metrics.HELP.keys())


def counted_series() -> set[str]:
    """What stands in the package as the name of a count."""
    root = Path(orbit.__file__).parent
    found: set[str] = set()
    for path in root.rglob("*.py"):
        if path.name == "series.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\Aorbit_[a-z_]+_total\Z", node.value))
    return found


def test_every_count_of_the_devices_is_described() -> None:
    from orbit.verbs.messaging.statistics import MessagesStatistics

    names = [entry.name for entry in fields(MessagesStatistics)]
    messaging = replace(STATISTICS.messaging, devices=dict.fromkeys(names, 3))
    text = generate_latest(scraped(Fixed(replace(STATISTICS, messaging=messaging)))).decode()
    assert "orbit_rdma_messages_limit_hits_total 3.0" in text
    assert "orbit_rdma_messages_links 3.0" in text
    described = [name for name in metrics.HELP if name.startswith("orbit_rdma_messages_")]
    assert len(described) == len(names)
    assert all(f"\n{series} 3.0" in text for series in described)


def test_every_count_of_the_rdma_path_is_described() -> None:
    from orbit.verbs.counters import PathCounters

    seconds = {"bind_s", "receipt_s"}
    counts = dict.fromkeys({entry.name for entry in fields(PathCounters)} - seconds, 2)
    without = {family.name for family in families(replace(STATISTICS, rdma=None))}
    found = families(replace(STATISTICS, rdma=replace(RDMA, counts=counts)))
    new = {f.name: f.documentation for f in found if f.name not in without}
    others = {entry.name for entry in fields(PathStatistics)}
    elsewhere = {"counts", "registered_bytes", "retained", "device_window_keys"}
    assert len(new) == len(counts) + len(others - elsewhere) + 2
    assert metrics.UNDESCRIBED not in new.values()
    assert {"orbit_rdma_bind_seconds", "orbit_rdma_receipt_seconds"} <= new.keys()


def test_every_described_series_is_exported_or_counted() -> None:
    """What nobody reports any more is not described either."""
    from orbit.verbs.counters import PathCounters
    from orbit.verbs.messaging.statistics import MessagesStatistics

    devices = dict.fromkeys((entry.name for entry in fields(MessagesStatistics)), 1)
    counts = dict.fromkeys((entry.name for entry in fields(PathCounters)), 1)
    everything = replace(
        STATISTICS,
        messaging=replace(STATISTICS.messaging, devices=devices),
        rdma=replace(RDMA, counts=counts),
    )
    found = families(everything, FixedEngine())
    samples = {s.name.removesuffix("_count") for f in found for s in f.samples}
    unheard = metrics.HELP.keys() - samples - counted_series()
    assert not unheard


def test_an_arena_that_is_not_there_is_not_in_use() -> None:
    memory = replace(STATISTICS.memory, arena_bytes=0, arena_bytes_used=0)
    registry = scraped(Fixed(replace(STATISTICS, memory=memory)))
    assert registry.get_sample_value("orbit_rdma_arena_utilization") == 0


def test_no_gauge_has_the_name_of_a_counters_family() -> None:
    families = [series.removesuffix("_total") for series in metrics.HELP]
    assert len(families) == len(set(families))


def test_handler_names_are_escaped() -> None:
    odd = replace(HANDLER, name='a"b\\c\nd')
    dispatch = replace(STATISTICS.dispatch, handlers=(odd,))
    text = generate_latest(scraped(Fixed(replace(STATISTICS, dispatch=dispatch)))).decode()
    labels = [
        sample.labels["handler"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "handler" in sample.labels
    ]
    assert set(labels) == {odd.name}


def test_statistics_of_a_fresh_messenger_need_no_peer() -> None:
    empty = {entry.name: entry.default for entry in fields(MessagingStatistics)}
    assert empty["links"] == ()
    fresh = replace(STATISTICS, messaging=MessagingStatistics(), dispatch=DispatchStatistics())
    assert b"orbit_messenger_pending_responses 0.0" in generate_latest(scraped(Fixed(fresh)))


def test_a_node_is_scraped_over_http_from_another_thread() -> None:
    async def main() -> None:
        async with orbit.Node(orbit.NodeConfig(transport="tcp")) as node:
            loop = asyncio.get_running_loop()
            main_thread = threading.get_ident()
            real = node.statistics
            asked: list[int] = []

            def statistics() -> orbit.NodeStatistics:
                asked.append(threading.get_ident())
                return real()

            node.statistics = statistics  # type: ignore[method-assign]
            node.handler("echo", lambda message: bytes(message.payload))
            assert await node.unary(node.identity, "echo", b"x") == b"x"
            server = metrics.start_http_server(node)
            try:
                text = await loop.run_in_executor(None, _get, server.port)
            finally:
                await loop.run_in_executor(None, server.close)
                server.close()
            wanted = 'orbit_messenger_handler_requests_total{handler="echo",mode="spawn"} 1.0'
            assert wanted in text
            assert set(asked) == {main_thread}

    asyncio.run(main())


def test_an_open_engine_is_scraped_with_its_node() -> None:
    async def main() -> None:
        tcp = orbit.NodeConfig(rdma=orbit.RdmaConfig(enabled=False))
        async with orbit.TransferEngine(orbit.EngineConfig(node=tcp)) as engine:
            await engine.register(bytearray(100))
            registry = scraped(engine.node, engine)
            assert registry.get_sample_value("orbit_engine_regions") == 1
            limit = registry.get_sample_value("orbit_engine_budget_limit", {"budget": "max_grants"})
            assert limit == orbit.EngineConfig().max_grants
            assert registry.get_sample_value("orbit_sessions") == 0

    asyncio.run(main())


def test_a_loop_that_is_gone_fails_the_scrape() -> None:
    async def main() -> metrics.Exporter:
        return metrics.Exporter(Fixed())

    exporter = asyncio.run(main())
    found: list[BaseException] = []

    def scrape() -> None:
        try:
            list(exporter.collect())
        except orbit.OrbitError as error:
            found.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    thread.join(10)
    assert [type(error) for error in found] == [orbit.ClosedError]


class Closed(Fixed):
    """A node that has ended."""

    def statistics(self) -> orbit.NodeStatistics:
        raise orbit.ClosedError("the node")


def test_a_scrape_of_a_closed_node_is_a_503() -> None:
    with metrics.start_http_server(Closed()) as server:
        with pytest.raises(urllib.error.HTTPError) as caught:
            _get(server.port)
        with caught.value as answer:
            assert (answer.code, answer.read()) == (503, b"the node is closed\n")


def test_an_engine_that_ended_leaves_its_nodes_series() -> None:
    class Ended(FixedEngine):
        def statistics(self) -> EngineStatistics:
            raise orbit.ClosedError("the engine")

    names = {family.name for family in families(STATISTICS, Ended())}
    assert "orbit_sessions" in names
    assert "orbit_engine_regions" not in names


def test_closing_does_not_wait_for_a_scrape_and_no_scrape_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop that would answer the scrape is the one that closes the server."""
    asked, found = threading.Event(), []

    def scrape(port: int) -> None:
        found.append(_get(port))

    async def main() -> threading.Thread:
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe

        def noted(*arguments: Any, **named: Any) -> asyncio.Handle:
            asked.set()
            return real(*arguments, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        server = metrics.start_http_server(Fixed())
        thread = threading.Thread(target=scrape, args=(server.port,))
        thread.start()
        assert asked.wait(10)
        server.close()
        assert not found
        return thread

    thread = asyncio.run(main())
    thread.join(10)
    assert not thread.is_alive()
    assert "orbit_sessions" in found[0]


def test_it_listens_on_loopback_and_says_when_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with metrics.start_http_server(Fixed()) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert not caplog.records
    with metrics.start_http_server(Fixed(), host="0.0.0.0") as server:
        (record,) = caplog.records
        assert f"0.0.0.0:{server.port}, to everybody" in record.getMessage()


def test_a_taken_port_is_named() -> None:
    with metrics.start_http_server(Fixed()) as server:
        with pytest.raises(orbit.ConfigError, match=f"127.0.0.1:{server.port}") as caught:
            metrics.start_http_server(Fixed(), server.port)
        assert "another process listens there" in caught.value.hint


@pytest.mark.parametrize("file", ["orbit.json", "alerts.yml"])
def test_dashboard_and_alerts_ask_for_series_that_exist(file: str) -> None:
    """Also those that a histogram is made of."""
    text = (Path(orbit.__file__).parents[1] / "docs/grafana" / file).read_text("utf-8")
    asked = {re.sub("_seconds_bucket$", "_seconds", n) for n in re.findall(r"\borbit_\w+", text)}
    assert len(asked) >= 5
    assert asked <= metrics.HELP.keys(), sorted(asked - metrics.HELP.keys())


def test_the_dashboard_is_whole() -> None:
    text = (Path(orbit.__file__).parents[1] / "docs/grafana/orbit.json").read_text("utf-8")
    dashboard = json.loads(text)
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert names == {"datasource", "instance"}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")"), target["expr"]
            assert '{instance=~"$instance"' in target["expr"]


def test_registering_twice_is_refused_and_unregistering_frees_it() -> None:
    registry = CollectorRegistry()
    exporter = metrics.Exporter(Fixed()).register(registry)
    exporter.unregister(registry)
    exporter.register(registry)
    assert registry.get_sample_value("orbit_sessions") == 4


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
