"""From options to exit status, with played machines; and what is said when the host lacks a
part."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from orbit.errors import LabError, UsageError
from orbit.softroce import lab, native
from orbit.softroce.lab import Guest, LabOptions, cache_folder, prepare_guest, run_lab
from orbit.softroce.machine import (
    ARCHITECTURES,
    STREAMS,
    Machine,
    MachineSpec,
    Qemu,
    kvm_problem,
    machine_arguments,
)
from orbit.softroce.packages import (
    QEMU_PACKAGES,
    RUN_TOOLS,
    Tool,
    distribution,
    install_hint,
    require_busybox,
    require_tools,
)
from orbit.softroce.run_folder import Surroundings
from orbit.softroce.supervisor import Outcome, OutcomeKind, write_all
from orbit.softroce.topology import Topology

QEMU = Qemu(Path("/usr/bin/qemu"), ARCHITECTURES["x86_64"])
GUEST = Guest(QEMU, "tcg", Path("/cache/kernel"), Path("/cache/initramfs"))
FAULT = Outcome(OutcomeKind.KERNEL_FAULT, message="BUG: x", excerpt=("[ 1.0] BUG: x",))
STALL = Outcome(OutcomeKind.STALLED, message="soft lockup")
GOOD = Outcome(OutcomeKind.FINISHED, status=3)


class Caller:
    """Surroundings that keep what they were told."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self.alerts: list[str] = []
        self.surroundings = Surroundings(
            directory=folder,
            environment={},
            cache=folder,
            note=self.notes.append,
            alert=self.alerts.append,
            stdout=lambda _data: None,
            stderr=lambda _data: None,
        )


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def play(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome | type[BaseException] | int) -> None:
    """Let runs end as told; a number is a signal that arrives in the middle."""
    left = list(outcomes)

    def run_once(_guest: Guest, *_arguments: object) -> Outcome:
        outcome = left.pop(0)
        if isinstance(outcome, int):
            os.kill(os.getpid(), outcome)
            raise AssertionError("the signal did not raise")
        assert isinstance(outcome, Outcome)
        return outcome

    monkeypatch.setattr(lab, "prepare_guest", lambda *_arguments: GUEST)
    monkeypatch.setattr(lab, "_run_once", run_once)


