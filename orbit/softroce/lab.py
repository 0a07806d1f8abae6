"""One lab run from options to exit status: prepares kernel and initramfs, starts the machines,
reports how it ended.

Owns a run's temporary folder, the signals during the run, and the meaning of the exit statuses.
Runs may go on side by side: nothing here has a fixed name or port.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from orbit.errors import LabError
from orbit.softroce.boot_image import boot_image
from orbit.softroce.initramfs import build_initramfs
from orbit.softroce.kernel import locate_kernel
from orbit.softroce.machine import (
    Accelerator,
    Machine,
    MachineSpec,
    Qemu,
    kvm_problem,
    require_qemu,
)
from orbit.softroce.native import run_native
from orbit.softroce.packages import RUN_TOOLS, require_busybox, require_pyverbs, require_tools
from orbit.softroce.run_folder import Surroundings, write_control_folder
from orbit.softroce.supervisor import Outcome, OutcomeKind, Supervisor
from orbit.softroce.topology import Role, Topology

STATUS_KERNEL_FAULT = 97
STATUS_TIMEOUT = 124
STATUS_LAB = 125

SABOTAGES = {
    "no-rxe": ("rdma_rxe",),
    "no-crc32": ("crc32_generic", "crc32_pclmul"),
    "namespaces": (),
    "netdev-down": (),
    "udp-drop": (),
}
"""Ways in which the lab's own tests break it, with the modules that the initramfs then lacks."""


@dataclass(frozen=True, slots=True)
class LabOptions:
    """How to run. `memory_mb` and `cpus` are per machine. `peer_command` runs in machine B of a lab
    of two machines."""

    topology: Topology = field(default_factory=Topology)
    memory_mb: int = 3072
    cpus: int = 2
    timeout_s: float | None = None
    results: Path | None = None
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    peer_command: tuple[str, ...] = ()
    native: bool = False
    sabotage: str = ""


@dataclass(frozen=True, slots=True)
class Guest:
    """What every machine of a run boots."""

    qemu: Qemu
    accelerator: Accelerator
    kernel: Path
    initramfs: Path


class Interrupted(BaseException):
    """A signal asked the run to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where kernels and initramfs files are kept between runs."""
    base = environment.get("XDG_CACHE_HOME") or str(
        Path(environment.get("HOME", "/root")) / ".cache"
    )
    return Path(base) / "orbit" / "softroce"


def prepare_guest(options: LabOptions, surroundings: Surroundings) -> Guest:
    """Find or fetch the kernel, build the initramfs, choose the accelerator. Raises LabError.
    Nothing is fetched or built that is there already."""
    require_tools(*RUN_TOOLS)
    require_pyverbs()
    qemu, busybox = require_qemu(), require_busybox()
    kernel = locate_kernel(surroundings.cache, surroundings.note)
    omit = SABOTAGES.get(options.sabotage, ())
    image = boot_image(kernel, surroundings.cache)
    initramfs = build_initramfs(kernel, busybox, surroundings.cache, omit)
    accelerator: Accelerator = "tcg"
    problem = "not wanted"
    if options.accelerator != "tcg":
        problem = kvm_problem(qemu, image, initramfs)
        if not problem:
            accelerator = "kvm"
        elif options.accelerator == "kvm":
            raise LabError("boot", f"KVM does not work here: {problem}")
    how = "KVM" if accelerator == "kvm" else f"software emulation (KVM: {problem})"
    surroundings.note(f"guest kernel {kernel.version}, {how}")
    return Guest(qemu, accelerator, image, initramfs)


