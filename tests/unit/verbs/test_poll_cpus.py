"""Where a thread that polls a device may run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orbit.verbs.poll_cpus import poll_cpus


def node(sysfs: Path, number: int, cpulist: str) -> None:
    folder = sysfs / f"devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpulist)


def test_the_processors_of_the_node_that_are_allowed(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-3,8\n")
    node(tmp_path, 1, "4-7\n")
    everything = range(16)
    assert poll_cpus(0, allowed=everything, sysfs=tmp_path) == (0, 1, 2, 3, 8)
    assert poll_cpus(1, allowed=everything, sysfs=tmp_path) == (4, 5, 6, 7)
    assert poll_cpus(0, allowed={1, 8, 4}, sysfs=tmp_path) == (1, 8)


@pytest.mark.parametrize("cpulist", ["\n", "", "a-b\n", "3-\n-"])
def test_what_cannot_be_told_binds_nothing(tmp_path: Path, cpulist: str) -> None:
    node(tmp_path, 0, cpulist)  # memory without processors has an empty list
    assert poll_cpus(0, allowed=range(16), sysfs=tmp_path) == ()
    assert poll_cpus(1, allowed=range(16), sysfs=tmp_path) == ()
    assert poll_cpus(-1, allowed=range(16), sysfs=tmp_path) == ()


def test_nothing_in_common_binds_nothing(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-1\n")
    assert poll_cpus(0, allowed={5}, sysfs=tmp_path) == ()


def test_by_default_what_this_process_may_use(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    node(tmp_path, 0, f"0-{allowed[-1] + 7}\n")
    assert list(poll_cpus(0, sysfs=tmp_path)) == allowed
