"""The examples of the documents run, and print what the pages show.

README and the tutorial run from top to bottom, each in a folder of its own; of the other pages each
Python block is a whole program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import orbit
from tests.public.doc_blocks import Block, blocks_of
from tests.repo.project import ROOT, tracked_files

IN_ORDER = ("README.md", "docs/guides/tutorial.md")
# Why a marked block does not run here.
MARKS = {
    "vm": "boots a virtual machine: the Makefile, or tests/softroce, runs the same line",
    "setup": "installs packages: every run of the tests has done that before",
}
TIMEOUT_S = 60.0
PAGES = sorted(
    name
    for path in tracked_files()
    if path.suffix == ".md" and (name := path.relative_to(ROOT).as_posix()) not in IN_ORDER
)
PROGRAMS = [
    pytest.param(block, id=f"{name}:{block.line}")
    for name in PAGES
    for block in blocks_of(ROOT / name)
    if block.language == "python"
]


def environment(folder: Path) -> dict[str, str]:
    """A plain user's, in the virtual environment, without orbit's own settings."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


def run(argv: list[str], folder: Path) -> tuple[int, str, str]:
    """Status, output and errors; nothing that it started is left running."""
    out, err = folder / ".out", folder / ".err"
    with (
        out.open("w") as stdout,
        err.open("w") as stderr,
        subprocess.Popen(
            argv,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        ) as process,
    ):
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return status, out.read_text(), err.read_text()


def check(block: Block, argv: list[str], folder: Path) -> None:
    status, printed, errors = run(argv, folder)
    assert status == 0, f"line {block.line}: status {status}\n{printed}\n{errors}"
    assert "Traceback" not in errors, f"line {block.line}: {errors}"
    # What is shown is what a host without RDMA prints; on another the examples have to run.
    if orbit.available().rdma is orbit.PathReason.NO_DEVICE:
        assert block.shows(printed), f"line {block.line} shows\n{block.shown}\nnot\n{printed}"


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_page_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    for block in blocks_of(ROOT / name):
        if block.language == "python" and block.mark:
            (tmp_path / block.mark).write_text(block.body, encoding="utf-8")
        elif block.language == "python":
            (tmp_path / "example.py").write_text(block.body, encoding="utf-8")
            check(block, [sys.executable, "example.py"], tmp_path)
        elif block.language == "sh" and block.mark == "run":
            check(block, ["bash", "-u", "-o", "pipefail", "-c", block.body], tmp_path)
        else:
            assert block.language == "sh", f"line {block.line}: nobody runs {block.language!r}"
            assert block.mark in MARKS, f"line {block.line}: neither run nor marked"


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_program_that_is_kept_is_run_by_a_later_line(name: str) -> None:
    blocks = blocks_of(ROOT / name)
    lines = [(b.line, b.body) for b in blocks if b.language == "sh" and b.mark == "run"]
    for kept in blocks:
        if kept.language == "python" and kept.mark:
            later = [body for line, body in lines if line > kept.line]
            assert any(f"python {kept.mark}" in body for body in later), kept.mark


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_line_for_the_virtual_machine_is_run_by_the_tests_there(name: str) -> None:
    """The command in the guest: one of the Makefile's, or a program that tests/softroce runs."""
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("$(BIN)/", "")
    inside = (ROOT / "tests/softroce/test_doc_examples.py").read_text("utf-8")
    for block in blocks_of(ROOT / name):
        if block.mark != "vm":
            continue
        for line in block.body.splitlines():
            outer, _, command = line.partition(" -- ")
            if outer.startswith("make "):
                known = f"\n{outer.removeprefix('make ')}: " in makefile
            elif command.startswith("python "):
                known = repr(command.removeprefix("python ")).replace("'", '"') in inside
            else:
                known = line in makefile
            assert known, f"line {block.line}: nobody runs {line!r}"


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_of_a_page_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(block.body, encoding="utf-8")
    check(block, [sys.executable, "example.py"], tmp_path)


def test_other_output_than_the_shown_one_is_seen() -> None:
    block = Block(1, "sh", "run", "", "a ... z\n")
    assert block.shows("a b\nc z\n")
    assert not block.shows("a b\nc z!\n")
    assert not block.shows("")
