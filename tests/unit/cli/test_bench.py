"""`orbit bench` with ends that are made up: options, files, what is shown and how it ends."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from orbit.availability import Availability
from orbit.bench.client import Incomplete
from orbit.bench.ends import NodeSettings
from orbit.bench.figures import latency_of
from orbit.bench.measuring import Progress
from orbit.bench.plan import Plan, Verb, Verify
from orbit.bench.report import Report, Source, reports_from_json
from orbit.cli import bench as module
from orbit.cli.bench_options import listen_option, node_options, plan_options
from orbit.cli.bench_progress import live
from orbit.cli.bench_values import (
    bytes_of,
    parse_sizes,
    plans_of,
    settings_of,
    words_of,
)
from orbit.cli.failures import ExitStatus
from orbit.cli.main import main
from orbit.errors import PeerLost, UsageError
from orbit.model import PathReason, Transport
from orbit.protocol.endpoint import Endpoint
from tests.unit.bench.reports import SIZE, baseline, report, row

HERE = "127.0.0.1:7000"


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K", (4096,)),
        ("4K,64KiB,100B", (4096, 65536, 100)),
        ("1M..8M", (1 << 20, 2 << 20, 4 << 20, 8 << 20)),
        ("4K..10K", (4096, 8192, 10240)),
        ("4K..8K,8K..16K", (4096, 8192, 16384)),
        ("1..1", (1,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "4K..", "..4K", "8K..4K", "0..4K", "4K,,8K", "x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_sizes(text)


def given(*words: str) -> dict[str, Any]:
    """What the options of a measuring command come to."""
    found: dict[str, Any] = {}

    @click.command()
    @plan_options
    @listen_option
    @node_options
    def probe(**values: Any) -> None:
        found.update(values)

    probe.main(args=list(words), standalone_mode=False)
    return found


def test_the_options_of_a_plan() -> None:
    words = "--op msg,get --op put --op msg --size 4K --batch 2 --inflight 3 --iterations 9"
    more = "--warmup 0 --verify full --seed 5 --no-baseline --transport tcp"
    first, *others = plans_of(given(*words.split(), *more.split()))
    assert first == Plan(
        verb=Verb.MSG,
        sizes=(4096,),
        transport=Transport.TCP,
        batch=2,
        inflight=3,
        iterations=9,
        warmup=0,
        verify=Verify.FULL,
        seed=5,
        baseline=False,
    )
    assert [plan.verb for plan in others] == [Verb.GET, Verb.PUT]
    assert bytes_of((first, *others)) >= 4096 * 6


def test_a_plan_without_options_takes_a_time() -> None:
    (plan,) = plans_of(given())
    assert (plan.verb, plan.iterations, plan.verify) == (Verb.GET_INTO, None, Verify.SAMPLE)
    assert plan.duration


def test_the_other_end_of_a_loop_is_set_up_alike() -> None:
    words = "--device a --device b --rails 2 --gid-index 3 --lanes 4 --progress polling"
    more = "--host-memory staged --secret-file secret --transport rdma"
    settings = settings_of(given(*words.split(), *more.split()), 1 << 20)
    assert settings == NodeSettings(
        secret_file=Path("secret"),
        transport=Transport.RDMA,
        devices=("a", "b"),
        gid_index=3,
        rails=2,
        lanes=4,
        progress="polling",
        host_memory="staged",
        buffer_bytes=1 << 20,
    )
    assert settings_of(given(*words_of(settings)), 1 << 20) == settings


Measured = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Gives `run_plan` its answers, one for each plan, and collects how it was called."""

    def answer(*answers: Report | Exception) -> list[dict[str, Any]]:
        left, calls = list(answers), []

        async def run_plan(plan: Plan, server: object, settings: object, **more: Any) -> Report:
            calls.append({"plan": plan, "server": server, "settings": settings, **more})
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return replace(found, plan=replace(found.plan, verb=plan.verb))

        monkeypatch.setattr(module, "run_plan", run_plan)
        return calls

    return answer


def bench(*words: str | Path) -> int:
    return main(["bench", *map(str, words)])


