"""The page of `orbit doctor`: what it folds, and the command on a copied tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orbit.cli.doctor_page import Line, page
from orbit.cli.failures import ExitStatus
from orbit.cli.main import main
from orbit.doctor.finding import Area, Diagnosis
from tests.unit.verbs.test_discovery import Tree

MEMORY, GRANTS, PATHS = Area("memory"), Area("grants"), Area("paths")
FINDINGS = [
    Area("build").ok("z", "a helper"),
    Area("gpu").skip("y", "no GPU"),
    MEMORY.ok("a", "enough memory"),
    MEMORY.warn("b", "little may be locked", "ulimit -l unlimited"),
    GRANTS.ok("c", "4096 bytes by rdma"),
    MEMORY.skip("d", "no huge pages were looked for"),
    PATHS.ok("e", "RDMA: usable"),
]


def texts(*, verbose: bool) -> list[str]:
    lines = page(Diagnosis.of(FINDINGS), "TCP works; RDMA: usable", verbose=verbose)
    return [line.mark + line.text for line in lines]


def test_quiet_lines_are_counted_and_fixes_stand_below() -> None:
    assert texts(verbose=False) == [
        "build (1 ok), gpu (1 skipped)",
        "memory (1 ok, 1 skipped)",
        "  warn little may be locked  [b]",
        "       fix: ulimit -l unlimited",
        "grants",
        "  ok   4096 bytes by rdma",
        "",
        "1 warning",
        "TCP works; RDMA: usable",
    ]


def test_every_line_when_asked_for() -> None:
    assert texts(verbose=True)[:2] == ["build", "  ok   a helper"]
    assert "  skip no huge pages were looked for" in texts(verbose=True)


def test_what_several_findings_need_is_said_once() -> None:
    same = [MEMORY.fail(code, code, "do it") for code in ("a", "b")]
    lines = [line.mark + line.text for line in page(Diagnosis.of(same), "end", verbose=False)]
    assert lines[1:4] == ["  fail a  [a]", "  fail b  [b]", "       fix: do it"]
    assert "2 failures" in lines


def test_a_command_is_never_broken_and_other_lines_hang() -> None:
    words = ("word " * 30).strip()
    rows = Line("  warn ", words).rows(60)
    assert len(rows) > 1
    assert all(len(row) <= 60 for row in rows)
    assert all(row.startswith(" " * 7) for row in rows[1:])
    assert max(map(len, Line("", words * 3).rows(200))) <= 110
    assert Line("  fix: ", f"{words}; and", parts=True).rows(60) == [
        f"  fix: {words}",
        "       and",
    ]


def look(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *words])
    report = json.loads(capsys.readouterr().out)
    return status, {finding["code"]: finding for finding in report["findings"]}


def test_a_copied_tree_without_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = look(capsys, "--sysfs", str(tmp_path), "--transport", "rdma")
    assert status == ExitStatus.UNFIT
    assert found["rdma_missing"]["level"] == "fail"
    assert "tcp_works" not in found
    assert not any(finding["area"] == "grants" for finding in found.values())


def test_a_copied_tree_with_a_device_and_a_name_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = Tree(tmp_path)
    tree.add("mlx5_0")
    (tmp_path / "dev").rename(tmp_path / "nodes")
    (tmp_path / "dev").mkdir()
    (tmp_path / "nodes").rename(tmp_path / "dev/infiniband")
    status, found = look(capsys, "--sysfs", str(tmp_path))
    assert status in (ExitStatus.OK, ExitStatus.WARNINGS)
    assert "mlx5_0" in found["rdma_untried"]["text"]
    status, found = look(capsys, "--sysfs", str(tmp_path), "--device", "rxe9")
    assert status == ExitStatus.UNFIT
    assert "rxe9" in found["rdma_missing"]["text"]
    assert "mlx5_0" in found["rdma_missing"]["text"]
