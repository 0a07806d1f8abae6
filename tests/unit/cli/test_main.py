"""The entry point: statuses, one-line errors, laziness."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import click
import pytest

from orbit import errors
from orbit.cli import main as module
from orbit.cli.failures import ExitStatus, IntegrityError, LocalFileError, Stopped, status_of
from orbit.cli.main import COMMANDS, cli, main
from orbit.cli.options import parse_size


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> object:
    """Make `orbit demo` raise what is given."""

    def raise_it(error: BaseException) -> None:
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def demo(as_json: bool) -> None:
            raise error

        monkeypatch.setattr(module.LazyGroup, "get_command", lambda *_: demo)

    return raise_it


ENDINGS: list[tuple[BaseException, ExitStatus]] = [
    (errors.UsageError("x"), ExitStatus.USAGE),
    (errors.ConfigError("listen", "x", "bad"), ExitStatus.USAGE),
    (errors.PathUnavailable("rdma", "no_device"), ExitStatus.PATH),
    (errors.PeerUnreachable("h:1", "refused"), ExitStatus.PEER),
    (errors.PeerRefused("auth"), ExitStatus.PEER),
    (errors.PeerLost("p", "reset"), ExitStatus.PEER),
    (errors.UnknownHandle("1-1"), ExitStatus.PEER),
    (IntegrityError("x"), ExitStatus.INTEGRITY),
    (LocalFileError("x"), ExitStatus.FAILED),
    (errors.TransferFailed("x", [errors.PathFailed("tcp", "get_failed")]), ExitStatus.FAILED),
    (errors.DeadlineExceeded("get", 1.0), ExitStatus.FAILED),
    (Stopped(signal.SIGINT), ExitStatus.INTERRUPTED),
    (Stopped(signal.SIGTERM), ExitStatus.TERMINATED),
    (KeyboardInterrupt(), ExitStatus.INTERRUPTED),
]


@pytest.mark.parametrize(("error", "status"), ENDINGS, ids=lambda v: type(v).__name__)
def test_every_ending_has_its_status(
    error: BaseException, status: ExitStatus, failing, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(error)
    assert main(["demo"]) == status == status_of(error)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_an_error_is_one_line_and_a_hint(failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(errors.UsageError("two\nlines", hint="do\nthis"))
    main(["demo"])
    assert capsys.readouterr().err == "orbit: two lines\n  hint: do this\n"


def test_an_error_as_json(failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(errors.PathUnavailable("rdma", "no_device"))
    main(["demo", "--json"])
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "path_unavailable"
    assert "no_device" in error["message"]


def test_a_bug_keeps_its_traceback(failing) -> None:
    failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


@pytest.mark.parametrize("words", [["nonsense"], ["get"], ["get", "--nonsense"], ["serve"]])
def test_wrong_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == ExitStatus.USAGE
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("orbit: ")
    assert "--help" in hint


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("orbit ")


def test_every_command_is_what_it_is_called() -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_help_imports_no_command() -> None:
    program = (
        "import sys; from orbit.cli.main import main; main(['--help']);"
        "print([m for m in sys.modules if m in ('orbit.node', 'orbit.cli.get', 'rich', 'uvloop')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("64MiB", 64 << 20), ("1.5g", 3 << 29), ("1 KB", 1000), ("7b", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "-1", "1XB", "1 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a size"):
        parse_size(text)
