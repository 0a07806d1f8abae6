"""rdma-core's own test suite as an outside check of the device, before any test of orbit.

Its result is known for the kernel and rdma-core of Debian 12. For any other pair the differences
are printed: a newer kernel may well do more.
"""

from __future__ import annotations

import gzip
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SUITE = Path("/usr/share/doc/rdma-core/tests")
SUITE_TIMEOUT_S = 240


@dataclass(frozen=True)
class Result:
    """Totals and the names of tests that did not pass."""

    run: int
    skipped: int
    failed: frozenset[str]


# 6.1 lacks the atomic write operation; the skips are for hardware and for rdma_cm without a device.
KNOWN = {("6.1", "44"): Result(273, 186, frozenset({"test_qp_ex_rc_atomic_write"}))}


def test_the_suites_result_is_the_known_one(tmp_path: Path) -> None:
    if not SUITE.is_dir():
        pytest.skip("rdma-core's tests are not installed (python3-pyverbs)")
    device = "rxa1" if Path("/sys/class/infiniband/rxa1").exists() else "rxe0"
    seen = run_suite(unpack_suite(tmp_path), device)
    versions = (".".join(platform.release().split(".")[:2]), rdma_core_version())
    known = KNOWN.get(versions)
    if known is None:
        print(f"no known result for kernel {versions[0]} and rdma-core {versions[1]}: {seen}")
        print(f"differences from {KNOWN}")
        return
    assert seen == known


def unpack_suite(folder: Path) -> Path:
    """The package holds the larger files compressed."""
    tests = folder / "tests"
    tests.mkdir()
    for source in SUITE.iterdir():
        if source.suffix == ".gz":
            (tests / source.stem).write_bytes(gzip.decompress(source.read_bytes()))
        elif source.is_file():
            shutil.copy(source, tests)
    return tests


def run_suite(tests: Path, device: str) -> Result:
    where = ["--dev", device, "--gid", str(ipv4_gid_index(device))]
    done = subprocess.run(
        ["/usr/bin/python3", str(tests / "run_tests.py"), *where, "-v"],
        cwd=tests.parent,
        env={**os.environ, "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
        check=False,
    )
    report = done.stderr
    run = re.search(r"^Ran (\d+) tests", report, re.MULTILINE)
    assert run is not None, report[-2000:]
    skipped = re.search(r"skipped=(\d+)", report)
    failed = re.findall(r"^(?:ERROR|FAIL): (\w+)", report, re.MULTILINE)
    return Result(int(run.group(1)), int(skipped.group(1)) if skipped else 0, frozenset(failed))


def ipv4_gid_index(device: str) -> int:
    for index in range(16):
        gid = Path(f"/sys/class/infiniband/{device}/ports/1/gids/{index}").read_text()
        if gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return index
    raise AssertionError(f"{device} has no IPv4-mapped GID")


def rdma_core_version() -> str:
    listing = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", "rdma-core"],
        capture_output=True,
        text=True,
        check=False,
    )
    return listing.stdout.partition(".")[0]