def run_lab(options: LabOptions, command: Sequence[str], surroundings: Surroundings) -> int:
    """Run `command` in the lab and return the exit status: the command's own, or one of the STATUS_
    constants, or 128 plus the number of the signal that ended the run. Raises LabError when a stage
    before the command fails."""
    alert = surroundings.alert
    with signals_raise():
        try:
            if options.native:
                return _run_native(options, command, surroundings)
            guest = prepare_guest(options, surroundings)
            outcome = _run_once(guest, options, command, surroundings)
            if outcome.kind is OutcomeKind.STALLED:
                alert(f"the guest stalled ({outcome.message}): the run is repeated once")
                outcome = _run_once(guest, options, command, surroundings)
        except Interrupted as interrupt:
            alert(f"ended by {signal.Signals(interrupt.signum).name}")
            return 128 + interrupt.signum
    return _report(outcome, options, alert)


def _run_native(options: LabOptions, command: Sequence[str], surroundings: Surroundings) -> int:
    status, log = run_native(
        options.topology, command, surroundings, options.timeout_s, options.results
    )
    if not log.faults:
        return status
    outcome = Outcome(
        OutcomeKind.KERNEL_FAULT, message=log.faults[0].line, excerpt=tuple(log.excerpt())
    )
    return _report(outcome, options, surroundings.alert)


def _report(outcome: Outcome, options: LabOptions, alert: Callable[[str], None]) -> int:
    match outcome.kind:
        case OutcomeKind.FINISHED:
            return outcome.status
        case OutcomeKind.TIMED_OUT:
            alert(f"ended by --timeout {options.timeout_s:g} (last stage: {outcome.stage})")
            return STATUS_TIMEOUT
        case OutcomeKind.STAGE_FAILED:
            if outcome.stage == "boot":
                _show_excerpt(outcome, alert)
            raise LabError(outcome.stage, outcome.message)
        case OutcomeKind.KERNEL_FAULT | OutcomeKind.STALLED:
            what = "fault" if outcome.kind is OutcomeKind.KERNEL_FAULT else "stall, twice"
            _show_excerpt(outcome, alert)
            alert(f"INVALID RUN, kernel {what}: {outcome.message}")
            return STATUS_KERNEL_FAULT


def _show_excerpt(outcome: Outcome, alert: Callable[[str], None]) -> None:
    for line in outcome.excerpt:
        alert(f"| {line}")


def _run_once(
    guest: Guest, options: LabOptions, command: Sequence[str], surroundings: Surroundings
) -> Outcome:
    roles: tuple[Role, ...] = ("A", "B") if options.topology.vms == 2 else ("A",)
    started = time.monotonic()
    with ExitStack() as stack:
        run_folder = stack.enter_context(_run_folder())
        results = options.results or run_folder / "results"
        results.mkdir(parents=True, exist_ok=True)
        machines: list[Machine] = []
        for role in roles:
            argv = command if role == "A" else options.peer_command or ("true",)
            control = run_folder / role
            variables = options.topology.guest_variables(role) | {"SABOTAGE": options.sabotage}
            write_control_folder(control, variables, argv, surroundings)
            spec = MachineSpec(
                role=role,
                accelerator=guest.accelerator,
                kernel=guest.kernel,
                initramfs=guest.initramfs,
                control=control,
                results=results,
                memory_mb=options.memory_mb,
                cpus=options.cpus,
                numa=options.topology.numa,
                network=options.topology.network_arguments(role, str(run_folder)),
            )
            machine = Machine(spec, guest.qemu)
            stack.callback(machine.close)
            machines.append(machine)
        supervisor = Supervisor(
            machines,
            stdout=surroundings.stdout,
            stderr=surroundings.stderr,
            note=_with_seconds(surroundings.note, started),
            timeout_s=options.timeout_s,
            on_peer_killed=(run_folder / "A" / "peer-killed").touch,
        )
        outcome = supervisor.run()
        if options.results is not None:
            for role, console in supervisor.consoles().items():
                (results / f"console-{role}.log").write_bytes(console)
    return outcome


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within, SIGINT, SIGTERM and SIGHUP raise Interrupted once; cleaning up is not interrupted
    again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        for number in caught:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _run_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="orbit-lab-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_seconds(note: Callable[[str], None], started: float) -> Callable[[str], None]:
    return lambda text: note(f"{time.monotonic() - started:5.1f} s  {text}")
