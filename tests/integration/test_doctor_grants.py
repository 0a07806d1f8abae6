"""The real grant of `orbit doctor` on scripted devices: what works, and which step failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.doctor import grant, verdict
from orbit.doctor.finding import Finding, Level
from orbit.doctor.grant import grant_findings
from orbit.doctor.host import Host
from orbit.model import PathReason
from orbit.testing.leftovers import nothing_left
from orbit.verbs.libraries import VerbsFacts
from orbit.verbs.scripted import ScriptedFabric
from orbit.verbs.scripted_fabric import READ, ScriptedDevice
from orbit.verbs.status import LOC_QP_OP_ERR
from tests.integration.cases.fake_hosts import FakeHost
from tests.unit.verbs.test_discovery import _NETDEVS

Run = Callable[[Any], Any]
DEVICE = "dev1"
# Queue pairs, registrations and reads of a probe: two of each for doctor and for both nodes.
PROBES = 3 * 2


def seen(host: FakeHost) -> Host:
    """The same trees, as doctor looks at them."""
    return Host(
        sysfs=host.tree.sysfs,
        nodes=host.tree.nodes,
        netdevs=lambda: _NETDEVS,
        environment={},
        verbs=lambda: VerbsFacts(devices=tuple(host.known)),
        listen=None,
    )


async def diagnosed(host: FakeHost, config: orbit.NodeConfig | None = None) -> dict[str, Finding]:
    """By code, with the verdict."""
    config = config or orbit.NodeConfig()
    with host.here():
        async with nothing_left():
            found = await grant_findings(seen(host), config)
        found.append(verdict.rdma_verdict(seen(host), config, found))
    host.check_nothing_left()
    return {finding.code: finding for finding in found}


def made(root: Path, *, rxe: bool = False) -> FakeHost:
    host = FakeHost(ScriptedFabric(rxe=rxe), 1, root / "host")
    host.add(DEVICE)
    return host


@pytest.mark.parametrize("rxe", [False, True])
def test_a_grant_on_each_device(run_async: Run, tmp_path: Path, rxe: bool) -> None:
    async def main() -> None:
        host = made(tmp_path, rxe=rxe)
        host.add("dev2")
        found = await diagnosed(host)
        assert found["tcp_works"].level is Level.OK
        works = found["grant_works"]
        assert works.level is Level.OK
        assert works.data["path"] == "rdma/dev2:1 gid 1"
        steps = {"open", "probe", "bind", "connect", "acquire", "read", "receipt", "close"}
        assert steps <= set(works.data["seconds"])
        ranged = found["range_not_enforced" if rxe else "range_enforced"]
        assert ranged.level is (Level.WARN if rxe else Level.OK)
        assert found["rdma_usable"].data["devices"] == [DEVICE, "dev2"]

    run_async(main())


def refused(device: ScriptedDevice) -> None:
    device.fail_verb("open_device", 13, count=99)


def without_windows(device: ScriptedDevice) -> None:
    device.set_windows(supported=False, capability=True)


def without_queue_pairs(device: ScriptedDevice) -> None:
    device.fail_verb("create_qp", 12, skip=PROBES, count=99)


def without_memory(device: ScriptedDevice) -> None:
    device.fail_verb("reg_mr", 12, skip=PROBES, count=99)


def unreadable(device: ScriptedDevice) -> None:
    device.fail(READ, LOC_QP_OP_ERR, skip=PROBES, count=99)


FAULTS: dict[Callable[[ScriptedDevice], None], tuple[str, PathReason]] = {
    refused: ("open", PathReason.PERMISSION),
    without_windows: ("bind", PathReason.NO_WINDOWS),
    without_queue_pairs: ("connect", PathReason.CONNECT_FAILED),
    unreadable: ("read", PathReason.GET_FAILED),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_a_failure_names_its_step(
    run_async: Run, tmp_path: Path, fault: Callable[[ScriptedDevice], None]
) -> None:
    async def main() -> None:
        host = made(tmp_path)
        fault(host.devices[DEVICE])
        found = await diagnosed(host)
        step, reason = FAULTS[fault]
        failed = found["grant_failed"]
        assert (failed.data["step"], failed.data["reason"]) == (step, reason)
        assert failed.level is Level.WARN
        assert f"failed at {step}" in failed.text
        assert failed.fix
        assert "grant_works" not in found
        assert found["rdma_missing"].level is Level.WARN

    run_async(main())


def test_memory_that_cannot_be_registered(run_async: Run, tmp_path: Path) -> None:
    async def main() -> None:
        host = made(tmp_path)
        without_memory(host.devices[DEVICE])
        found = await diagnosed(host, orbit.NodeConfig(transport=orbit.Transport.RDMA))
        assert found["grant_failed"].data["step"] == "register"
        assert found["grant_failed"].level is Level.FAIL
        assert found["rdma_missing"].level is Level.FAIL

    run_async(main())


def test_the_devices_counters_are_looked_at(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that arrive while an rxe device sends nothing went another way."""

    async def main() -> None:
        host = made(tmp_path, rxe=True)
        counter = host.tree.sysfs / f"class/infiniband/{DEVICE}/ports/1/hw_counters/sent_pkts"
        counter.parent.mkdir()
        counter.write_text("41\n")
        found = await diagnosed(host)
        assert found["grant_not_counted"].level is Level.WARN
        real = grant.transfer

        async def counted(*words: Any) -> orbit.Lease:
            lease = await real(*words)
            counter.write_text(f"{int(counter.read_text()) + 7}\n")
            return lease

        monkeypatch.setattr(grant, "transfer", counted)
        found = await diagnosed(host)
        assert "grant_not_counted" not in found
        assert "sent_pkts +7" in found["grant_works"].text

    run_async(main())


@pytest.mark.parametrize(
    ("config", "code", "level"),
    [
        (orbit.NodeConfig(transport=orbit.Transport.TCP), "rdma_not_asked", Level.SKIPPED),
        (orbit.NodeConfig(rdma=orbit.RdmaConfig(device="rxe9")), "rdma_missing", Level.FAIL),
        (
            orbit.NodeConfig(rendezvous=orbit.RendezvousConfig(enabled=False)),
            "rdma_missing",
            Level.WARN,
        ),
    ],
    ids=["tcp", "named", "switched_off"],
)
def test_no_grant_where_none_is_to_be_tried(
    run_async: Run, tmp_path: Path, config: orbit.NodeConfig, code: str, level: Level
) -> None:
    async def main() -> None:
        host = made(tmp_path)
        found = await diagnosed(host, config)
        assert found["grant_skipped"].level is Level.SKIPPED
        assert found[code].level is level
        if config.rdma.device:
            assert f"valid: {DEVICE}" in found[code].text
        with contextlib.suppress(KeyError):
            raise AssertionError(found["grant_works"])

    run_async(main())
