"""`orbit serve` and `orbit get` between real processes: bytes, refusals, signals, leftovers."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from orbit.cli.failures import ExitStatus
from orbit.model import Handle, SlotId
from orbit.protocol.endpoint import Endpoint
from orbit.protocol.ticket import Ticket
from orbit.testing.pattern import pattern
from tests.integration.cli import ORBIT, TIMEOUT_S, Relay, environment, orbit, serving, start

LARGE = 24 << 20  # more than any socket buffers between the two ends
MIDDLE = 5 << 20


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    path = tmp_path / "payload.bin"
    path.write_bytes(pattern(LARGE))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def has_rdma_device() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def altered(ticket: str, **changes: object) -> str:
    return str(replace(Ticket.parse(ticket), **changes))  # type: ignore[arg-type]


def at_port(ticket: str, port: int) -> str:
    address = Ticket.parse(ticket).address
    return altered(ticket, address=replace(address, endpoints=(Endpoint("127.0.0.1", port),)))


# --- what works ---


def test_files_of_every_kind_arrive(tmp_path: Path, out: Path) -> None:
    sizes = [0, 1, 65_536, (4 << 20) + 3, (20 << 20) + 1]
    files = [tmp_path / f"file-{nbytes}" for nbytes in sizes]
    for path, nbytes in zip(files, sizes, strict=True):
        path.write_bytes(pattern(nbytes))
    with serving(*files, files=len(files)) as server:
        for offer, nbytes in zip(server.offers, sizes, strict=True):
            done = orbit("get", offer["ticket"], "-o", out, "--json")
            assert done.status == ExitStatus.OK, done.err
            report = done.report
            assert (out / f"file-{nbytes}").read_bytes() == pattern(nbytes)
            assert report["path"] == "tcp"
            assert report["bytes"] == offer["bytes"] == nbytes
            assert (
                report["sha256"] == offer["sha256"] == hashlib.sha256(pattern(nbytes)).hexdigest()
            )
            assert report["reason"]
        assert server.stop().status == ExitStatus.OK


def test_a_ticket_serves_more_than_once(payload: Path, out: Path) -> None:
    with serving(payload) as server:
        for number in range(3):
            assert orbit("get", server.ticket, "-o", out / str(number)).status == 0
    assert all((out / str(n)).read_bytes() == pattern(LARGE) for n in range(3))


def test_what_a_person_sees(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(pattern(1000))
    with start("serve", path) as server:
        assert server.stdout is not None
        ticket = server.stdout.readline()  # stdout has the ticket and nothing else
        done = orbit("get", "-", "-o", out / "copy", stdin=ticket)
        assert done.status == 0, done.err
        assert done.err == ""  # no bar where there is no terminal
        assert "1000 bytes by tcp" in done.out
        assert hashlib.sha256(pattern(1000)).hexdigest() in done.out
        server.send_signal(signal.SIGINT)
        rest, said = server.communicate(timeout=TIMEOUT_S)
    assert rest == ""
    assert "data: 1000 bytes" in said
    assert server.returncode == ExitStatus.INTERRUPTED


def test_module_and_version() -> None:
    assert orbit("--version").out.startswith("orbit ")


# --- names and space on this machine ---


def test_an_existing_file_is_kept(payload: Path, out: Path) -> None:
    (out / "kept").write_bytes(b"old")
    with serving(payload) as server:
        done = orbit("get", server.ticket, "-o", out / "kept", "--json")
        assert done.status == ExitStatus.USAGE
        assert "--force" in done.error["hint"]
        assert (out / "kept").read_bytes() == b"old"
        assert orbit("get", server.ticket, "-o", out / "kept", "--force").status == 0
    assert (out / "kept").read_bytes() == pattern(LARGE)


def test_a_full_disk_is_said_before_the_first_byte(payload: Path, out: Path) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with serving(payload) as server:
        done = orbit("get", server.ticket, "-o", out / "x", "--json", preexec_fn=small)
    assert done.status == ExitStatus.FAILED
    assert done.error["code"] == "local_file"
    assert str(LARGE) in done.error["hint"]
    assert os.listdir(out) == []


def test_a_missing_file_is_not_served(tmp_path: Path) -> None:
    done = orbit("serve", tmp_path / "absent", "--json")
    assert done.status == ExitStatus.USAGE
    assert "No such file" in done.error["message"]


def test_a_directory_is_not_served(tmp_path: Path) -> None:
    assert orbit("serve", tmp_path).status == ExitStatus.USAGE


def test_a_missing_folder_is_said(out: Path) -> None:
    ticket_like = "orbit-ticket1:aaaa"
    assert orbit("get", ticket_like, "-o", out / "no" / "x").status == ExitStatus.USAGE


# --- tickets ---


@pytest.mark.parametrize("text", ["", "hello", "orbit-ticket1:", "orbit-ticket1:???", "../x"])
def test_no_ticket(text: str, out: Path) -> None:
    done = orbit("get", text, "-o", out / "x")
    assert done.status == ExitStatus.USAGE
    first, hint = done.err.splitlines()
    assert "ticket" in first
    assert hint.startswith("  hint: ")
    assert os.listdir(out) == []


def test_a_damaged_ticket(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    with serving(path) as server:
        swapped = "b" if server.ticket[40] != "b" else "c"
        for text in (server.ticket[:-5], server.ticket[:40] + swapped + server.ticket[41:]):
            done = orbit("get", text, "-o", out / "x", "--json")
            assert done.status == ExitStatus.USAGE
            assert "ticket" in done.error["message"]


def test_an_unknown_handle(payload: Path, out: Path) -> None:
    with serving(payload) as server:
        handle = Ticket.parse(server.ticket).handle
        other = altered(server.ticket, handle=Handle(handle.worker_id, SlotId(999)))
        done = orbit("get", other, "-o", out / "x", "--json")
    assert done.status == ExitStatus.PEER
    assert "no data is registered" in done.error["message"]
    assert os.listdir(out) == []


@pytest.mark.parametrize("change", [{"size": LARGE - 1}, {"sha256": "0" * 64}])
def test_a_ticket_for_something_else(payload: Path, out: Path, change: dict[str, object]) -> None:
    with serving(payload) as server:
        done = orbit("get", altered(server.ticket, **change), "-o", out / "x", "--json")
    assert done.status == ExitStatus.INTEGRITY
    assert os.listdir(out) == []


# --- peers ---


def ticket_of_a_dead_server(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    with serving(path) as server:
        ticket = server.ticket
        server.stop()
    return ticket


def test_refused(tmp_path: Path, out: Path) -> None:
    done = orbit("get", ticket_of_a_dead_server(tmp_path), "-o", out / "x", "--json")
    assert done.status == ExitStatus.PEER
    assert "connection refused" in done.error["message"]
    assert os.listdir(out) == []


def test_silent(tmp_path: Path, out: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ticket = at_port(ticket_of_a_dead_server(tmp_path), listener.getsockname()[1])
        done = orbit("get", ticket, "-o", out / "x", "--json")
    assert done.status == ExitStatus.PEER
    assert "no handshake answer" in done.error["message"]


def test_black_hole(tmp_path: Path, out: Path) -> None:
    """A listener whose queue is full: the kernel drops every further attempt."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        place = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(place)
        ticket = at_port(ticket_of_a_dead_server(tmp_path), place[1])
        done = orbit("get", ticket, "-o", out / "x", "--json")
        for filler in fillers:
            filler.close()
    assert done.status == ExitStatus.PEER
    assert "no answer" in done.error["message"]


