"""C01 where RDMA cannot be had: a demand of it fails before the first byte and names the cause;
`auto` moves the bytes by TCP, and result, counter, log and the command say so.

Each cause, and requests of engines, are test_unopenable_devices.py's; the real device node without
permission is tests/softroce/test_engine_devices.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.events import PATH_TOTAL
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.verbs.scripted import ScriptedFabric
from tests.integration.cases.fake_hosts import FakeHost
from tests.integration.cases.test_unopenable_devices import permission
from tests.integration.cli import orbit as run_orbit
from tests.integration.messages.processes import worker
from tests.integration.messages.settled import TCP

Run = Callable[[Any], Any]
MIB = 1 << 20
WORKER = "tests.integration.cases.worker"
PROMPT_S = 30.0  # a bound for hangs alone
GETS = 3
CAUSES = {"no_device": "lists no RDMA device", "permission": "may not be opened by this user"}
by_cause = pytest.mark.parametrize("cause", CAUSES)


@pytest.fixture
def host(cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """Without a device, or with one that this user may not open."""
    host = FakeHost(ScriptedFabric(), 1, tmp_path / "host")
    if cause == "permission":
        permission(host, "a0", monkeypatch)
    return host


@by_cause
def test_a_demand_names_what_is_missing(run_async: Run, host: FakeHost, cause: str) -> None:
    async def main() -> None:
        config = orbit.NodeConfig(transport="rdma")
        engine = orbit.TransferEngine(orbit.EngineConfig(node=config))
        async with nothing_left(), asyncio.timeout(PROMPT_S):
            for opened in (orbit.Node(config), engine):
                with host.here(), pytest.raises(orbit.PathUnavailable) as caught:
                    await opened.open()
                assert caught.value.reason == cause
                assert CAUSES[cause] in str(caught.value)
                await opened.close()

    run_async(main())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[tuple[Any, ...]]:
    said = [r for r in caplog.records if getattr(r, "event", "") == "transfer_by_tcp"]
    return [(r.levelname, r.peer.worker_id, r.path, r.reason) for r in said]  # type: ignore[attr-defined]


@by_cause
def test_auto_says_which_path_and_why(
    run_async: Run, host: FakeHost, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as other, worker(WORKER) as process:
            with host.here():
                node = orbit.Node()
                await node.open()
            peers = [node.add_peer(process.address), node.add_peer(other.address)]
            far = await process.ask("register", nbytes=MIB)
            near = await other.register_data(pattern(MIB), orbit.RegisterOptions(retain=True))
            for handle in (orbit.Handle.parse(far["handle"]), near) * GETS:
                data, lease = await node.get(handle)
                assert data == pattern(MIB)
                assert (lease.path, lease.reason) == ("tcp", cause)
                await node.release(handle, lease)
            series = f'{PATH_TOTAL}{{path="tcp",reason="{cause}",side="consumer"}}'
            assert node.statistics().counters[series] == 2 * GETS
            expected = [("WARNING", peer.worker_id, "tcp", cause) for peer in peers]
            assert warnings_of(caplog) == expected
            await node.close()

    run_async(main())


BENCH = "bench loop --op get_into --size 64K --iterations 5 --no-baseline".split()


def test_the_command_says_which_path_and_why() -> None:
    """The kill switch is set: so it is on every machine. That a demand fails is test_bench.py's."""
    text = run_orbit(*BENCH)
    assert text.status == 0, text.err
    assert "tcp (kill_switch)" in text.out
    (row,) = run_orbit(*BENCH, "--json").report["rows"]
    assert (row["path"], row["reason"], row["paths"]) == ("tcp", "kill_switch", {"tcp": 5})
