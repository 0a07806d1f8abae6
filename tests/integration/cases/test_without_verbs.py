"""C32 on the host: orbit without pyverbs, and on verbs libraries that are not what it was built
for. It imports, TCP works, and a demand of RDMA is one clear line.

Two copies of the library in one process are a matter of `orbit doctor`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = [f"IBVERBS_1.{n}" for n in range(20)]
PRIVATE = [f"IBVERBS_PRIVATE_{n}" for n in range(25, 70)]


def run(*arguments: str, library_path: Path | None = None) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ORBIT_")}
    if library_path is not None:
        environment["LD_LIBRARY_PATH"] = str(library_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.cases.verbs_user", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def check(seen: dict[str, Any]) -> None:
    """What holds on any host without devices, whatever library there is."""
    assert seen["after import"] == [[], False]
    assert seen["after looking"] == []
    assert seen["tcp"] == {"right": True}
    reason, detail = seen["rdma"]["reason"], seen["rdma"]["detail"]
    assert seen["demand"].startswith(f"PathUnavailable: no rdma path: {reason} (")
    assert detail in seen["demand"]
    assert "\n" not in seen["demand"]


needs_pyverbs = pytest.mark.skipif(
    importlib.util.find_spec("pyverbs") is None, reason="pyverbs is not installed"
)


def test_a_bare_container() -> None:
    seen = run("without-pyverbs")
    check(seen)
    assert (seen["pyverbs"], seen["available"]) == (False, "no_pyverbs")
    assert seen["rdma"]["reason"] == "no_pyverbs"
    assert seen["rdma"]["detail"].startswith("pyverbs: import: ")


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder for another libibverbs.so.1."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return tmp_path


def build(folder: Path, versions: list[str]) -> Path:
    """A library without the functions that are called, under those symbol versions."""
    nodes = (f"{name} {{ global: only_in_{name.replace('.', '_')}; }};" for name in versions)
    (folder / "versions").write_text("\n".join(nodes))
    lines = (f"int only_in_{name.replace('.', '_')};" for name in versions)
    (folder / "stub.c").write_text("\n".join([*lines, "int something_else;\n"]))
    linked = ["-Wl,-soname,libibverbs.so.1", f"-Wl,--version-script={folder / 'versions'}"]
    library = str(folder / "libibverbs.so.1")
    command = ["cc", "-shared", "-fPIC", *linked, "-o", library, str(folder / "stub.c")]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@needs_pyverbs
def test_a_library_without_a_symbol_that_is_needed(stub: Path) -> None:
    seen = run(library_path=build(stub, [*VERSIONS, *PRIVATE]))
    check(seen)
    assert seen["rdma"]["reason"] == "no_pyverbs"
    assert "undefined symbol: ibv_" in seen["rdma"]["detail"]


@needs_pyverbs
def test_a_library_with_other_symbol_versions(stub: Path) -> None:
    seen = run(library_path=build(stub, ["IBVERBS_0.9"]))
    check(seen)
    assert seen["rdma"]["reason"] == "no_pyverbs"
    assert "libibverbs.so.1" in seen["rdma"]["detail"]
    assert "IBVERBS_" in seen["rdma"]["detail"]


@needs_pyverbs
def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "libibverbs.so.1").write_bytes(b"cut short")
    seen = run(library_path=tmp_path)
    check(seen)
    assert seen["rdma"]["reason"] == "no_pyverbs"
    assert "libibverbs.so.1" in seen["rdma"]["detail"]
