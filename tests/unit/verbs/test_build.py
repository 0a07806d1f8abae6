"""The build of the helper, in a copy of the sources: what it needs, what it links, what it says
when it cannot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from orbit.verbs.turn import library_path

ROOT = Path(__file__).resolve().parents[3]
TURN = "orbit/verbs/_turn"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the build reads, and nothing that is built."""
    (tmp_path / TURN).mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\n'
        '[project]\nname = "orbit"\nversion = "0"\n[tool.setuptools]\npackages = []\n'
    )
    for source in (ROOT / TURN).glob("*.[ch]"):
        shutil.copy(source, tmp_path / TURN)
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in {"CC", "ORBIT_WITHOUT_VERBS"}}
    kept["CFLAGS"] = "-O0"  # half the time
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env={**kept, **environment},
        text=True,
        capture_output=True,
        check=False,
    )


def built(tree: Path) -> set[str]:
    return {path.name for path in (tree / TURN).glob("*.so")}


def compiler(tree: Path, script: str) -> str:
    """A stand-in for the C compiler: `script` decides, then the real one runs."""
    path = tree / "cc"
    path.write_text(f'#!/bin/sh\n{script}\nexec cc "$@"\n')
    path.chmod(0o755)
    return str(path)


NO_HEADER = 'case " $* " in *" -E "*) exit 1;; esac'


def test_both_libraries_are_built_and_built_once(tree: Path) -> None:
    first = build(tree)
    assert first.returncode == 0, first.stderr
    assert built(tree) == {"_native.so", "_scripted.so"}
    assert "native.c" in first.stdout
    assert "warning" not in first.stderr
    again = build(tree)
    assert again.returncode == 0
    assert ".c" not in again.stdout
    (tree / TURN / "turn.h").touch()
    assert "native.c" in build(tree).stdout
    assert "-O1" in build(tree, CFLAGS="-O1").stdout


def test_a_missing_header_stops_the_build_and_is_named(tree: Path) -> None:
    failed = build(tree, CC=compiler(tree, NO_HEADER))
    assert failed.returncode != 0
    for word in ("infiniband/verbs.h", "libibverbs-dev", "rdma-core-devel", "ORBIT_WITHOUT_VERBS"):
        assert word in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not built(tree)


def test_without_verbs_only_the_fake_is_built(tree: Path) -> None:
    done = build(tree, CC=compiler(tree, NO_HEADER), ORBIT_WITHOUT_VERBS="1")
    assert done.returncode == 0, done.stderr
    assert built(tree) == {"_scripted.so"}


def test_the_header_may_lie_elsewhere(tree: Path) -> None:
    elsewhere = tree / "sysroot"
    cc = compiler(tree, f'case " $* " in *" -I{elsewhere} "*) ;; *" -E "*) exit 1;; esac')
    assert build(tree, CC=cc).returncode != 0
    done = build(tree, CC=cc, ORBIT_VERBS_INCLUDE=str(elsewhere))
    assert done.returncode == 0, done.stderr
    assert built(tree) == {"_native.so", "_scripted.so"}


def test_a_compiler_that_is_not_there(tree: Path) -> None:
    failed = build(tree, CC="no-such-compiler")
    assert failed.returncode != 0
    assert "no-such-compiler" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_broken_source_fails_with_the_compilers_words(tree: Path) -> None:
    (tree / TURN / "scripted.c").write_text("int broken(\n")
    failed = build(tree)
    assert failed.returncode != 0
    assert "error:" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("kind", ["native", "scripted"])
def test_nothing_of_rdma_core_is_linked(kind: Literal["native", "scripted"]) -> None:
    library = library_path(kind)
    dynamic = subprocess.run(
        ["readelf", "-d", library], check=True, text=True, capture_output=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line]
    assert [name.split(".")[0] for name in needed] == ["libc"]
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, text=True, capture_output=True
    ).stdout
    assert "ibv_" not in undefined


CROSS = "aarch64-linux-gnu-gcc"


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"{CROSS} is not installed")
def test_a_cross_compiler_builds_for_its_machine(tree: Path) -> None:
    done = build(tree, CC=CROSS)
    assert done.returncode == 0, done.stderr
    for name in ("_native.so", "_scripted.so"):
        header = (tree / TURN / name).read_bytes()[:20]
        assert header[18:20] == b"\xb7\x00"  # EM_AARCH64
