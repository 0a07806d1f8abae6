"""The configuration tree: checked once, pins of the environment win, typos are named."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.config import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_THRESHOLD,
    EP_IDLE_TIMEOUT_FLOOR,
    LEASE_TIMEOUT_FLOOR,
    EngineConfig,
    MessagingConfig,
    NodeConfig,
    RdmaConfig,
    RdmaPoolConfig,
    RendezvousConfig,
    TimeoutConfig,
    _pages_max,
    lab_environment,
    resolve,
)
from orbit.errors import ConfigError
from orbit.memory.pages import PAGE_BYTES, page_range
from orbit.model import Transport


def test_defaults_are_loopback_auto_and_no_secret() -> None:
    config = resolve(NodeConfig(), {})
    assert config.listen == "127.0.0.1:0"
    assert config.transport is Transport.AUTO
    assert config.secret is None
    assert config.rendezvous.enabled
    assert not config.rdma.pinned


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " on "])
def test_kill_switch_fires_on_its_four_words(text: str) -> None:
    config = resolve(NodeConfig(), {"ORBIT_RDMA_RENDEZVOUS_DISABLE": text})
    assert not config.rendezvous.enabled


@pytest.mark.parametrize("text", ["", "0", "false", "no", "off", "ture", "2", "enabled"])
def test_kill_switch_does_not_fire_on_anything_else(text: str) -> None:
    assert resolve(NodeConfig(), {"ORBIT_RDMA_RENDEZVOUS_DISABLE": text}).rendezvous.enabled


def test_the_switch_in_code_cannot_be_undone_by_the_environment() -> None:
    config = NodeConfig(rendezvous=RendezvousConfig(enabled=False))
    resolved = resolve(config, {"ORBIT_RDMA_RENDEZVOUS_DISABLE": "0"})
    assert not resolved.rendezvous.enabled


def test_the_environment_wins_over_code() -> None:
    config = NodeConfig(
        transport="tcp",
        rdma=RdmaConfig(
            device="a", port=1, gid_index=1, pkey=0xFFFF, whitelist=("a",), blacklist=("b",)
        ),
    )
    env = {
        "ORBIT_DEVICE": "rxe0",
        "ORBIT_PORT": "2",
        "ORBIT_GID_INDEX": "3",
        "ORBIT_PKEY": "0x8001",
        "ORBIT_TRANSPORT": "RDMA",
        "ORBIT_RDMA_WHITELIST": "rxe0, rxe1,",
        "ORBIT_RDMA_BLACKLIST": "",
    }
    resolved = resolve(config, env)
    assert resolved.transport is Transport.RDMA
    rdma = resolved.rdma
    assert (rdma.device, rdma.port, rdma.gid_index, rdma.pkey) == ("rxe0", 2, 3, 0x8001)
    assert (rdma.whitelist, rdma.blacklist) == (("rxe0", "rxe1"), ())
    assert rdma.pinned


@pytest.mark.parametrize(
    "env",
    [
        {"ORBIT_PORT": "one"},
        {"ORBIT_PORT": "0"},
        {"ORBIT_GID_INDEX": "-1"},
        {"ORBIT_PKEY": "0x10000"},
        {"ORBIT_TRANSPORT": "infiniband"},
    ],
)
def test_a_bad_pin_is_an_error_that_names_it(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(NodeConfig(), env)
    value = next(iter(env.values()))
    assert value in str(caught.value) or str(int(value, 0)) in str(caught.value)


def test_a_service_link_is_not_a_port(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "orbit"):
        config = resolve(NodeConfig(), {"ORBIT_PORT": "tcp://10.0.0.1:80"})
    assert config.rdma.port is None
    assert "service link" in caplog.text


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ORBIT_DEVISE", "ORBIT_DEVICE"),
        ("ORBIT_GID_INDX", "ORBIT_GID_INDEX"),
        ("ORBIT_RDMA_DISABLE", "ORBIT_RDMA_RENDEZVOUS_DISABLE"),
        ("ORBIT_TRANSPROT", "ORBIT_TRANSPORT"),
    ],
)
def test_an_unknown_name_is_a_warning_with_the_nearest(
    name: str, nearest: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "orbit"):
        resolve(NodeConfig(), {name: "x"})
    assert name in caplog.text
    assert nearest in caplog.text


def test_names_of_the_build_and_the_lab_are_no_typos(caplog: pytest.LogCaptureFixture) -> None:
    env = {"ORBIT_LAB": "1", "ORBIT_LAB_HOSTS": "2", "ORBIT_RESULTS": "x", "HOME": "y"}
    with caplog.at_level(logging.WARNING, "orbit"):
        resolve(NodeConfig(), env)
    assert not caplog.records


def test_lab_environment() -> None:
    assert lab_environment({}) is None
    lab = lab_environment({"ORBIT_LAB": "1", "ORBIT_LAB_HOSTS": "2", "ORBIT_LAB_RAILS": "3"})
    assert lab is not None
    assert (lab.hosts, lab.rails) == (2, 3)


def test_secret_is_bytes_after_resolve_and_never_shown() -> None:
    config = NodeConfig(secret="hunter2")
    assert resolve(config, {}).secret == b"hunter2"
    assert "hunter2" not in repr(config)


def test_secret_file_loses_only_its_final_newline(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  spaced key \r\n")
    assert resolve(NodeConfig(secret_file=path), {}).secret == b"  spaced key "


@pytest.mark.parametrize("content", [None, b"", b"\n"])
def test_a_secret_file_that_holds_none_is_an_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="secret_file"):
        resolve(NodeConfig(secret_file=path), {})


@pytest.mark.parametrize(
    "build",
    [
        lambda: NodeConfig(secret=""),
        lambda: NodeConfig(secret="a", secret_file="b"),
        lambda: NodeConfig(worker_id=0),
        lambda: NodeConfig(worker_id=1 << 64),
        lambda: NodeConfig(transport="udp"),
        lambda: RdmaConfig(port=0),
        lambda: RdmaConfig(bulk_width=True),
        lambda: RendezvousConfig(lease_timeout=0),
        lambda: RendezvousConfig(inline_max_bytes=1 << 20),
        lambda: TimeoutConfig(close_s=float("nan")),
        lambda: TimeoutConfig(call_s="3"),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_work_are_refused_at_construction(build: object) -> None:
    assert callable(build)
    with pytest.raises(ConfigError):
        build()


def test_a_tiny_lease_timeout_is_clamped_to_what_the_wire_can_say() -> None:
    config = NodeConfig(rendezvous=RendezvousConfig(lease_timeout=1e-6))
    assert resolve(config, {}).rendezvous.lease_timeout == 0.001


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("config", "knob", "default"),
    [
        (MessagingConfig, "eager_max_bytes", DEFAULT_THRESHOLD),
        (RendezvousConfig, "staged_fetch_timeout", None),
        (RendezvousConfig, "staged_payload_max", None),
        (RendezvousConfig, "rdma_min_bytes", 64 * KIB),
        (RendezvousConfig, "enabled", True),
        (RendezvousConfig, "lease_timeout", 30.0),
        (RdmaPoolConfig, "initial_arena_bytes", 64 * MIB),
        (RdmaPoolConfig, "max_arena_bytes", 1024 * MIB),
        (RdmaPoolConfig, "dedicated_arena_min", 64 * MIB),
        (RdmaPoolConfig, "registered_bytes_budget", 1024 * MIB),
        (RdmaPoolConfig, "arena_reclaim_after", None),
        (RdmaPoolConfig, "retain_arena_bytes", 64 * MIB),
        (RdmaConfig, "shutdown_timeout", 30.0),
        (RdmaConfig, "drop_dereg_timeout", 30.0),
        (MessagingConfig, "ep_idle_timeout", None),
        (MessagingConfig, "eager_endpoints", False),
        (EngineConfig, "host_memory", "direct"),
        (EngineConfig, "device_mask", None),
        (EngineConfig, "preferred_numa_node", None),
        (EngineConfig, "block_bytes", 64 * KIB),
        (EngineConfig, "read_slices_max", 64),
        (EngineConfig, "write_slices_max", 32),
        (EngineConfig, "num_lanes", 2),
        (EngineConfig, "progress", "event"),
        (EngineConfig, "max_endpoints", 64),
        (EngineConfig, "max_grants", 64),
        (EngineConfig, "max_send_wr", 16),
        (EngineConfig, "max_cqes", 1024),
        (EngineConfig, "max_direct_bytes", 64 * MIB),
        (EngineConfig, "max_staging_bytes", 64 * MIB),
        (EngineConfig, "max_cached_mrs", 64),
        (EngineConfig, "max_cached_mr_bytes", 64 * MIB),
        (EngineConfig, "max_window_key_indices", 65_536),
        (EngineConfig, "teardown_timeout", 30.0),
        (EngineConfig, "monitor_interval", 1.0),
    ],
)
def test_a_default_of_the_table(config: type, knob: str, default: object) -> None:
    found = getattr(config(), knob)
    assert (found, type(found)) == (default, type(default))


def test_the_tree_holds_the_tables_values() -> None:
    config = NodeConfig()
    assert config.rendezvous == RendezvousConfig()
    assert config.rdma == RdmaConfig()
    assert config.rdma.pool == RdmaPoolConfig()
    assert config.messaging == MessagingConfig()
    assert (EP_IDLE_TIMEOUT_FLOOR, LEASE_TIMEOUT_FLOOR) == (0.5, 0.001)


def test_a_staged_payload_is_large_enough_for_rdma_from_its_first_byte() -> None:
    rdma_min_bytes = RendezvousConfig().rdma_min_bytes
    assert rdma_min_bytes <= DEFAULT_THRESHOLD < DEFAULT_CHUNK_SIZE
    assert (DEFAULT_THRESHOLD, DEFAULT_CHUNK_SIZE) == (256 * KIB, 512 * KIB)


@pytest.mark.parametrize(("above", "warnings"), [(0, 0), (1, 1)])
def test_thresholds_in_the_wrong_order_are_warned_of(
    above: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    rendezvous = RendezvousConfig(rdma_min_bytes=DEFAULT_THRESHOLD + above)
    with caplog.at_level(logging.WARNING, "orbit"):
        resolve(NodeConfig(rendezvous=rendezvous), {})
    assert len(caplog.records) == warnings
    assert all("rdma_min_bytes" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "build",
    [
        lambda: RdmaPoolConfig(initial_arena_bytes=4095),
        lambda: RdmaPoolConfig(initial_arena_bytes=2 * MIB, max_arena_bytes=MIB),
        lambda: RdmaPoolConfig(dedicated_arena_min=0),
        lambda: RdmaPoolConfig(registered_bytes_budget=-1),
        lambda: RdmaPoolConfig(arena_reclaim_after=0),
        lambda: RdmaConfig(shutdown_timeout=0),
        lambda: RdmaConfig(drop_dereg_timeout=-1),
        lambda: RendezvousConfig(staged_fetch_timeout=0),
        lambda: RendezvousConfig(staged_payload_max=-1),
        lambda: RendezvousConfig(rdma_min_bytes=1.5),  # type: ignore[arg-type]
    ],
)
def test_values_of_the_table_are_checked(build: object) -> None:
    assert callable(build)
    with pytest.raises(ConfigError):
        build()


def test_resolve_is_idempotent() -> None:
    once = resolve(NodeConfig(secret="s", advertise="a:1"), {})
    assert resolve(once, {}) == once == replace(once)


# --- the engine's part ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("node", None),
        ("host_memory", "pinned"),
        ("device_mask", 0),
        ("device_mask", 1 << 64),
        ("preferred_numa_node", -1),
        ("block_bytes", 0),
        ("read_slices_max", 65),
        ("write_slices_max", 0),
        ("num_lanes", 17),
        ("progress", "spin"),
        ("max_endpoints", 0),
        ("max_grants", 0),
        ("max_send_wr", 3),
        ("max_cqes", 15),
        ("max_direct_bytes", 0),
        ("max_staging_bytes", 1.5),
        ("max_cached_mrs", 0),
        ("max_cached_mr_bytes", True),
        ("max_window_key_indices", 0),
        ("teardown_timeout", 0),
        ("monitor_interval", float("inf")),
    ],
)
def test_an_engines_value_that_cannot_work_is_named(knob: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{knob: value})  # type: ignore[arg-type]
    assert caught.value.knob == f"engine.{knob}"


def pinned_bytes(address: int, nbytes: int, rails: int) -> int:
    """What a region that peers may reach takes of the budget: two views on every device."""
    return 2 * rails * page_range(address, nbytes)[1]


@pytest.mark.parametrize(("rails", "allowed"), [(1, 32 * MIB), (2, 16 * MIB)])
def test_the_default_budget_of_registrations_has_a_cliff(rails: int, allowed: int) -> None:
    limit = EngineConfig().max_cached_mr_bytes
    assert pinned_bytes(0, allowed, rails) <= limit < pinned_bytes(0, allowed + 1, rails)


@given(st.integers(1, 1 << 40), st.integers(1, 64), st.integers(0, 1 << 46))
def test_budgets_for_bytes_hold_them_wherever_they_lie(
    nbytes: int, rails: int, address: int
) -> None:
    config = EngineConfig.for_bytes(nbytes, rails=rails)
    assert config.max_cached_mr_bytes >= pinned_bytes(address, nbytes, rails)
    assert config.max_cached_mrs >= 2 * rails
    assert min(config.max_direct_bytes, config.max_staging_bytes) >= nbytes


@given(st.lists(st.integers(1, 4 * PAGE_BYTES), min_size=1, max_size=12), st.data())
def test_budgets_for_regions_hold_them_however_they_are_divided(
    sizes: list[int], data: st.DataObject
) -> None:
    free = EngineConfig.for_bytes(sum(sizes), regions=len(sizes), max_cached_mrs=1)
    assert free.max_cached_mr_bytes == EngineConfig().max_cached_mr_bytes
    pages = _pages_max(sum(sizes), len(sizes))
    lies = [data.draw(st.integers(0, PAGE_BYTES - 1)) for _ in sizes]
    taken = sum(page_range(at, size)[1] for at, size in zip(lies, sizes, strict=True))
    assert taken <= pages * PAGE_BYTES
    # And none fewer would do: as many as can lie across a border do.
    last = PAGE_BYTES - 1
    spread = min(len(sizes) - 1, sum(sizes) - len(sizes))
    worst = [2] * spread + [1] * (len(sizes) - 1 - spread)
    worst.append(sum(sizes) - sum(worst))
    assert sum(page_range(last, size)[1] for size in worst) == pages * PAGE_BYTES


def test_budgets_for_many_small_regions() -> None:
    config = EngineConfig.for_bytes(200 * MIB, rails=2, regions=1000)
    assert config.max_cached_mrs == 1000 * 4
    pages = 200 * MIB // PAGE_BYTES + 2 * 1000 - 1  # all but one two pages for two bytes of them
    assert pages * PAGE_BYTES * 4 - 4 * PAGE_BYTES <= config.max_cached_mr_bytes
    assert config.max_cached_mr_bytes <= pages * PAGE_BYTES * 4


def test_budgets_for_few_bytes_are_the_defaults() -> None:
    assert EngineConfig.for_bytes(MIB) == EngineConfig()


def test_budgets_for_bytes_can_be_changed() -> None:
    config = EngineConfig.for_bytes(1 << 30, rails=2, max_staging_bytes=MIB, num_lanes=1)
    assert (config.max_staging_bytes, config.num_lanes) == (MIB, 1)
    assert config.max_direct_bytes == 1 << 30


@pytest.mark.parametrize(("nbytes", "rails"), [(0, 1), (-1, 1), (1, 0), (1, 65)])
def test_budgets_for_what_cannot_be(nbytes: int, rails: int) -> None:
    with pytest.raises(ConfigError):
        EngineConfig.for_bytes(nbytes, rails=rails)
    with pytest.raises(ConfigError):
        EngineConfig.for_bytes(2, regions=3)


def test_an_engines_node_has_what_the_engine_needs() -> None:
    node = NodeConfig(
        listen="127.0.0.1:7", rdma=RdmaConfig(device="rxe0", progress="spin", service_level=3)
    )
    config = EngineConfig(
        node=node,
        num_lanes=3,
        progress="polling",
        max_endpoints=5,
        max_send_wr=7,
        max_cqes=99,
        max_window_key_indices=11,
        monitor_interval=0.5,
    )
    expected = replace(
        node.rdma,
        bulk_width=3,
        num_lanes=3,
        progress="polling",
        max_endpoints=5,
        max_send_wr=7,
        max_cqes=99,
        window_key_indices_max=11,
        monitor_interval=0.5,
    )
    assert config.node_config() == replace(node, rdma=expected)


def test_an_engines_node_can_register_as_much_as_the_engine_may() -> None:
    small = NodeConfig(rdma=RdmaConfig(pool=RdmaPoolConfig(registered_bytes_budget=MIB)))
    config = EngineConfig(node=small, max_cached_mr_bytes=5 * MIB, max_staging_bytes=2 * MIB)
    assert config.node_config().rdma.pool.registered_bytes_budget == 7 * MIB
    assert EngineConfig().node_config().rdma.pool == RdmaPoolConfig()  # a larger one stays
