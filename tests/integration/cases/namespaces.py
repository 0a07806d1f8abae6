"""Processes in namespaces of their own: another network, another /etc/hosts."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 120.0


@functools.cache
def _allowed(flags: str) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", flags, "true"], capture_output=True).returncode == 0  # noqa: PLW1510


def unshared(flags: str, words: Sequence[str | Path], **environment: str) -> str:
    """Run a program to its end under `unshare FLAGS`; what it printed. Skips the test where this
    kernel gives ordinary users no namespaces.
    """
    if not _allowed(flags):
        pytest.skip(f"`unshare {flags}` is not permitted here")
    done = subprocess.run(
        ["unshare", flags, *map(str, words)],
        cwd=_ROOT,
        env=environment or None,
        text=True,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout
