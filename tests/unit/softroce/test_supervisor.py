"""How a run ends, told by the streams of guests that a test plays."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.softroce.machine import STREAMS, Stream
from orbit.softroce.supervisor import (
    END_MARKER,
    LinePrefix,
    Outcome,
    OutcomeKind,
    OutputFilter,
    Supervisor,
)
from orbit.softroce.topology import Role

WARN = b"[ 5.0] WARNING: CPU: 0 PID: 1 at drivers/infiniband/sw/rxe/rxe_pool.c:255 x\n"
OOPS = b"[ 5.0] BUG: kernel NULL pointer dereference\n"
LOCKUP = b"[ 5.0] watchdog: BUG: soft lockup - CPU#0 stuck for 26s!\n"


class PlayedGuest:
    """A machine whose other side is the test."""

    def __init__(self, role: Role = "A") -> None:
        self.role: Role = role
        self.streams: dict[Stream, socket.socket] = {}
        self.inside: dict[Stream, socket.socket] = {}
        for name in STREAMS:
            self.streams[name], self.inside[name] = socket.socketpair()
            self.streams[name].setblocking(False)
        self.killed = 0
        self.text = ""

    def complaints(self) -> str:
        return self.text

    def kill(self) -> None:
        self.killed += 1
        self.power_off()

    def say(self, stream: Stream, data: bytes) -> None:
        self.inside[stream].sendall(data)

    def finish(self, status: int) -> None:
        self.say("stdout", END_MARKER)
        self.say("stderr", END_MARKER)
        self.say("status", b"rc %d\n" % status)

    def power_off(self) -> None:
        for end in self.inside.values():
            end.close()

    def close(self) -> None:
        for end in (*self.streams.values(), *self.inside.values()):
            end.close()


class Bench:
    """A supervisor over played guests, and what came out of it."""

    def __init__(self, *guests: PlayedGuest) -> None:
        self.guests = guests
        self.stdout, self.stderr = bytearray(), bytearray()
        self.notes: list[str] = []
        self.peer_killed = 0

    def run(self, *, timeout_s: float | None = None, boot_timeout_s: float = 30.0) -> Outcome:
        supervisor = Supervisor(
            self.guests,
            stdout=self.stdout.extend,
            stderr=self.stderr.extend,
            note=self.notes.append,
            timeout_s=timeout_s,
            boot_timeout_s=boot_timeout_s,
            on_peer_killed=self._killed,
        )
        return supervisor.run()

    def _killed(self) -> None:
        self.peer_killed += 1


@pytest.fixture
def guest() -> Iterator[PlayedGuest]:
    played = PlayedGuest()
    yield played
    played.close()


@pytest.fixture
def peer() -> Iterator[PlayedGuest]:
    played = PlayedGuest("B")
    yield played
    played.close()


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbit.softroce.supervisor.FAULT_GRACE_S", 0.02)


def test_the_commands_output_and_status_come_through(guest: PlayedGuest) -> None:
    bench = Bench(guest)
    guest.say("status", b"stage device rxa1 ACTIVE\nverified\n")
    guest.say("stdout", b"out")
    guest.say("stderr", b"err\n")
    guest.finish(3)
    assert bench.run() == Outcome(OutcomeKind.FINISHED, status=3)
    assert (bytes(bench.stdout), bytes(bench.stderr)) == (b"out", b"err\n")
    assert bench.notes == ["device: rxa1 ACTIVE", "verified"]


def test_output_is_passed_on_before_the_command_ends(guest: PlayedGuest) -> None:
    bench = Bench(guest)
    arrived = threading.Event()
    bench_write: Callable[[bytes], None] = bench.stdout.extend

    def write(data: bytes) -> None:
        bench_write(data)
        arrived.set()

    guest.say("status", b"verified\n")
    guest.say("stdout", b"tick\n")
    supervisor = Supervisor(
        [guest], stdout=write, stderr=bench.stderr.extend, note=bench.notes.append, timeout_s=None
    )
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    assert arrived.wait(5)
    guest.finish(0)
    thread.join(5)
    assert not thread.is_alive()


def test_a_failed_stage_is_named(guest: PlayedGuest) -> None:
    guest.say("status", b"stage kernel-module ok\nfail rc-write-read WRITE ended in X\n")
    outcome = Bench(guest).run()
    assert outcome.kind is OutcomeKind.STAGE_FAILED
    assert (outcome.stage, outcome.message) == ("rc-write-read", "WRITE ended in X")


def test_a_guest_that_never_starts_is_told_with_qemus_words(guest: PlayedGuest) -> None:
    guest.text = "qemu: warning\nqemu: cannot set up guest memory"
    guest.power_off()
    outcome = Bench(guest).run()
    assert (outcome.kind, outcome.stage) == (OutcomeKind.STAGE_FAILED, "boot")
    assert outcome.message.endswith("qemu: cannot set up guest memory")


def test_the_init_scripts_complaint_is_told(guest: PlayedGuest) -> None:
    guest.say("console", b"[ 1.0] x\norbit-init: cannot mount the host's file system (9p)\n")
    guest.power_off()
    assert "cannot mount the host's file system" in Bench(guest).run().message


def test_a_guest_that_ends_during_the_command_has_failed(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\n")
    guest.power_off()
    outcome = Bench(guest).run()
    assert (outcome.kind, outcome.stage) == (OutcomeKind.STAGE_FAILED, "command")


def test_a_status_without_the_last_output_still_ends_the_run(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\nrc 4\n")
    guest.power_off()
    assert Bench(guest).run() == Outcome(OutcomeKind.FINISHED, status=4)


def test_no_proof_in_time_names_the_last_stage(guest: PlayedGuest) -> None:
    guest.say("status", b"stage gid ok\n")
    outcome = Bench(guest).run(boot_timeout_s=0.02)
    assert (outcome.kind, outcome.stage) == (OutcomeKind.STAGE_FAILED, "boot")
    assert "last stage: gid" in outcome.message


def test_the_timeout_ends_a_command(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\n")
    assert Bench(guest).run(timeout_s=0.02).kind is OutcomeKind.TIMED_OUT


def test_a_warning_in_rdma_code_makes_a_finished_run_invalid(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\n")
    guest.say("console", WARN)
    guest.say("stdout", b"went on")
    guest.finish(0)
    bench = Bench(guest)
    outcome = bench.run()
    assert outcome.kind is OutcomeKind.KERNEL_FAULT
    assert "rxe_pool.c" in outcome.message
    assert bytes(bench.stdout) == b"went on"


def test_an_oops_ends_the_run_with_its_trace(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\n")
    guest.say("console", OOPS + b"[ 5.0] RIP: rxe_invalidate_mw\n")
    outcome = Bench(guest).run()
    assert outcome.kind is OutcomeKind.KERNEL_FAULT
    assert any("rxe_invalidate_mw" in line for line in outcome.excerpt)


def test_a_lockup_is_a_stall_and_an_oops_outranks_it(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\n")
    guest.say("console", LOCKUP)
    assert Bench(guest).run().kind is OutcomeKind.STALLED
    guest.say("console", LOCKUP + OOPS)
    assert Bench(guest).run().kind is OutcomeKind.KERNEL_FAULT


def test_a_panic_that_ends_the_machine_is_a_kernel_fault(guest: PlayedGuest) -> None:
    guest.say("status", b"verified\n")
    guest.say("console", b"[ 6.0] Kernel panic - not syncing: x\n")
    guest.power_off()
    assert Bench(guest).run().kind is OutcomeKind.KERNEL_FAULT


def test_a_peer_that_the_command_kills_is_no_failure(guest: PlayedGuest, peer: PlayedGuest) -> None:
    bench = Bench(guest, peer)
    peer.say("status", b"verified\n")
    peer.say("stdout", b"hello\n")
    guest.say("status", b"verified\nkill-peer\n")
    guest.finish(5)
    assert bench.run() == Outcome(OutcomeKind.FINISHED, status=5)
    assert (peer.killed, bench.peer_killed) == (1, 1)


def test_a_peers_output_is_marked_and_its_failure_is_noted(
    guest: PlayedGuest, peer: PlayedGuest
) -> None:
    bench = Bench(guest, peer)
    peer.say("status", b"verified\n")
    peer.say("stdout", b"one\ntwo\n")
    peer.finish(9)
    done = threading.Timer(0.03, guest.finish, [0])
    guest.say("status", b"verified\n")
    done.start()
    assert bench.run().kind is OutcomeKind.FINISHED
    done.join()
    assert bytes(bench.stderr) == b"[B] one\n[B] two\n"
    assert "[B] the peer command ended with status 9" in bench.notes


@given(
    text=st.binary(max_size=60).filter(lambda data: END_MARKER not in data + END_MARKER[:-1]),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_the_end_marker_is_found_wherever_it_is_split(text: bytes, cuts: list[int]) -> None:
    data = text + END_MARKER
    written = bytearray()
    output = OutputFilter(written.extend)
    edges = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        output.feed(data[start:end])
    assert output.ended
    assert bytes(written) == text


def test_the_beginning_of_a_marker_is_output_when_no_marker_follows() -> None:
    written = bytearray()
    output = OutputFilter(written.extend)
    output.feed(b"a" + END_MARKER[:4])
    assert bytes(written) == b"a"
    output.feed(b"b")
    assert bytes(written) == b"a" + END_MARKER[:4] + b"b"
    assert not output.ended


def test_prefixes_stand_before_whole_lines() -> None:
    written = bytearray()
    prefix = LinePrefix("[B] ", written.extend)
    for piece in (b"a", b"b\nc", b"\n"):
        prefix.feed(piece)
    assert bytes(written) == b"[B] ab\n[B] c\n"
