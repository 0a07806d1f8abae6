"""The lab on the running kernel, for machines of one's own that have rdma_rxe: `--native`.

Builds the same layout with the same scripts, runs the command as it is, and takes the layout back.
Needs root and changes the kernel's routing rules while it lasts; knows no virtual machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orbit.errors import LabError, UsageError
from orbit.softroce.kernel import module_exists
from orbit.softroce.kernel_log import KernelLog
from orbit.softroce.run_folder import Surroundings, write_lab_files
from orbit.softroce.topology import Topology

SCRIPT_TIMEOUT_S = 120.0


def require_native(topology: Topology, root: Path = Path("/")) -> None:
    """Raises LabError or UsageError with the reason why the running kernel cannot be the lab."""
    if topology.vms != 1:
        raise UsageError("--native runs no virtual machines: leave --vms out")
    if topology.numa != 1:
        raise UsageError("--native has the memory nodes that there are: leave --numa out")
    release = platform.release()
    if not (root / "sys/module/rdma_rxe").exists() and not module_exists(root, release):
        raise LabError(
            "kernel-module",
            f"the running kernel {release} has no rdma_rxe",
            hint="leave --native out: the lab then boots a kernel that has it",
        )
    if os.geteuid() != 0:
        raise LabError("tools", "--native needs root", hint="use sudo, or leave --native out")


def run_native(
    topology: Topology,
    command: Sequence[str],
    surroundings: Surroundings,
    timeout_s: float | None,
    results: Path | None,
) -> tuple[int, KernelLog]:
    """Run `command` on the running kernel. Returns its exit status (124 when `timeout_s` ended it)
    and the kernel's log of that time. Raises LabError when a stage before the command fails."""
    require_native(topology)
    log = KernelLog()
    with tempfile.TemporaryDirectory(prefix="orbit-native-") as name, _kernel_log(log):
        base = Path(name)
        base.chmod(0o755)
        write_lab_files(base, base / "bin", topology.guest_variables("A") | {"SABOTAGE": ""})
        for script in ("layout.sh", "native.sh"):
            (base / "bin" / script).rename(base / script)
        for tool in (base / "bin").glob("orbit-*"):
            tool.chmod(0o755)
        target = results or base / "results"
        target.mkdir(parents=True, exist_ok=True)
        _script(base, "check", surroundings.note)
        try:
            if not _script(base, "up", surroundings.note):
                raise LabError("layout", "the layout script ended early")
            status = _command(base, target, topology, command, surroundings, timeout_s)
        finally:
            _script(base, "down", surroundings.note)
    return status, log


def _script(base: Path, what: str, note: Callable[[str], None]) -> bool:
    """Run one part of native.sh. Returns whether it said `verified`; raises LabError for a stage
    that failed."""
    done = subprocess.run(
        ["/bin/bash", str(base / "native.sh"), what],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=False,
    )
    verified = False
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        name, _, text = rest.partition(" ")
        if word == "fail":
            raise LabError(name, text)
        verified = verified or word == "verified"
        note(f"{name}: {text}" if word == "stage" else line)
    return verified


def _command(
    base: Path,
    results: Path,
    topology: Topology,
    command: Sequence[str],
    surroundings: Surroundings,
    timeout_s: float | None,
) -> int:
    lab = {k: v for k, v in topology.guest_variables("A").items() if k.startswith("ORBIT_")}
    path = f"{base / 'bin'}:{surroundings.environment.get('PATH', os.defpath)}"
    environment = {**surroundings.environment, **lab, "ORBIT_RESULTS": str(results), "PATH": path}
    try:
        process = subprocess.Popen(
            ["/bin/bash", "-c", 'ulimit -l unlimited; exec "$@"', "bash", *command],
            cwd=surroundings.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise LabError("command", str(error)) from error
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        process.kill()
        process.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _kernel_log(log: KernelLog) -> Iterator[None]:
    """Feeds `log` with what the running kernel says within. A record of /dev/kmsg is
    "priority,sequence,time,flags;text" and continuation lines."""
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
        yield
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            log.feed(record.partition(b";")[2].split(b"\n")[0] + b"\n")
        log.finish()
    finally:
        os.close(descriptor)
