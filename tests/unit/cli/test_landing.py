"""A file appears whole under its final name, or not at all."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from orbit.cli.failures import LocalFileError
from orbit.cli.landing import Landing, destination
from orbit.errors import UsageError
from orbit.testing.pattern import pattern


def land(final: Path, payload: bytes, *, replace: bool = False) -> None:
    async def write() -> None:
        await landing.write(memoryview(payload))

    with Landing(final, len(payload), replace=replace) as landing:
        asyncio.run(write())
        landing.commit()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (16 << 20) + 1])
def test_what_is_written_is_there(tmp_path: Path, nbytes: int) -> None:
    land(tmp_path / "out", pattern(nbytes))
    assert (tmp_path / "out").read_bytes() == pattern(nbytes)
    assert os.listdir(tmp_path) == ["out"]


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        land(tmp_path / "out", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640


def test_nothing_is_left_without_a_commit(tmp_path: Path) -> None:
    with Landing(tmp_path / "out", 1 << 20, replace=False):
        (held,) = os.listdir(tmp_path)
        assert held.endswith(".part")
        assert (tmp_path / held).stat().st_size == 1 << 20  # space is taken before any byte
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Landing(tmp_path / "out", 10, replace=False):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(UsageError, match="exists already") as caught:
        land(tmp_path / "out", b"new")
    assert "--force" in caught.value.hint
    assert (tmp_path / "out").read_bytes() == b"old"


def test_force_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    land(tmp_path / "out", b"new", replace=True)
    assert (tmp_path / "out").read_bytes() == b"new"


def test_a_file_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    with Landing(tmp_path / "out", 0, replace=False) as landing:
        (tmp_path / "out").write_bytes(b"other")
        with pytest.raises(UsageError, match="exists already"):
            landing.commit()
    assert (tmp_path / "out").read_bytes() == b"other"
    assert os.listdir(tmp_path) == ["out"]


def test_no_hard_links_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    land(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_device_is_never_replaced(tmp_path: Path, replace: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        land(tmp_path / "pipe", b"", replace=replace)


def test_a_long_name_is_no_obstacle(tmp_path: Path) -> None:
    land(tmp_path / ("n" * 255), b"x")
    assert os.listdir(tmp_path) == ["n" * 255]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may pass 64 KiB: what a full disk looks like, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_no_room_is_known_before_the_first_byte(tmp_path: Path) -> None:
    with (
        pytest.raises(LocalFileError, match="File too large") as caught,
        Landing(tmp_path / "out", 1 << 20, replace=False),
    ):
        raise AssertionError("the landing opened")
    assert str(1 << 20) in caught.value.hint
    assert os.listdir(tmp_path) == []


def test_an_absurd_size_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(LocalFileError), Landing(tmp_path / "out", 1 << 62, replace=False):
        raise AssertionError("the landing opened")
    assert os.listdir(tmp_path) == []


def test_destination_in_a_directory_takes_the_name(tmp_path: Path) -> None:
    assert destination(tmp_path, "data") == tmp_path / "data"
    assert destination(tmp_path / "new", "data") == tmp_path / "new"


def test_destination_needs_its_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        destination(tmp_path / "absent" / "out", "data")