def test_the_commands_status_is_the_runs(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    play(monkeypatch, GOOD)
    assert run_lab(LabOptions(), ["true"], caller.surroundings) == 3
    assert caller.alerts == []


def test_a_failed_stage_is_an_error(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    play(monkeypatch, Outcome(OutcomeKind.STAGE_FAILED, stage="mtu", message="lost"))
    with pytest.raises(LabError, match="lab stage mtu failed: lost") as caught:
        run_lab(LabOptions(), ["true"], caller.surroundings)
    assert caught.value.stage == "mtu"


def test_a_kernel_fault_makes_the_run_invalid(
    monkeypatch: pytest.MonkeyPatch, caller: Caller
) -> None:
    play(monkeypatch, FAULT)
    assert run_lab(LabOptions(), ["true"], caller.surroundings) == lab.STATUS_KERNEL_FAULT
    assert caller.alerts[0] == "| [ 1.0] BUG: x"
    assert "INVALID RUN" in caller.alerts[-1]


def test_a_stall_is_repeated_once_and_may_pass(
    monkeypatch: pytest.MonkeyPatch, caller: Caller
) -> None:
    play(monkeypatch, STALL, GOOD)
    assert run_lab(LabOptions(), ["true"], caller.surroundings) == 3
    assert "repeated once" in caller.alerts[0]


def test_two_stalls_make_the_run_invalid(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    play(monkeypatch, STALL, STALL)
    assert run_lab(LabOptions(), ["true"], caller.surroundings) == lab.STATUS_KERNEL_FAULT


def test_the_timeout_has_its_own_status(monkeypatch: pytest.MonkeyPatch, caller: Caller) -> None:
    play(monkeypatch, Outcome(OutcomeKind.TIMED_OUT, stage="mtu"))
    options = LabOptions(timeout_s=5)
    assert run_lab(options, ["true"], caller.surroundings) == lab.STATUS_TIMEOUT
    assert "--timeout 5" in caller.alerts[0]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_handlers_are_restored(
    monkeypatch: pytest.MonkeyPatch, caller: Caller, signum: signal.Signals
) -> None:
    before = signal.getsignal(signum)
    play(monkeypatch, int(signum))
    assert run_lab(LabOptions(), ["true"], caller.surroundings) == 128 + signum
    assert signal.getsignal(signum) is before


def test_machines_and_their_folder_are_gone_after_a_run(
    monkeypatch: pytest.MonkeyPatch, caller: Caller, tmp_path: Path
) -> None:
    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\necho 'qemu: no such machine' >&2\nexit 1\n")
    program.chmod(0o755)
    guest = replace(GUEST, qemu=replace(QEMU, program=program))
    monkeypatch.setattr(lab, "prepare_guest", lambda *_arguments: guest)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    with pytest.raises(LabError, match="qemu: no such machine"):
        run_lab(LabOptions(topology=Topology(vms=2)), ["true"], caller.surroundings)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_machine_is_killed_with_its_streams_closed(tmp_path: Path) -> None:
    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    machine = Machine(spec(tmp_path), replace(QEMU, program=program))
    assert machine.running()
    machine.close()
    assert not machine.running()
    assert all(stream.fileno() == -1 for stream in machine.streams.values())
    machine.close()


def spec(folder: Path) -> MachineSpec:
    return MachineSpec(
        role="A",
        accelerator="tcg",
        kernel=Path("/cache/kernel"),
        initramfs=Path("/cache/initramfs"),
        control=folder / "A,B",
        results=folder,
        memory_mb=1024,
        cpus=1,
    )


def test_the_command_line_of_a_machine(tmp_path: Path) -> None:
    descriptors = {name: 10 + n for n, name in enumerate(STREAMS)}
    argv = machine_arguments(spec(tmp_path), QEMU, descriptors)
    text = " ".join(argv)
    assert "path=/,mount_tag=hostroot" in text
    assert "readonly=on" in next(word for word in argv if "hostroot" in word)
    assert f"path={tmp_path}/A,,B,mount_tag=control" in text
    assert "panic=-1" in argv[argv.index("-append") + 1]
    for name, descriptor in descriptors.items():
        assert f"socket,id={name},fd={descriptor}" in argv


def test_memory_and_processors_are_divided_between_nodes(tmp_path: Path) -> None:
    descriptors = {name: 10 + n for n, name in enumerate(STREAMS)}
    two = replace(spec(tmp_path), memory_mb=1025, cpus=3, numa=2)
    text = " ".join(machine_arguments(two, QEMU, descriptors))
    assert "memory-backend-ram,id=memory0,size=512M" in text
    assert "memory-backend-ram,id=memory1,size=513M" in text
    assert "node,nodeid=0,memdev=memory0,cpus=0,cpus=1 " in text
    assert "node,nodeid=1,memdev=memory1,cpus=2 " in text
    assert "dist,src=0,dst=1,val=21" in text


def test_kvm_is_tried_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_arguments: True)
    program = tmp_path / "qemu"
    qemu = replace(QEMU, program=program)
    for script, expected in (
        ("echo orbit-probe-ok", ""),
        ("echo 'x: cannot create VM' >&2; exit 1", "cannot create VM"),
        ("exit 3", "the trial guest ended with status 3"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert kvm_problem(qemu, Path("k"), Path("i")) == expected
    monkeypatch.setattr("orbit.softroce.machine.KVM_TRY_TIMEOUT_S", 0.05)
    program.write_text("#!/bin/sh\nexec sleep 5\n")
    assert "did not start" in kvm_problem(qemu, Path("k"), Path("i"))
    monkeypatch.setattr("os.access", lambda *_arguments: False)
    assert "no /dev/kvm" in kvm_problem(qemu, Path("k"), Path("i"))


def test_kvm_as_a_demand_fails_where_it_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caller: Caller
) -> None:
    for name in ("require_tools", "require_pyverbs", "require_busybox", "boot_image"):
        monkeypatch.setattr(lab, name, lambda *_arguments: Path("x"))
    monkeypatch.setattr(lab, "require_qemu", lambda: QEMU)
    monkeypatch.setattr(lab, "locate_kernel", lambda *_arguments: _Kernel())
    monkeypatch.setattr(lab, "build_initramfs", lambda *_arguments: Path("i"))
    monkeypatch.setattr(lab, "kvm_problem", lambda *_arguments: "no /dev/kvm")
    assert prepare_guest(LabOptions(), caller.surroundings).accelerator == "tcg"
    assert "software emulation (KVM: no /dev/kvm)" in caller.notes[0]
    with pytest.raises(LabError, match="KVM does not work here: no /dev/kvm"):
        prepare_guest(LabOptions(accelerator="kvm"), caller.surroundings)


class _Kernel:
    version = "6.1.0"


def test_missing_tools_are_all_named_with_their_packages() -> None:
    with pytest.raises(LabError) as caught:
        require_tools(Tool("no-such-a", "pkg-a"), Tool("sh", "dash"), Tool("no-such-b", "pkg-b"))
    assert "not found: no-such-a, no-such-b" in str(caught.value)
    assert caught.value.hint.endswith("pkg-a pkg-b")


def test_a_dynamic_busybox_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbit.softroce.packages.find_tool", lambda _name: Path("/bin/sh"))
    with pytest.raises(LabError, match="no statically linked busybox") as caught:
        require_busybox()
    assert "busybox-static" in caught.value.hint


def test_the_install_hint_speaks_the_distributions_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = tmp_path / "os-release"
    release.write_text('NAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n')
    assert distribution(release) == "debian-12"
    assert distribution(tmp_path / "none") == "unknown"
    for host, words in (("debian-12", "apt-get install x"), ("fedora-40", "Debian 12 calls: x")):
        monkeypatch.setattr("orbit.softroce.packages.distribution", _constant(host))
        assert words in install_hint(["x", "x"])


def _constant(value: str) -> object:
    return lambda: value


@pytest.mark.parametrize("distribution_name", ["debian-12", "ubuntu-24.04"])
def test_set_up_installs_what_a_run_asks_for(distribution_name: str) -> None:
    listing = Path(__file__).parents[3] / f"scripts/packages/{distribution_name}.txt"
    listed = {line.split()[0] for line in listing.read_text().splitlines() if line.strip()}
    needed = {tool.package for tool in RUN_TOOLS} | set(QEMU_PACKAGES.values())
    needed |= {"kmod", "busybox-static", "python3-pyverbs", "ibverbs-providers", "util-linux"}
    assert needed <= listed


def test_native_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.0-test")
    with pytest.raises(LabError, match=r"running kernel 6.0-test has no rdma_rxe") as caught:
        native.require_native(Topology(), tmp_path)
    assert "leave --native out" in caught.value.hint
    with pytest.raises(UsageError, match="leave --vms out"):
        native.require_native(Topology(vms=2), tmp_path)
    module = tmp_path / "lib/modules/6.0-test/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(LabError, match="needs root"):
        native.require_native(Topology(), tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    native.require_native(Topology(), tmp_path)


def test_the_cache_follows_the_users_choice() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/orbit/softroce")
    assert cache_folder({"HOME": "/home/x"}) == Path("/home/x/.cache/orbit/softroce")


def test_every_byte_is_written() -> None:
    reading, writing = os.pipe()
    write_all(writing)(b"abc" * 1000)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        assert file.read() == b"abc" * 1000
