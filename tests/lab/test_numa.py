"""Rails by NUMA tier, in a machine with two memory nodes and a rail on each."""

from __future__ import annotations

import json
import sys

from tests.lab.test_machines import pytestmark, run

__all__ = ["pytestmark"]  # (not within a machine, and not without QEMU)

SHAPE = ("--hosts", "1", "--rails", "2", "--numa", "2", "--memory", "2048")


def test_a_transfer_takes_the_rail_near_its_memory() -> None:
    done = run(*SHAPE, "--", sys.executable, "-m", "tests.lab.numa_guest")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for seen in found.values():
        assert seen["same"]
        assert seen["nodes"] == {"rxe0": 0, "rxe1": 1}
        assert seen["distances"] == {
            "rxe0": {"0": 10, "1": 21},
            "rxe1": {"0": 21, "1": 10},
        }
    assert [found[node]["rails"] for node in ("0", "1")] == [["rxe0"], ["rxe1"]]
    near, far = sorted(found["1"]["reasons"], reverse=True)
    assert "rxe1 (NIC 1, tier 0)" in near
    assert "rxe0 (NIC 0, tier 1)" in far
    assert "there is a rail of tier 0" in far