def test_a_run_shows_what_really_ran(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = measured(report(row(reason="not_pinned"), baseline()))
    assert bench("run", HERE, "--size", "1M", "--perftest") == ExitStatus.OK
    (call,) = calls
    assert call["server"] == Endpoint("127.0.0.1", 7000)
    assert call["perftest"] is True
    shown, said = capsys.readouterr()
    lines = [line.split() for line in shown.splitlines()]
    assert said == ""
    figures = "1 MiB orbit 100 1.049 8.389 1000 1000 1000 1000* 1000"
    assert figures.split() in lines
    assert "1 MiB socket 100 2.097 16.8 0.50 500 500 500 500* 500".split() in lines
    assert "1 MiB orbit 0 0.51 0.26 - 1.00 tcp (not_pinned)".split() in lines
    assert "1 MiB orbit 0.200 1.000".split() in lines
    assert "left: orbit 0.1.0" in shown
    assert "server  right: orbit 0.1.0" in shown
    assert "slowest one" in shown
    assert "problem" not in shown


def test_a_baseline_that_could_not_be_had_is_a_note(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = baseline(ops=0, errors=1, seconds=0.0, latency=latency_of([]), reason="refused")
    measured(report(row(), missing))
    assert bench("run", HERE) == ExitStatus.OK
    shown = capsys.readouterr().out
    assert "no socket to compare 1 MiB with: refused" in shown
    assert "1 MiB  socket" not in shown


def test_progress_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stderr, drawn in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        with live(Verb.GET) as step:
            step(Progress(SIZE, Source.ORBIT, 0.5, 2e9))
        assert ("get 1 MiB by orbit" in stderr.getvalue()) is drawn


def test_columns_are_aligned_in_a_pipe(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(report(row(), baseline(), row(size=64 << 10), baseline(size=64 << 10)))
    bench("run", HERE)
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.strip().startswith("size"))
    ends = {line.rstrip().rindex(line.split()[-1]) + len(line.split()[-1]) for line in
            (line.rstrip() for line in lines[start + 1 : start + 5])}  # fmt: skip
    assert len(ends) == 1
    assert "\x1b" not in "".join(lines)


def test_json_is_one_object_a_line(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    sent = report()
    measured(sent, sent)
    assert bench("run", HERE, "--size", "1M", "--op", "get,put", "--json") == ExitStatus.OK
    lines = capsys.readouterr().out.splitlines()
    found = [reports_from_json(line)[0] for line in lines]
    assert [one.plan.verb for one in found] == [Verb.GET, Verb.PUT]
    assert found[0].rows == sent.rows


def test_files(measured: Measured, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured(report(), report())
    csv, out = tmp_path / "a.csv", tmp_path / "a.json"
    bench("run", HERE, "--op", "get,put", "--csv", csv, "--out", out)
    assert len(csv.read_text().splitlines()) == 5
    assert [one.plan.verb for one in reports_from_json(out.read_text())] == [Verb.GET, Verb.PUT]
    capsys.readouterr()
    measured(report())
    bench("run", HERE, "--csv", "-")
    assert capsys.readouterr().out.splitlines()[0].startswith("started,verb,")


def test_what_was_measured_before_a_failure_is_kept(measured: Measured, tmp_path: Path) -> None:
    measured(report(), PeerLost("p", "reset"))
    out = tmp_path / "a.json"
    assert bench("run", HERE, "--op", "get,put", "--out", out) == ExitStatus.PEER
    assert len(reports_from_json(out.read_text())) == 1


def test_the_sizes_before_a_failure_are_kept(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = report(problems=("get_into: ended early: lost",))
    measured(Incomplete(partial, PeerLost("p", "reset")))
    out = tmp_path / "a.json"
    assert bench("run", HERE, "--out", out) == ExitStatus.PEER
    shown, said = capsys.readouterr()
    assert "problem: get_into: ended early: lost" in shown
    assert "p: connection lost (reset)" in said
    (kept,) = reports_from_json(out.read_text())
    assert kept.rows == partial.rows


def test_a_file_that_cannot_be_had_costs_no_other_one(measured: Measured, tmp_path: Path) -> None:
    measured(report())
    plot = tmp_path / "a.svg"
    plot.symlink_to("/dev/full")
    words = ("--out", "/dev/full", "--csv", tmp_path / "a.csv", "--plot", plot)
    assert bench("run", HERE, *words) == ExitStatus.FAILED
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        (report(problems=("bytes differ: get of 1",)), ExitStatus.INTEGRITY, "bytes differ"),
        (report(row(path="rdma/x", paths={"rdma/x": 100})), ExitStatus.PATH, "rdma/x was taken"),
        (report(problems=("unquiesced: 4096 bytes",)), ExitStatus.FAILED, "unquiesced"),
        (report(row(seconds=1e-6)), ExitStatus.FAILED, "cannot be true"),
        (report(row(errors=1)), ExitStatus.FAILED, "1 of 101 operations failed"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_figures_not_to_be_believed_fail_the_command(
    found: Report,
    status: ExitStatus,
    said: str,
    as_json: bool,
    measured: Measured,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured(found)
    assert bench("run", HERE, *(["--json"] if as_json else [])) == status
    shown, error = capsys.readouterr()
    if as_json:
        assert any(said in problem for problem in json.loads(shown)["problems"])
        assert "error" in json.loads(error)
    else:
        assert shown.rstrip().splitlines()[-1].startswith("problem: ")
        assert said in shown
        assert error.startswith("orbit: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nowhere"), "has no port"),
        (("run", HERE, "--op", "fly"), "'fly' is none of"),
        (("run", HERE, "--op", "read"), "no automatic transport"),
        (("run", HERE, "--duration", "1", "--iterations", "1"), "either"),
        (("run", HERE, "--iterations", "0"), "iterations=0"),
        (("run", HERE, "--json", "--csv", "-"), "standard output"),
        (("run", HERE, "--plot", "a.pdf"), "the format .pdf is not drawn"),
        (("run", HERE, "--out", "absent/a.json"), "is no folder"),
        (("run", HERE, "--out", "-"), "only --csv writes to standard output"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    words: tuple[str, ...], said: str, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = measured()
    assert bench(*words) == ExitStatus.USAGE
    assert said in capsys.readouterr().err
    assert not calls


def test_a_loop_that_demands_what_is_not_there_starts_nothing(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = Availability(PathReason.NO_DEVICE, ("this host lists no RDMA device",))
    monkeypatch.setattr(module, "available", lambda: nothing)
    monkeypatch.setattr(module.Child, "orbit", lambda *_: pytest.fail("an end was started"))
    assert bench("loop", "--transport", "rdma") == ExitStatus.PATH
    assert capsys.readouterr().err == (
        "orbit: no rdma path: no_device (this host lists no RDMA device)\n"
    )


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(report().to_json())
    other = {**report().client, "kernel": "6.2.0"}
    b.write_text(report(row(seconds=0.125), client=other).to_json())
    assert bench("compare", a, b) == ExitStatus.OK
    shown = capsys.readouterr().out
    assert "get_into 1 MiB orbit 1.049 0.839 0.80 1000 1000 1.00".split() in [
        line.split()[:10] for line in shown.splitlines()
    ]
    assert "client: kernel: 6.1.0 and 6.2.0" in shown
    assert f"only A has get_into {SIZE} bytes by socket" in shown
    assert bench("compare", a, b, "--fail-below", "0.95", "--json") == ExitStatus.FAILED
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"][0]["rate_ratio"] == pytest.approx(0.8)
    assert bench("compare", a, b, "--fail-below", "0.75") == ExitStatus.OK


def test_a_file_that_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("{}")
    assert bench("compare", tmp_path / "a", tmp_path / "a") == ExitStatus.USAGE
    assert bench("compare", tmp_path / "b", tmp_path / "b") == ExitStatus.FAILED
    assert "not a report" in capsys.readouterr().err


def test_every_option_of_every_part_is_described() -> None:
    reference = Path(__file__).parents[3] / "docs/reference/cli.md"
    section = reference.read_text("utf-8").split("## orbit bench", 1)[1].split("\n## ", 1)[0]
    for name, command in module.bench.commands.items():
        assert f"orbit bench {name}" in section
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert f"`{parameter.opts[0]}" in section, f"{name} {parameter.opts[0]}"


def test_every_part_has_its_help() -> None:
    for name in module.bench.commands:
        shown = CliRunner().invoke(module.bench, [name, "--help"])
        assert shown.exit_code == 0, shown.output


def test_plans_are_refused_before_settings() -> None:
    with pytest.raises(UsageError):
        plans_of(given("--batch", "0"))
