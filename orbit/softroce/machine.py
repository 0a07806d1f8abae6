"""One virtual machine: its QEMU command line, its process, and the streams that come out of it.

Starts and kills; reads nothing and decides nothing (the supervisor does). The streams are socket
pairs, so that a machine's end is the end of every stream.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from orbit.errors import LabError
from orbit.softroce.packages import QEMU_PACKAGES, Tool, find_tool, require_tools
from orbit.softroce.topology import Role

Accelerator = Literal["kvm", "tcg"]
Stream = Literal["stdout", "stderr", "status", "console"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr", "status", "console")

KVM_TRY_TIMEOUT_S = 10.0
"""A working KVM boots the probe in about a second; a broken nested one may hang for ever."""
_REAP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between processor architectures. Only x86_64 is tested. `emulated_cpu` is the
    model under software emulation."""

    name: str
    machine: str
    console: str
    emulated_cpu: str


ARCHITECTURES = {
    # Not `max`: with AVX to emulate, the way to the command takes a quarter more processor time.
    "x86_64": Architecture("x86_64", "pc", "ttyS0", "Nehalem"),
    "aarch64": Architecture("aarch64", "virt,gic-version=max", "ttyAMA0", "max"),
}


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """All that a machine is made of. `control` and `results` are folders of this host that the
    guest can write."""

    role: Role
    accelerator: Accelerator
    kernel: Path
    initramfs: Path
    control: Path
    results: Path
    memory_mb: int
    cpus: int
    numa: int = 1  # memory nodes
    network: list[str] = field(default_factory=lambda: ["-nic", "none"])


@dataclass(frozen=True, slots=True)
class Qemu:
    """The emulator for this host's architecture."""

    program: Path
    architecture: Architecture

    def arguments(self, accelerator: Accelerator, kernel: Path, initramfs: Path) -> list[str]:
        """What every guest shares. The kernel log down to warnings goes to the serial console."""
        accel, cpu = ("kvm", "host")
        if accelerator == "tcg":
            accel, cpu = "tcg,thread=multi", self.architecture.emulated_cpu
        return [
            *(
                str(self.program),
                "-no-user-config",
                "-nodefaults",
                "-display",
                "none",
                "-no-reboot",
            ),
            *("-machine", self.architecture.machine, "-accel", accel, "-cpu", cpu),
            *("-kernel", str(kernel), "-initrd", str(initramfs)),
        ]

    def kernel_arguments(self, *more: str) -> str:
        """panic=-1 with -no-reboot ends the process at a panic; the rest costs time and protects
        nobody here."""
        words = (
            f"console={self.architecture.console}",
            "loglevel=5",
            "panic=-1",
            "mitigations=off",
            "audit=0",
            "apparmor=0",
        )
        return " ".join((*words, *more))


def require_qemu() -> Qemu:
    """The emulator, or LabError naming its package."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise LabError("tools", f"the lab knows no guest for {platform.machine()}")
    command = f"qemu-system-{architecture.name}"
    tools = require_tools(Tool(command, QEMU_PACKAGES[architecture.name]))
    return Qemu(tools[command], architecture)


def kvm_problem(qemu: Qemu, kernel: Path, initramfs: Path) -> str:
    """Why KVM cannot be used here, or an empty string. Tries it for real: boots the guest's kernel
    to its first process, because /dev/kvm also exists where no guest starts."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "no /dev/kvm for this user"
    argv = [
        *qemu.arguments("kvm", kernel, initramfs),
        *("-m", "512", "-serial", "stdio", "-nic", "none"),
        *("-append", qemu.kernel_arguments("orbit.probe")),
    ]
    try:
        with tempfile.TemporaryDirectory(
            prefix="orbit-kvm-"
        ) as scratch:  # a failing QEMU dumps core
            done = subprocess.run(
                argv,
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=KVM_TRY_TIMEOUT_S,
                check=False,
                start_new_session=True,
            )
    except subprocess.TimeoutExpired:
        return f"the trial guest did not start within {KVM_TRY_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error)
    if b"orbit-probe-ok" in done.stdout:
        return ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (
        lines[-1].rpartition(": ")[2][:120]
        if lines
        else f"the trial guest ended with status {done.returncode}"
    )


