"""`orbit demo`: one real file, two processes, by handle; and the proof of how it went.

Starts `orbit serve` and `orbit get` as a user would. In the lab the two run on two hosts, and the
owner's device must have sent as many packets as the bytes need: right bytes alone would not show
that RDMA moved them.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from ..config import lab_environment
from ..errors import PathUnavailable, UsageError
from ..model import PathName, Transport
from ..testing.pattern import pattern
from . import output
from .children import Child, Report, lab_host
from .counters import packets_needed, packets_sent, rxe_devices
from .failures import IntegrityError
from .options import json_option, parse_size, transport_option
from .payload import file_size
from .running import run

_LISTEN = {"local": "127.0.0.1:0", "lab": "10.9.0.1:0"}  # lab: host A's address on the TCP link
_START_TIMEOUT_S = 300.0  # hashing and registering the file, in an emulated machine too
_GET_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened, and both digests, each computed from the file on its side."""

    fetched: Report
    source_sha256: str
    result_sha256: str
    packets: int | None  # sent by the owner's device meanwhile; None where nothing is counted
    packets_min: int

    @property
    def proven(self) -> bool:
        return self.packets is None or self.packets >= self.packets_min


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--size",
    type=parse_size,
    default="64MiB",
    show_default=True,
    metavar="SIZE",
    help="Size of the made-up file.",
)
@click.option(
    "--hosts",
    type=click.Choice(["local", "lab"]),
    default="local",
    show_default=True,
    help="lab: the two hosts of `orbit softroce --hosts 2`.",
)
@transport_option()
@json_option
def demo(file: Path | None, size: int, hosts: str, transport: str, as_json: bool) -> None:
    """Move FILE (or a made-up one) between two processes by handle, and compare both ends."""
    if hosts == "lab" and lab_environment() is None:
        raise UsageError(
            "there is no lab here",
            hint="orbit softroce --hosts 2 --mtu 4200 -- orbit demo --hosts lab --transport rdma",
        )
    with tempfile.TemporaryDirectory(prefix="orbit-demo-") as folder:
        source = file if file is not None else _made_up(Path(folder), size)
        file_size(source)  # a missing file is said before anything starts
        outcome = run(_demo(source, Path(folder) / "received", hosts, transport))
    _show(outcome, as_json)
    _judge(outcome, transport)


async def _demo(source: Path, result: Path, hosts: str, transport: str) -> Outcome:
    as_owner, as_consumer = (lab_host("A"), lab_host("B")) if hosts == "lab" else ((), ())
    owner_devices = rxe_devices("rxa") if hosts == "lab" else ()
    serve = ["serve", str(source), "--json", "--transport", transport]
    async with Child.orbit(as_owner, [*serve, "--listen", _LISTEN[hosts]]) as owner:
        offer = await owner.read_report(_START_TIMEOUT_S)
        before = packets_sent(owner_devices)
        get = ["get", str(offer["ticket"]), "-o", str(result), "--json", "--transport", transport]
        async with Child.orbit(as_consumer, get) as consumer:
            fetched = await consumer.read_report(_GET_TIMEOUT_S)
            await consumer.wait_success(_STOP_TIMEOUT_S)
        after = packets_sent(owner_devices)
        await owner.stop(_STOP_TIMEOUT_S)
    return Outcome(
        fetched=fetched,
        source_sha256=_sha256(source),
        result_sha256=_sha256(result),
        packets=after - before if owner_devices else None,
        packets_min=packets_needed(int(str(fetched["bytes"])), owner_devices),
    )


def _made_up(folder: Path, size: int) -> Path:
    path = folder / "payload"
    path.write_bytes(pattern(size))
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show(outcome: Outcome, as_json: bool) -> None:
    fetched = outcome.fetched
    record: dict[str, object] = {
        "path": fetched["path"],
        "reason": fetched["reason"],
        "bytes": fetched["bytes"],
        "seconds": fetched["seconds"],
        "gb_per_s": fetched["gb_per_s"],
        "sha256_owner": outcome.source_sha256,
        "sha256_consumer": outcome.result_sha256,
    }
    if outcome.packets is not None and fetched["path"] == PathName.RDMA:
        record["owner_packets"] = outcome.packets
        record["owner_packets_min"] = outcome.packets_min
    if as_json:
        output.print_json(record)
        return
    for name, value in record.items():
        print(f"{name.replace('_', ' '):18} {value}")


def _judge(outcome: Outcome, transport: str) -> None:
    """Raises what makes the command fail: other bytes, or another path than the demanded one."""
    if outcome.source_sha256 != outcome.result_sha256:
        raise IntegrityError("the two files differ")
    path = str(outcome.fetched["path"])
    if transport not in (Transport.AUTO, path):
        raise PathUnavailable(transport, str(outcome.fetched["reason"]), f"{path} was taken")
    if path == PathName.RDMA and not outcome.proven:
        raise PathUnavailable(
            transport,
            "not_proven",
            f"the owner's device sent {outcome.packets} packets, "
            f"{outcome.packets_min} are needed for these bytes",
        )
