"""Opening an RDMA path: the start probe's verdicts, and a reason for everything that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from orbit.model import PathReason
from orbit.testing.waiting import until
from orbit.verbs import opening
from orbit.verbs.discovery import DeviceReport, Discovery, PortReport, Verdict
from orbit.verbs.gid_ranking import GidEntry, GidKind
from orbit.verbs.opening import open_rdma_path
from orbit.verbs.records import BIND_WINDOW, READ
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig
from tests.contract.rdma_pairs import QUICK, join, open_path, rail_of

Breakage = Callable[[ScriptedDevice], None]


def opened(
    fabric: ScriptedFabric, config: RdmaPathConfig = QUICK
) -> tuple[bool, PathReason, str, bool]:
    """Whether there is a path, the reason, the detail, and range_enforced of its first rail."""

    async def scenario() -> tuple[bool, PathReason, str, bool]:
        provider = ScriptedProvider(fabric)
        rails = [rail_of(device) for device in fabric.devices.values()]
        path, reason, detail = await open_rdma_path(provider, config, rails=rails)
        enforced = False
        if path is not None:
            enforced = path.hints[0].range_enforced
            await path.close()
        return path is not None, reason, detail, enforced

    result = asyncio.run(scenario())
    for device in fabric.devices.values():
        assert not device.counters().misuse
    return result


def assert_nothing_left(fabric: ScriptedFabric) -> None:
    for device in fabric.devices.values():
        assert device.counters().live_objects == 0


@pytest.mark.parametrize("rxe", [False, True])
def test_the_probe_finds_out_about_the_range(rxe: bool) -> None:
    fabric = ScriptedFabric(rxe=rxe)
    fabric.add_device("fake")
    found, reason, _, enforced = opened(fabric)
    assert found
    assert reason is PathReason.OK
    assert enforced is not rxe
    assert_nothing_left(fabric)


def test_require_range_refuses_a_device_that_ignores_it() -> None:
    fabric = ScriptedFabric(rxe=True)
    fabric.add_device("fake")
    found, reason, detail, _ = opened(fabric, replace(QUICK, require_range=True))
    assert not found
    assert reason is PathReason.RANGE_NOT_ENFORCED
    assert "fake" in detail
    assert_nothing_left(fabric)


def break_port(device: ScriptedDevice, more: Callable[[], None]) -> None:
    device.set_port(active=False)
    more()


BROKEN: dict[str, tuple[Breakage, PathReason]] = {
    "no capability": (lambda d: d.set_windows(supported=False), PathReason.NO_WINDOWS),
    "a capability that is not true": (
        lambda d: d.set_windows(supported=False, capability=True),
        PathReason.NO_WINDOWS,
    ),
    "a bind that fails": (lambda d: d.fail_bind(), PathReason.NO_WINDOWS),
    "a bind without an answer": (lambda d: d.lose(BIND_WINDOW), PathReason.NO_WINDOWS),
    "a READ that fails": (lambda d: d.fail(READ, 12), PathReason.DEVICE_FAILED),
    "a READ without an answer": (lambda d: d.lose(READ), PathReason.DEVICE_FAILED),
    "no permission": (lambda d: d.fail_verb("open_device", 13), PathReason.PERMISSION),
    "a device that vanished": (lambda d: d.fail_verb("open_device", 19), PathReason.DEVICE_FAILED),
    "a port that went down without an address": (
        lambda d: break_port(d, lambda: d.set_gid(1, "::")),
        PathReason.PORT_DOWN,
    ),
    "no capability on a port that is down": (
        lambda d: break_port(d, lambda: d.set_windows(supported=False)),
        PathReason.NO_WINDOWS,
    ),
    "no memory to register": (lambda d: d.fail_verb("reg_mr", 12), PathReason.DEVICE_FAILED),
    "no queue pair": (lambda d: d.fail_verb("create_qp", 12), PathReason.DEVICE_FAILED),
    "no second queue pair": (
        lambda d: d.fail_verb("create_qp", 12, skip=1),
        PathReason.DEVICE_FAILED,
    ),
    "no completion queue": (lambda d: d.fail_verb("create_cq", 12), PathReason.DEVICE_FAILED),
    "no way to connect": (lambda d: d.fail_verb("modify_qp", 110), PathReason.DEVICE_FAILED),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_is_a_reason(name: str) -> None:
    break_it, expected = BROKEN[name]
    fabric = ScriptedFabric()
    break_it(fabric.add_device("fake"))
    found, reason, detail, _ = opened(fabric)
    assert not found
    assert reason is expected, detail
    assert "fake" in detail
    assert_nothing_left(fabric)


def test_one_broken_device_does_not_hide_another() -> None:
    fabric = ScriptedFabric()
    fabric.add_device("broken").set_port(active=False)
    fabric.add_device("fine")
    found, reason, detail, enforced = opened(fabric)
    assert found
    assert reason is PathReason.OK
    assert "broken" in detail
    assert enforced
    assert_nothing_left(fabric)


def test_the_reason_of_the_device_that_got_furthest_is_told() -> None:
    fabric = ScriptedFabric()
    down = fabric.add_device("down")
    down.set_port(active=False)
    down.set_gid(1, "::")
    fabric.add_device("windowless").set_windows(supported=False)
    found, reason, detail, _ = opened(fabric)
    assert not found
    assert reason is PathReason.NO_WINDOWS
    assert "down" in detail
    assert "windowless" in detail


def test_a_path_may_begin_with_every_port_down() -> None:
    """Its memory is registered, and it serves once a port is up."""

    async def scenario() -> None:
        fabric = ScriptedFabric()
        fakes = [fabric.add_device(name) for name in ("fake_0", "fake_1", "fake_2")]
        for fake in fakes[:2]:
            fake.set_port(active=False)
        ours, _, detail = await open_rdma_path(
            ScriptedProvider(fabric), QUICK, rails=[rail_of(fake) for fake in fakes[:2]]
        )
        assert ours is not None
        assert detail == "; ".join(f"fake_{i} port 1 waits: port 1 is DOWN" for i in range(2))
        theirs = await open_path(ScriptedProvider(fabric), QUICK, rail_of(fakes[2]))
        session, other = join(ours, theirs)
        assert [rail.device for rail in session.local_hello.rails] == ["fake_0", "fake_1"]
        assert await ours.memory.ensure() is PathReason.OK
        assert ours.availability(session) is PathReason.PORT_DOWN
        assert await ours.prepare(session) is PathReason.PORT_DOWN
        assert await theirs.prepare(other) is PathReason.CONNECT_FAILED
        fakes[1].set_port(active=True)
        await until(lambda: ours.devices[1].active)
        assert [rail.device for rail in ours.hints] == ["fake_1"]
        assert await ours.prepare(session) is PathReason.OK
        assert ours.rail_statistics().route_recoveries == 1
        await theirs.close()
        await ours.close()
        assert_nothing_left(fabric)

    asyncio.run(scenario())


def report(device: ScriptedDevice, nic: int, numa_node: int) -> DeviceReport:
    """As discovery would find it."""
    gid = GidEntry(1, device.gids[1], GidKind.ROCE_V2)
    port = PortReport(1, "ACTIVE", True, "ethernet", 0, (0xFFFF,), (gid,), nic)
    return DeviceReport(device.name, "", Verdict.USABLE, "", (port,), numa_node)


def test_what_discovery_found_goes_with_the_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = ScriptedFabric()
    reports = [report(fabric.add_device(f"fake_{nic}"), nic, nic // 2) for nic in range(4)]
    monkeypatch.setattr(opening, "discover", lambda: Discovery(tuple(reports), {}))
    monkeypatch.setattr(opening, "numa_distances", lambda node: {node: 10, 1 - node: 21})

    async def scenario() -> None:
        config = replace(QUICK, whitelist=("fake_3", "fake_1"), blacklist=("fake_1",))
        path, _, _ = await open_rdma_path(ScriptedProvider(fabric), config)
        assert path is not None
        one, three = path.rails()
        assert (one.device, one.nic, one.numa_node) == ("fake_1", 1, 0)
        assert (three.device, three.nic, three.numa_node) == ("fake_3", 3, 1)
        assert dict(three.numa_distances) == {1: 10, 0: 21}
        await path.close()

    asyncio.run(scenario())
    assert fabric.devices["fake_0"].counters().binds == 0
    assert_nothing_left(fabric)


def test_no_rail_is_no_device() -> None:
    async def scenario() -> None:
        provider = ScriptedProvider(ScriptedFabric())
        path, reason, _ = await open_rdma_path(provider, QUICK, rails=[])
        assert path is None
        assert reason is PathReason.NO_DEVICE

    asyncio.run(scenario())