def test_the_secret(payload: Path, tmp_path: Path, out: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    with serving(payload, "--secret-file", right) as server:
        words = ("get", server.ticket, "-o", out / "x", "--json")
        for attempt in (orbit(*words), orbit(*words, "--secret-file", wrong)):
            assert attempt.status == ExitStatus.PEER
            assert "auth" in attempt.error["message"]
            assert "--secret-file" in attempt.error["hint"]
            assert os.listdir(out) == []
        assert orbit(*words, "--secret-file", right).status == 0


def test_a_missing_secret_file_is_said(payload: Path, tmp_path: Path) -> None:
    done = orbit("serve", payload, "--secret-file", tmp_path / "absent", "--json")
    assert done.status == ExitStatus.USAGE
    assert "secret_file" in done.error["message"]


@pytest.mark.parametrize(
    ("switch", "reasons"),
    [
        ("1", ("kill_switch", "no_device")),
        pytest.param(
            "",
            ("no_device",),
            marks=pytest.mark.skipif(has_rdma_device(), reason="this machine has an RDMA device"),
        ),
    ],
)
def test_rdma_that_cannot_be_had_is_said(
    payload: Path, out: Path, switch: str, reasons: tuple[str, ...]
) -> None:
    env = environment(ORBIT_RDMA_RENDEZVOUS_DISABLE=switch)
    with serving(payload) as server:
        words = ("get", server.ticket, "-o", out / "x", "--json", "--transport", "rdma")
        done = orbit(*words, env=env)
    assert done.status == ExitStatus.PATH
    assert done.error["code"] == "path_unavailable"
    said = done.error["message"]
    assert any(f"no rdma path: {reason}" in said for reason in reasons)
    assert os.listdir(out) == []


def test_a_port_that_is_taken(payload: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        done = orbit("serve", payload, "--listen", place, "--json")
    assert done.status != 0
    assert place in done.error["message"]


# --- files that change while they are served ---


def test_a_truncated_file_ends_its_transfer_only(payload: Path, tmp_path: Path, out: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(pattern(MIDDLE, seed=3))
    with serving(payload, other, "--transport", "tcp", files=2) as server:
        os.truncate(payload, 0)
        failed = orbit("get", server.offers[0]["ticket"], "-o", out / "x", "--json")
        assert failed.status in (ExitStatus.FAILED, ExitStatus.INTEGRITY)
        assert os.listdir(out) == []
        assert orbit("get", server.offers[1]["ticket"], "-o", out / "y").status == 0
        assert server.stop().status == 0
    assert (out / "y").read_bytes() == pattern(MIDDLE, seed=3)


def test_a_changed_file_is_noticed(payload: Path, out: Path) -> None:
    with serving(payload, "--transport", "tcp") as server:
        with payload.open("r+b") as file:
            file.seek(LARGE // 2)
            file.write(b"changed")
        done = orbit("get", server.ticket, "-o", out / "x", "--json")
    assert done.status == ExitStatus.INTEGRITY
    assert os.listdir(out) == []


# --- signals in the middle ---


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, ExitStatus.INTERRUPTED), (signal.SIGTERM, ExitStatus.TERMINATED)],
)
def test_a_stopped_get_leaves_nothing(
    payload: Path, out: Path, number: signal.Signals, status: ExitStatus
) -> None:
    with serving(payload) as server, Relay(server.ticket, stall_after=MIDDLE) as relay:
        with start("get", relay.ticket, "-o", out / "x") as get:
            assert relay.stalled.wait(TIMEOUT_S)
            assert [name.endswith(".part") for name in os.listdir(out)] == [True]
            get.send_signal(number)
            _, said = get.communicate(timeout=TIMEOUT_S)
        assert get.returncode == status
        assert "Traceback" not in said
        assert os.listdir(out) == []
        # The owner is as good as new.
        assert orbit("get", server.ticket, "-o", out / "y").status == 0


def test_a_killed_get_never_has_the_final_name(payload: Path, out: Path) -> None:
    with serving(payload) as server, Relay(server.ticket, stall_after=MIDDLE) as relay:
        with start("get", relay.ticket, "-o", out / "x") as get:
            assert relay.stalled.wait(TIMEOUT_S)
            get.kill()
        assert not (out / "x").exists()
        assert orbit("get", server.ticket, "-o", out / "x").status == 0


def test_a_killed_owner_is_said(payload: Path, out: Path) -> None:
    with (
        serving(payload) as server,
        Relay(server.ticket, stall_after=MIDDLE) as relay,
        start("get", relay.ticket, "-o", out / "x", "--json") as get,
    ):
        assert relay.stalled.wait(TIMEOUT_S)
        server.process.kill()
        server.process.wait(TIMEOUT_S)
        relay.close()
        _, said = get.communicate(timeout=TIMEOUT_S)
    assert get.returncode in (ExitStatus.PEER, ExitStatus.FAILED)
    assert json.loads(said)["error"]["message"]
    assert os.listdir(out) == []


def test_output_that_nobody_reads(payload: Path) -> None:
    """`orbit serve FILE | head -0`: the end of the reader is no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [*ORBIT, "serve", str(payload)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
        check=False,
    )
    os.close(writer)
    assert process.returncode == ExitStatus.FAILED
    assert "Traceback" not in process.stderr


# --- the demo ---


def test_the_demo_moves_and_compares() -> None:
    done = orbit("demo", "--size", "5MiB", "--transport", "tcp", "--json")
    assert done.status == 0, done.err
    report = done.report
    assert report["path"] == "tcp"
    assert report["bytes"] == 5 << 20
    assert report["sha256_owner"] == report["sha256_consumer"]
    assert report["sha256_owner"] == hashlib.sha256(pattern(5 << 20)).hexdigest()


def test_the_demo_for_a_person(payload: Path) -> None:
    done = orbit("demo", payload)
    assert done.status == 0, done.err
    shown = {line[:18].strip(): line[18:].strip() for line in done.out.splitlines()}
    assert {"path", "reason", "bytes", "seconds", "gb per s"} <= shown.keys()
    assert shown["sha256 owner"] == shown["sha256 consumer"]


def test_the_demo_fails_without_the_demanded_path() -> None:
    done = orbit("demo", "--size", "1MiB", "--transport", "rdma")
    assert done.status == ExitStatus.PATH
    assert "no rdma path" in done.err


def test_the_demo_needs_its_file(tmp_path: Path) -> None:
    assert orbit("demo", tmp_path / "absent").status == ExitStatus.USAGE


def test_the_demo_needs_the_lab_for_its_hosts() -> None:
    done = orbit("demo", "--hosts", "lab", "--json")
    assert done.status == ExitStatus.USAGE
    assert "orbit softroce" in done.error["hint"]
