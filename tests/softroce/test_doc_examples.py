"""What the tutorial says about RDMA: its first program, unchanged, goes by the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.public.doc_blocks import blocks_of
from tests.repo.project import ROOT
from tests.softroce.conftest import Lab

PROGRAM = "first.py"


def test_the_first_program_goes_by_rdma(lab: Lab, tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs/guides/tutorial.md")
    (program,) = (block for block in blocks if block.mark == PROGRAM)
    (line,) = (
        block for block in blocks if f"python {PROGRAM}" in block.body and block.mark == "vm"
    )
    (tmp_path / PROGRAM).write_text(program.body, encoding="utf-8")
    device = lab.devices("A")[0]
    before = lab.sent_pkts(device)
    done = subprocess.run(
        [sys.executable, str(tmp_path / PROGRAM)],
        env={**os.environ, "ORBIT_DEVICE": device},  # one, as with --hosts 1
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert line.shows(done.stdout), done.stdout
    assert "by rdma (ok)" in done.stdout
    nbytes = int(done.stdout.split()[0])
    assert lab.sent_pkts(device) - before >= nbytes // 4096  # at the largest path MTU
