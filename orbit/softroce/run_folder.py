"""What a run hands to its scripts: the lab's shape, the command, and what the command takes over
from its caller.

Owns the files of the control folder and the choice of environment variables that are carried over.
Starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

# What a command needs of the caller's environment to behave as it does outside. The rest may name
# sockets, displays or agents of the host that the guest does not have.
CARRIED = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM COLUMNS LINES VIRTUAL_ENV CI"
    " NO_COLOR FORCE_COLOR SOURCE_DATE_EPOCH CC CFLAGS LDFLAGS MAKEFLAGS".split()
)
CARRIED_PREFIXES = ("LC_", "PYTHON", "PYTEST_", "HYPOTHESIS_", "ORBIT_", "RDMAV_", "IBV_")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run takes over from its caller: working directory, environment, cache folder and the
    output descriptors."""

    directory: Path
    environment: Mapping[str, str]
    cache: Path
    note: Callable[[str], None]
    alert: Callable[[str], None]
    stdout: Callable[[bytes], None]
    stderr: Callable[[bytes], None]


def write_control_folder(
    folder: Path,
    variables: Mapping[str, str],
    command: Sequence[str],
    surroundings: Surroundings,
) -> None:
    """What a guest reads at boot: the lab's scripts, its shape, and the command with its
    surroundings."""
    folder.mkdir()
    write_lab_files(folder, folder / "guest", variables)
    environment = carried_environment(surroundings.environment)
    (folder / "environ").write_bytes(
        b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    )
    (folder / "argv").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in command))
    (folder / "directory").write_bytes(os.fsencode(surroundings.directory) + b"\n")


def write_lab_files(folder: Path, scripts: Path, variables: Mapping[str, str]) -> None:
    """The lab's scripts, and lab.env from which they read the shape (single-quoted shell
    assignments)."""
    scripts.mkdir()
    for script in files("orbit.softroce").joinpath("guest").iterdir():
        if script.is_file():
            (scripts / script.name).write_bytes(script.read_bytes())
    lines = (f"{name}={_quoted(value)}\n" for name, value in variables.items())
    (folder / "lab.env").write_text("".join(lines), encoding="utf-8")


def carried_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the command sees. Python's output is unbuffered, else a pipe would show it
    late."""
    carried = {
        name: value
        for name, value in environment.items()
        if name.isidentifier() and (name in CARRIED or name.startswith(CARRIED_PREFIXES))
    }
    return {"PYTHONUNBUFFERED": "1", **carried}


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
