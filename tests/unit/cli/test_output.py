"""Figures for people, and when a bar is drawn."""

from __future__ import annotations

import json

import pytest

from orbit.cli import output


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_human_bytes(nbytes: int, text: str) -> None:
    assert output.human_bytes(nbytes) == text


def test_rate_of_nothing_is_zero() -> None:
    assert output.rate_gb_s(1 << 20, 0.0) == 0.0
    assert output.rate_gb_s(2_000_000_000, 2.0) == 1.0


def test_no_bar_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress_bar("x", 10, wanted=True) as progress:
        progress(5)
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress_bar("payload", 10, wanted=True) as progress:
        progress(5)
    out, err = capsys.readouterr()
    assert out == ""
    assert "payload" in err


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": "x\ny"})
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    assert json.loads(out) == {"a": "x\ny"}