class Machine:
    """A running guest."""

    def __init__(self, spec: MachineSpec, qemu: Qemu) -> None:
        self.spec = spec
        self.role: Role = spec.role
        self.streams: dict[Stream, socket.socket] = {}
        theirs: dict[Stream, socket.socket] = {}
        for name in STREAMS:
            self.streams[name], theirs[name] = socket.socketpair()
            self.streams[name].setblocking(False)
        # QEMU's own complaints ("cannot set up guest memory") are few; a file takes them without a
        # reader.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                [
                    *_die_with_parent(),
                    *machine_arguments(spec, qemu, {n: s.fileno() for n, s in theirs.items()}),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._complaints,
                stderr=self._complaints,
                pass_fds=[end.fileno() for end in theirs.values()],
                # Ctrl-C at the terminal is for the supervisor alone, which then ends the machine.
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            raise LabError("boot", f"{qemu.program}: {error}") from error
        finally:
            for end in theirs.values():
                end.close()

    @property
    def pid(self) -> int:
        """The id of the QEMU process."""
        return self._process.pid

    def running(self) -> bool:
        """Whether QEMU has not ended yet."""
        return self._process.poll() is None

    def complaints(self) -> str:
        """What QEMU itself wrote, for the message when a machine does not start."""
        self._complaints.seek(0)
        return self._complaints.read().decode("utf-8", "replace").strip()

    def kill(self) -> None:
        """End the machine at once, as a power failure would, and wait until the process is gone."""
        self._process.kill()
        self._process.wait(_REAP_TIMEOUT_S)

    def close(self) -> None:
        """Kill and let go of every stream. Safe to call twice."""
        self.kill()
        self._close()

    def _close(self) -> None:
        for end in self.streams.values():
            end.close()
        self._complaints.close()


def machine_arguments(spec: MachineSpec, qemu: Qemu, descriptors: dict[Stream, int]) -> list[str]:
    """The whole QEMU command line of a lab guest."""
    argv = qemu.arguments(spec.accelerator, spec.kernel, spec.initramfs)
    argv += ["-smp", str(spec.cpus), "-m", str(spec.memory_mb)]
    argv += _memory_nodes(spec)
    argv += ["-append", qemu.kernel_arguments()]
    argv += _shared_folder("hostroot", Path("/"), "readonly=on")
    argv += _shared_folder("control", spec.control)
    argv += _shared_folder("results", spec.results)
    argv += ["-chardev", f"socket,id=console,fd={descriptors['console']}"]
    argv += ["-serial", "chardev:console", "-device", "virtio-serial-pci"]
    for name in ("stdout", "stderr", "status"):
        argv += ["-chardev", f"socket,id={name},fd={descriptors[name]}"]
        argv += ["-device", f"virtserialport,chardev={name},name=orbit.{name}"]
    return [*argv, "-device", "virtio-rng-pci", *spec.network]


def _memory_nodes(spec: MachineSpec) -> Iterable[str]:
    """Memory and processors divided evenly, the nodes 21 apart (10 is local)."""
    if spec.numa == 1:
        return
    for node in range(spec.numa):
        size = spec.memory_mb * (node + 1) // spec.numa - spec.memory_mb * node // spec.numa
        yield from ("-object", f"memory-backend-ram,id=memory{node},size={size}M")
        cpus = [cpu for cpu in range(spec.cpus) if cpu * spec.numa // spec.cpus == node]
        words = "".join(f",cpus={cpu}" for cpu in cpus)
        yield from ("-numa", f"node,nodeid={node},memdev=memory{node}{words}")
    for node in range(1, spec.numa):
        yield from ("-numa", f"dist,src={node - 1},dst={node},val=21")


def _shared_folder(tag: str, path: Path, *more: str) -> Iterable[str]:
    words = (
        f"local,path={str(path).replace(',', ',,')}",
        f"mount_tag={tag}",
        "security_model=none",
        # One export spans several file systems of the host: their inode numbers must not be mixed
        # up.
        "multidevs=remap",
        *more,
    )
    return ("-virtfs", ",".join(words))


def _die_with_parent() -> list[str]:
    # Also a SIGKILL of the supervisor, which it cannot handle, leaves no machine behind.
    setpriv = find_tool("setpriv")
    return [str(setpriv), "--pdeathsig", "KILL", "--"] if setpriv else []
