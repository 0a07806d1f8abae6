"""Watches running guests: carries their output on as it comes, reads their status lines and kernel
logs, and ends them.

The one place that decides how a run ended (`Outcome`). Knows machines only by their streams.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from orbit.softroce.kernel_log import FaultKind, KernelFault, KernelLog
from orbit.softroce.machine import Stream
from orbit.softroce.topology import Role

END_MARKER = b"\x1eorbit-end\x1e"
"""Follows the command's last byte on each output port: what the guest wrote before it has all been
read."""
BOOT_TIMEOUT_S = 180.0
"""From start to `verified`. Software emulation on a busy host boots in 20 s; each stage has a
shorter limit inside."""
FAULT_GRACE_S = 2.0
"""How long a guest lives on after a kernel fault, so that the log has the whole trace."""
_READ_BYTES = 256 * 1024


class OutcomeKind(Enum):
    """How a run ended."""

    FINISHED = "finished"
    STAGE_FAILED = "stage failed"
    KERNEL_FAULT = "kernel fault"
    STALLED = "stalled"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is the command's exit status (FINISHED only); `stage` and `message` say what failed;
    `excerpt` are lines of the kernel log."""

    kind: OutcomeKind
    status: int = 0
    stage: str = ""
    message: str = ""
    excerpt: tuple[str, ...] = ()


class Streams(Protocol):
    """A guest as the supervisor sees it: machine.Machine, or a test's stand-in."""

    @property
    def role(self) -> Role: ...
    @property
    def streams(self) -> Mapping[Stream, Socket]: ...
    def complaints(self) -> str: ...
    def kill(self) -> None: ...


class Socket(Protocol):
    """The two calls of a socket that are used here."""

    def fileno(self) -> int: ...
    def recv(self, nbytes: int, /) -> bytes: ...


