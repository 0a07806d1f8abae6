"""The set-up script: what it asks for, what it says when it cannot, and what a second run does.

Runs on a copy of the script with stand-ins for dpkg, apt-get, sudo and id on PATH: nothing is
installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repo.project import ROOT

TOOLS = "bash cat cut sed awk comm sort find xargs sha256sum tr rm head grep env mkdir dirname"
LISTS = ROOT / "scripts" / "packages"
ENTRY = re.compile(r"([a-z0-9][a-z0-9.+-]+)(?: +\[(\w+)\])?(?: +# \S.*)?\Z")

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("sha256sum") is None,
    reason="needs bash and coreutils",
)


def entries(path: Path) -> dict[str, str | None]:
    found = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            match = ENTRY.match(line)
            assert match, f"{path.name}: {line!r}"
            found[match[1]] = match[2]
    return found


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Enough of the project for the script, and an empty folder of stand-ins."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    turn = root / "orbit" / "verbs" / "_turn"
    turn.mkdir(parents=True)
    (turn / "turn.h").write_text("/* */\n")
    (turn / "_native.so").write_text("")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in TOOLS.split():
        found = shutil.which(name)
        assert found
        (bin_ / name).symlink_to(found)
    return root


def set_up(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(root / "scripts" / "setup.sh"), *flags],
        env={"PATH": str(root.parent / "bin"), "HOME": str(root.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def debian(root: Path, installed: set[str], uid: int) -> Path:
    """Stand-ins for a Debian machine; what apt-get was asked for lands in the returned file."""
    bin_ = root.parent / "bin"
    log = root.parent / "apt.log"
    known = " ".join(sorted(installed))
    tool(bin_, "dpkg", "echo amd64")
    tool(bin_, "id", f"echo {uid}")
    tool(bin_, "apt-get", f'echo "$*" >> {log}')
    tool(
        bin_,
        "dpkg-query",
        f'shift 3; rc=0; for p in "$@"; do case " {known} " in *" $p "*) echo "installed $p";; '
        '*) echo "no packages found matching $p" >&2; rc=1;; esac; done; exit $rc',
    )
    return log


def finished_environment(root: Path) -> Path:
    """A virtual environment that records how it is called; returns the record."""
    bin_ = root / ".venv" / "bin"
    bin_.mkdir(parents=True)
    log = root.parent / "venv.log"
    tool(bin_, "python", f'echo "$*" >> {log}')
    tool(bin_, "orbit", f'echo "orbit $*" >> {log}')
    return log


def wanted() -> set[str]:
    return {n for n, arch in entries(LISTS / "debian-12.txt").items() if arch in (None, "amd64")}


def test_the_lists_are_well_formed_and_say_why() -> None:
    assert len(wanted()) > 10
    for path in LISTS.glob("*.txt"):
        assert entries(path)


def test_ubuntu_stands_beside_and_is_marked_untested() -> None:
    text = (LISTS / "ubuntu-24.04.txt").read_text()
    assert text.splitlines()[0].startswith("# UNTESTED")
    assert "UNTESTED" not in (LISTS / "debian-12.txt").read_text()


def test_without_root_it_says_exactly_what_to_install(checkout: Path) -> None:
    log = debian(checkout, wanted() - {"kmod", "qemu-system-x86"}, uid=1000)
    done = set_up(checkout)
    assert done.returncode == 3
    assert "apt-get install --no-install-recommends kmod qemu-system-x86\n" in done.stderr
    assert not log.exists()


def test_as_root_it_installs_only_what_is_missing(checkout: Path) -> None:
    finished_environment(checkout)
    log = debian(checkout, wanted() - {"kmod"}, uid=0)
    done = set_up(checkout, "--skip-lab")
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == [
        "update -qq",
        "install -y -qq --no-install-recommends kmod",
    ]


def test_with_sudo_it_asks_sudo(checkout: Path) -> None:
    finished_environment(checkout)
    log = debian(checkout, wanted() - {"kmod"}, uid=1000)
    tool(checkout.parent / "bin", "sudo", f'[ "$1" = -n ] && exit 0; echo sudo >> {log}; exec "$@"')
    done = set_up(checkout, "--skip-lab")
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines()[0] == "sudo"


def test_elsewhere_it_names_the_packages(checkout: Path) -> None:
    done = set_up(checkout)
    assert done.returncode == 3
    for name in wanted():
        assert name in done.stderr
    assert "--skip-packages" in done.stderr


def test_a_second_run_builds_nothing(checkout: Path) -> None:
    log = debian(checkout, wanted(), uid=1000)
    calls = finished_environment(checkout)
    first = set_up(checkout)
    assert first.returncode == 0, first.stderr
    assert "-m pip install" in calls.read_text()
    calls.unlink()
    second = set_up(checkout)
    assert second.returncode == 0
    assert calls.read_text().splitlines() == ["orbit softroce --fetch-only --quiet"]
    assert not log.exists()


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "orbit/verbs/_turn/turn.h", "scripts/setup.sh"]
)
def test_a_changed_input_builds_again(checkout: Path, changed: str) -> None:
    debian(checkout, wanted(), uid=1000)
    calls = finished_environment(checkout)
    set_up(checkout)
    calls.unlink()
    with (checkout / changed).open("a") as file:
        file.write("\n")
    set_up(checkout)
    assert "-m pip install" in calls.read_text()


def test_a_lost_helper_builds_again(checkout: Path) -> None:
    debian(checkout, wanted(), uid=1000)
    calls = finished_environment(checkout)
    set_up(checkout)
    calls.unlink()
    (checkout / "orbit/verbs/_turn/_native.so").unlink()
    set_up(checkout)
    assert "-m pip install" in calls.read_text()


def test_a_failed_build_is_not_remembered(checkout: Path) -> None:
    debian(checkout, wanted(), uid=1000)
    finished_environment(checkout)
    tool(checkout / ".venv" / "bin", "python", "exit 1")
    assert set_up(checkout).returncode == 3
    assert not (checkout / ".venv" / ".orbit-setup").exists()


def test_an_unknown_option_is_refused(checkout: Path) -> None:
    done = set_up(checkout, "--fast")
    assert done.returncode == 2
    assert "--skip-packages" in done.stderr


def test_ci_runs_the_test_command_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"\bmake\b.*\btest\b", ci)
    assert "set -euo pipefail" in ci
    assert "make test" in (ROOT / "README.md").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_makefile_has_every_word() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in "setup lint test softroce demo bench soak check clean".split():
        assert re.search(rf"^{word}:", makefile, re.MULTILINE), word
