"""Devices that are listed and cannot be opened: an engine works on those that are left, and each
cause has its own name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orbit
from orbit.verbs.discovery import Verdict, discover
from tests.soak import SOAK
from tests.softroce.engine_pairs import engines, transfer

WORKER = (sys.executable, "-m", "tests.softroce.device_worker")
PROVIDERS = "/etc/libibverbs.d"  # says which drivers the verbs library loads
TIMEOUT_S = 120.0


def node_of(name: str) -> Path:
    for entry in Path("/sys/class/infiniband_verbs").glob("uverbs*"):
        if (entry / "ibdev").read_text().strip() == name:
            return Path("/dev/infiniband") / entry.name
    raise AssertionError(f"no node of {name}")


@contextlib.contextmanager
def hidden(node: Path) -> Iterator[None]:
    aside = node.rename(node.with_name(f"not-{node.name}"))
    try:
        yield
    finally:
        aside.rename(node)


@contextlib.contextmanager
def closed_to_others(node: Path) -> Iterator[None]:
    node.chmod(0o600)
    try:
        yield
    finally:
        node.chmod(0o666)


def found_by(*argv: str) -> dict[str, Any]:
    """By a process of its own, which has nothing to say on stderr."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def test_a_device_without_a_node_leaves_the_other() -> None:
    async def main() -> None:
        async with engines(find=discover) as rig:
            result = await transfer(rig, "read")
            assert result.rails == ("rxb2",)

    with hidden(node_of("rxb1")):
        verdicts = {device.name: device.verdict for device in discover().devices}
        assert verdicts["rxb1"] is Verdict.NO_NODE
        assert verdicts["rxb2"] is Verdict.USABLE
        asyncio.run(main())


def test_a_device_that_this_user_may_not_open_leaves_the_other() -> None:
    with closed_to_others(node_of("rxb1")):
        found = found_by(*WORKER, "plain")
    assert found["verdicts"]["rxb1"] == "permission"
    assert found["verdicts"]["rxb2"] == "usable"
    assert found["rails"] == ["rxb2"]


@pytest.mark.skipif(not SOAK, reason="a process more costs a minute on an emulated processor")
def test_without_drivers_there_is_no_rail_and_a_reason(tmp_path: Path) -> None:
    script = f'mount --bind "{tmp_path}" {PROVIDERS} && exec "$@"'
    found = found_by("unshare", "--mount", "bash", "-c", script, "bash", *WORKER)
    assert found["rails"] == []
    assert found["reason"] == "device_failed"
    assert "rxb1" in found["detail"]


@pytest.mark.parametrize("names", ["rxe9", "rxb2,rxe9"])
def test_a_device_that_is_not_there_is_an_error_with_those_that_are(names: str) -> None:
    async def main() -> None:
        async with orbit.Node(orbit.NodeConfig(rdma=orbit.RdmaConfig(device=names))):
            pass

    with pytest.raises(orbit.ConfigError) as caught:
        asyncio.run(main())
    for word in ("rxe9", "no such RDMA device", "rxb1", "rxb2"):
        assert word in str(caught.value)