class OutputFilter:
    """Passes a stream on and stops at END_MARKER, which may arrive in pieces."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._held = b""
        self.ended = False

    def feed(self, data: bytes) -> None:
        """Pass on all that cannot be the beginning of the marker."""
        if self.ended:
            return
        data = self._held + data
        end = data.find(END_MARKER)
        if end >= 0:
            self.ended = True
            self._held, data = b"", data[:end]
        else:
            held = next(n for n in range(len(END_MARKER), -1, -1) if data.endswith(END_MARKER[:n]))
            self._held, data = data[len(data) - held :], data[: len(data) - held]
        if data:
            self._write(data)


class LinePrefix:
    """Puts a prefix before each line of a stream, for the output of the second machine."""

    def __init__(self, prefix: str, write: Callable[[bytes], None]) -> None:
        self._prefix = prefix.encode()
        self._write = write
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Pass on whole lines."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))


class _Watch:
    """What is known about one guest."""

    def __init__(
        self, machine: Streams, stdout: Callable[[bytes], None], stderr: Callable[[bytes], None]
    ) -> None:
        self.machine = machine
        self.outputs: dict[Stream, OutputFilter] = {
            "stdout": OutputFilter(stdout),
            "stderr": OutputFilter(stderr),
        }
        self.log = KernelLog()
        self.console = bytearray()
        self.status_partial = b""
        self.last_stage = "boot"
        self.verified = False
        self.status: int | None = None
        self.open = set(machine.streams)
        self.killed = False

    def finished(self) -> bool:
        """Whether the command has ended and all its output has been read."""
        outputs_ended = all(output.ended for output in self.outputs.values())
        return self.status is not None and (outputs_ended or not self.open)


class Supervisor:
    """Runs the first guest's command to its end, with an optional second guest beside it. `note`
    takes lines about the lab itself; `stdout` and `stderr` take the command's bytes."""

    def __init__(
        self,
        machines: Sequence[Streams],
        *,
        stdout: Callable[[bytes], None],
        stderr: Callable[[bytes], None],
        note: Callable[[str], None],
        timeout_s: float | None,
        on_peer_killed: Callable[[], None] = lambda: None,
        boot_timeout_s: float = BOOT_TIMEOUT_S,
    ) -> None:
        self._watches = [_Watch(machines[0], stdout, stderr)]
        for machine in machines[1:]:
            prefix = LinePrefix(f"[{machine.role}] ", stderr)
            self._watches.append(_Watch(machine, prefix.feed, prefix.feed))
        self._note = note
        self._timeout_s = timeout_s
        self._boot_timeout_s = boot_timeout_s
        self._on_peer_killed = on_peer_killed
        self._selector = selectors.DefaultSelector()
        self._outcome: Outcome | None = None
        self._fault_deadline: float | None = None

    def consoles(self) -> dict[Role, bytes]:
        """Everything that each guest's console printed."""
        return {watch.machine.role: bytes(watch.console) for watch in self._watches}

    def run(self) -> Outcome:
        """Watch until the first guest's command has ended or cannot end any more. The machines stay
        the caller's."""
        started = time.monotonic()
        boot_deadline = started + self._boot_timeout_s
        deadline = None if self._timeout_s is None else started + self._timeout_s
        with self._selector:
            for watch in self._watches:
                for name, stream in watch.machine.streams.items():
                    self._selector.register(stream.fileno(), selectors.EVENT_READ, (watch, name))
            while self._outcome is None:
                for key, _ in self._selector.select(self._wait_s(boot_deadline, deadline)):
                    watch, name = key.data
                    self._read(watch, name)
                self._judge(time.monotonic(), boot_deadline, deadline)
            return self._outcome

    def _wait_s(self, boot_deadline: float, deadline: float | None) -> float:
        limits = [self._fault_deadline, deadline]
        if not all(watch.verified for watch in self._watches):
            limits.append(boot_deadline)
        known = [limit for limit in limits if limit is not None]
        return max(0.0, min(known) - time.monotonic()) if known else 3600.0

    def _read(self, watch: _Watch, name: Stream) -> None:
        if name not in watch.open:
            return
        try:
            data = watch.machine.streams[name].recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            watch.open.discard(name)
            self._selector.unregister(watch.machine.streams[name].fileno())
        elif name == "console":
            watch.console += data
            for fault in watch.log.feed(data):
                self._fault(watch, fault)
        elif name == "status":
            *lines, watch.status_partial = (watch.status_partial + data).split(b"\n")
            for line in lines:
                self._status_line(watch, line.decode("utf-8", "replace").strip())
        else:
            watch.outputs[name].feed(data)

    def _status_line(self, watch: _Watch, line: str) -> None:
        word, _, rest = line.partition(" ")
        label = "" if len(self._watches) == 1 else f"[{watch.machine.role}] "
        match word:
            case "stage":
                watch.last_stage = rest.partition(" ")[0]
                self._note(f"{label}{watch.last_stage}: {rest.partition(' ')[2]}")
            case "verified":
                watch.verified = True
                self._note(f"{label}verified")
            case "fail":
                stage, _, message = rest.partition(" ")
                self._end(OutcomeKind.STAGE_FAILED, watch, stage=stage, message=label + message)
            case "rc" if rest.isdecimal():
                watch.status = int(rest)
                if watch is not self._watches[0] and watch.status != 0:
                    self._note(f"{label}the peer command ended with status {watch.status}")
            case "kill-peer" if watch is self._watches[0] and len(self._watches) == 2:
                self._kill_peer(self._watches[1])
            case _:
                self._note(f"{label}unexpected status line: {line[:200]}")

    def _kill_peer(self, peer: _Watch) -> None:
        peer.killed = True
        peer.machine.kill()
        self._note(f"machine {peer.machine.role} was killed")
        self._on_peer_killed()

    def _fault(self, watch: _Watch, fault: KernelFault) -> None:
        # A WARN leaves the kernel usable: the command runs on and shows what it can, and the run is
        # invalid at its end.
        if fault.kind is not FaultKind.WARNING and self._fault_deadline is None:
            self._fault_deadline = time.monotonic() + FAULT_GRACE_S

    def _judge(self, now: float, boot_deadline: float, deadline: float | None) -> None:
        if self._outcome is not None:
            return
        first = self._watches[0]
        if self._fault_deadline is not None:
            gone = all(not watch.open for watch in self._watches)
            if now >= self._fault_deadline or gone:
                self._end_by_log()
            return
        if first.finished():
            self._finish(first)
            return
        for watch in self._watches:
            if not watch.open and not watch.killed and watch.status is None:
                watch.log.finish()
                self._end_of_machine(watch)
                return
        if deadline is not None and now >= deadline:
            self._end(OutcomeKind.TIMED_OUT, first, stage=first.last_stage)
        elif now >= boot_deadline:
            late = next((watch for watch in self._watches if not watch.verified), None)
            if late is not None:
                limit = f"no proof within {self._boot_timeout_s:g} s, last stage: {late.last_stage}"
                self._end(OutcomeKind.STAGE_FAILED, late, stage="boot", message=limit)

    def _finish(self, first: _Watch) -> None:
        for watch in self._watches:
            self._drain_console(watch)
            watch.log.finish()
        if any(watch.log.faults for watch in self._watches):
            self._end_by_log()
        else:
            self._outcome = Outcome(OutcomeKind.FINISHED, status=first.status or 0)

    def _drain_console(self, watch: _Watch) -> None:
        if "console" in watch.open:
            try:
                data = watch.machine.streams["console"].recv(_READ_BYTES)
            except OSError:
                return
            watch.console += data
            watch.log.feed(data)

    def _end_of_machine(self, watch: _Watch) -> None:
        if watch.log.faults:
            self._end_by_log()
            return
        text = watch.machine.complaints() or "the guest powered off"
        complaint = text.splitlines()[-1]
        reason = next(
            (line for line in reversed(watch.log.excerpt()) if line.startswith("orbit-init: ")),
            complaint,
        )
        stage = "command" if watch.verified else "boot"
        message = f"machine {watch.machine.role} ended after stage {watch.last_stage}: {reason}"
        self._end(OutcomeKind.STAGE_FAILED, watch, stage=stage, message=message)

    def _end_by_log(self) -> None:
        # Worst first: a stall alone may be a busy host's doing, and only then is the run worth a
        # repetition.
        for watch in self._watches:
            for fault in watch.log.faults:
                if fault.kind is not FaultKind.STALL:
                    self._end(OutcomeKind.KERNEL_FAULT, watch, message=fault.line)
                    return
        for watch in self._watches:
            if watch.log.faults:
                self._end(OutcomeKind.STALLED, watch, message=watch.log.faults[0].line)
                return

    def _end(self, kind: OutcomeKind, watch: _Watch, *, stage: str = "", message: str = "") -> None:
        self._outcome = Outcome(
            kind, stage=stage, message=message, excerpt=tuple(watch.log.excerpt())
        )


def write_all(descriptor: int) -> Callable[[bytes], None]:
    """A writer that puts every byte on a descriptor before it returns."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    return write
