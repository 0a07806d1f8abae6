"""What no file of the project contains: paths of one machine, secrets, oversized blobs."""

from __future__ import annotations

import re

import pytest

from tests.repo.project import ROOT, tracked_files

FILE_BYTES_MAX = 1 << 20
# Written in halves, so that this file does not contain what it looks for.
BANNED = {
    "a path of one machine": re.compile(
        r"(?<![\w.~$}])/(?:wor" r"k|far" r"m|home/\w+|roo" r"t)/\w"
    ),
    "a note to one person": re.compile(r"/tmp/bri" r"ef|\bwork" r"place\b", re.IGNORECASE),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KE" r"Y-----"),
    "a merge marker": re.compile(r"^(?:<<<<<<<|>>>>>>>) ", re.MULTILINE),
}
SHEBANG = re.compile(rb"#!\s*/")


@pytest.mark.parametrize("what", sorted(BANNED))
def test_nothing_private(what: str) -> None:
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for match in BANNED[what].finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}")
    assert not found, f"{what}: {found}"


def test_files_are_small_text() -> None:
    large = [str(p.relative_to(ROOT)) for p in tracked_files() if p.stat().st_size > FILE_BYTES_MAX]
    assert not large
    binary = [str(p.relative_to(ROOT)) for p in tracked_files() if b"\0" in p.read_bytes()]
    assert not binary


def test_scripts_are_executable() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.parent in (ROOT / "scripts", ROOT / ".ci")
        and SHEBANG.match(path.read_bytes()[:16])
        and not path.stat().st_mode & 0o111
    ]
    assert not wrong
