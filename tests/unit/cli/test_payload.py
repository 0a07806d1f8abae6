"""Files become payloads: digest of what was read, small ones in memory, large ones mapped."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from orbit.cli import payload as module
from orbit.cli.failures import LocalFileError
from orbit.cli.payload import MAP_MIN_BYTES, Payload, file_size, load, ticket_name
from orbit.errors import UsageError
from orbit.testing.pattern import pattern


def loaded(path: Path, *, into_memory: bool) -> Payload:
    return load(path, into_memory=into_memory, keep_going=lambda: True)


@pytest.mark.parametrize("into_memory", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, MAP_MIN_BYTES, (16 << 20) + 3])
def test_bytes_and_digest(tmp_path: Path, nbytes: int, into_memory: bool) -> None:
    path = tmp_path / "data"
    path.write_bytes(pattern(nbytes))
    payload = loaded(path, into_memory=into_memory)
    assert payload.nbytes == len(payload.buffer) == nbytes
    assert payload.buffer == pattern(nbytes)
    assert payload.sha256 == hashlib.sha256(pattern(nbytes)).hexdigest()
    assert payload.mapped == (not into_memory and nbytes >= MAP_MIN_BYTES)


def test_what_went_into_memory_no_longer_depends_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(pattern(MAP_MIN_BYTES))
    payload = loaded(path, into_memory=True)
    os.truncate(path, 0)
    assert payload.buffer == pattern(MAP_MIN_BYTES)


def test_a_file_that_shrinks_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(pattern(100))
    monkeypatch.setattr(module, "_READ_BYTES", 10)

    def shrink() -> bool:
        os.truncate(path, 5)
        return True

    with pytest.raises(LocalFileError, match="became shorter"):
        load(path, into_memory=True, keep_going=shrink)


def test_reading_stops_when_told(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(pattern(100))
    stopped = load(path, into_memory=True, keep_going=lambda: False)
    assert stopped.sha256 == hashlib.sha256().hexdigest()


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="not a regular file"):
            file_size(path)
    with pytest.raises(UsageError, match="No such file"):
        file_size(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("data.bin", "data.bin"), ("a\nb", "a_b"), ("a\\b", "a_b"), ("é" * 127, "é" * 127)],
)
def test_ticket_names_can_be_printed(name: str, shown: str) -> None:
    assert ticket_name(Path("/x") / name) == shown


def test_a_name_that_is_no_text_becomes_one() -> None:
    odd = os.fsdecode(b"data-\xff")
    assert ticket_name(Path(odd)).isprintable()
    ticket_name(Path(odd)).encode("utf-8")
