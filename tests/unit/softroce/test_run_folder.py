"""What a guest is told: its shape, the command, and what is carried over from the caller."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.softroce.run_folder import (
    Surroundings,
    carried_environment,
    write_control_folder,
    write_lab_files,
)


def surroundings(directory: Path, environment: dict[str, str]) -> Surroundings:
    return Surroundings(
        directory=directory,
        environment=environment,
        cache=directory,
        note=pytest.fail,
        alert=pytest.fail,
        stdout=pytest.fail,
        stderr=pytest.fail,
    )


def test_what_a_command_needs_is_carried_over() -> None:
    environment = {
        "PATH": "/venv/bin:/usr/bin",
        "VIRTUAL_ENV": "/venv",
        "ORBIT_DEVICE": "rxa1",
        "PYTEST_ADDOPTS": "-x",
        "LC_ALL": "C",
        "BASH_FUNC_x%%": "() { :; }",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "DISPLAY": ":0",
    }
    carried = carried_environment(environment)
    assert carried == {
        "PYTHONUNBUFFERED": "1",
        **{name: environment[name] for name in list(environment)[:5]},
    }


def test_unbuffered_output_is_the_callers_choice() -> None:
    assert carried_environment({"PYTHONUNBUFFERED": ""})["PYTHONUNBUFFERED"] == ""


def test_words_and_values_arrive_as_they_are(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo 'a b'\n\"$x\"", "", "ü"]
    control = tmp_path / "A"
    caller = surroundings(tmp_path, {"LANG": "a=b\nc", "HOME": "/root"})
    write_control_folder(control, {"ROLE": "A"}, command, caller)
    assert (control / "argv").read_bytes().decode().split("\0") == [*command, ""]
    assert b"LANG=a=b\nc\0" in (control / "environ").read_bytes()
    assert (control / "directory").read_text() == f"{tmp_path}\n"
    scripts = {path.name for path in (control / "guest").iterdir()}
    assert {"boot.sh", "layout.sh", "orbit-host", "orbit-link", "orbit-prove"} <= scripts


@given(value=st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])))
def test_the_shell_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, value: str
) -> None:
    folder = tmp_path_factory.mktemp("lab")
    write_lab_files(folder, folder / "guest", {"NETEM": value})
    shell = subprocess.run(
        ["sh", "-c", '. ./lab.env; printf %s "$NETEM"'],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    assert shell.stdout.decode() == value


@pytest.mark.parametrize("script", ["boot.sh", "layout.sh", "native.sh", "init"])
def test_the_guests_scripts_have_no_syntax_error(tmp_path: Path, script: str) -> None:
    write_lab_files(tmp_path, tmp_path / "guest", {})
    shell = "sh" if script == "init" else "bash"
    subprocess.run([shell, "-n", str(tmp_path / "guest" / script)], check=True)


@pytest.mark.parametrize("tool", ["orbit-host", "orbit-link", "orbit-kill-peer"])
def test_the_guests_tools_have_no_syntax_error(tmp_path: Path, tool: str) -> None:
    write_lab_files(tmp_path, tmp_path / "guest", {})
    subprocess.run(["bash", "-n", str(tmp_path / "guest" / tool)], check=True)
