"""The words of `orbit softroce`: what they become, and one-line answers to wrong ones."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from orbit.cli import softroce as door
from orbit.errors import LabError
from orbit.softroce.lab import LabOptions
from orbit.softroce.run_folder import Surroundings
from orbit.softroce.topology import Topology


class Recorder:
    """Stands for run_lab."""

    def __init__(self) -> None:
        self.options = LabOptions()
        self.command: tuple[str, ...] = ()
        self.answer: int | Exception = 0

    def __call__(
        self, options: LabOptions, command: tuple[str, ...], surroundings: Surroundings
    ) -> int:
        self.options, self.command = options, command
        surroundings.note("about the lab")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(door, "run_lab", recorder)
    return recorder


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(door.softroce, words)
    return done.exit_code, done.output


def test_the_words_become_options(recorder: Recorder) -> None:
    recorder.answer = 7
    words = "--rails 2 --mtu 4200 --memory 2048 --cpus 1 --timeout 9 --accel tcg --vms 2"
    status, _ = call(*words.split(), "--netem", "loss 1%", "--peer-command", "a 'b c'", "x", "-y")
    assert status == 7
    assert recorder.command == ("x", "-y")
    assert recorder.options == LabOptions(
        topology=Topology(hosts=2, vms=2, rails=2, mtu_bytes=4200, netem="loss 1%"),
        memory_mb=2048,
        cpus=1,
        timeout_s=9.0,
        accelerator="tcg",
        peer_command=("a", "b c"),
    )


def test_the_commands_own_options_are_left_to_it(recorder: Recorder) -> None:
    assert call("--", "pytest", "--rails", "--help")[0] == 0
    assert recorder.command == ("pytest", "--rails", "--help")


def test_quiet_says_nothing_about_the_lab(recorder: Recorder) -> None:
    assert "about the lab" in call("true")[1]
    assert call("--quiet", "true")[1] == ""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "no COMMAND"),
        (["--peer-command", "x", "true"], "needs --vms 2"),
        (["--vms", "2", "--peer-command", "'x", "true"], "No closing quotation"),
        (["--rails", "99", "true"], "rails=99"),
        (["--mtu", "1", "true"], "mtu=1"),
        (["--hosts", "3", "true"], "--hosts"),
        (["--vms", "2", "--hosts", "1", "true"], "two virtual machines are two hosts"),
        (["--native", "--vms", "2", "true"], "leave --vms out"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], answer: str) -> None:
    status, output = call(*words)
    assert status == 2
    assert answer in output
    assert "Traceback" not in output


def test_a_lab_failure_names_the_stage_and_a_way_out(recorder: Recorder) -> None:
    recorder.answer = LabError("tools", "not found: qemu", hint="apt-get install qemu-system-x86")
    status, output = call("true")
    assert status == 125
    assert "orbit softroce: lab stage tools failed: not found: qemu" in output
    assert "hint: apt-get install qemu-system-x86" in output
