"""How a baseline's two ends talk: requests and answers that msgpack can carry, checked on arrival.

It knows no baseline; what is in a request is for the end that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from ...errors import OrbitError, PeerProtocolError, UsageError
from ...protocol.messages import RailHint
from ..plan import Plan, Verb
from ..report import NO_LATENCY, EndUsage, Latency, Row, Source

Request = Mapping[str, Any]
Ask = Callable[[str, Request], Awaitable[Request]]

OPS_MAX: Final = 1_000_000
CONNECTIONS_MAX: Final = 64
SECONDS_MAX: Final = 60.0  # of one baseline of one size
STALL_S: Final = 20.0  # without any progress
RUN_S: Final = SECONDS_MAX + 2 * STALL_S  # the operations of one run, with warm-up and end
ANSWER_S: Final = RUN_S + STALL_S  # for any answer of the server

_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


def integer(request: Request, name: str, low: int, high: int) -> int:
    """Raises PeerProtocolError for what is no integer from `low` to `high`."""
    value = request.get(name)
    if type(value) is not int or not low <= value <= high:
        raise PeerProtocolError(f"baseline: {name}={value!r} is not between {low} and {high}")
    return value


def text(request: Request, name: str, longest: int = 256) -> str:
    value = request.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise PeerProtocolError(f"baseline: {name} is no text of up to {longest} characters")
    return value


def octets(request: Request, name: str, length: int) -> bytes:
    value = request.get(name)
    if not isinstance(value, bytes) or len(value) != length:
        raise PeerProtocolError(f"baseline: {name} is not {length} bytes")
    return value


def rail_to_wire(rail: RailHint) -> dict[str, Any]:
    return asdict(rail)


def rail_of(request: Request, name: str) -> RailHint:
    """Raises PeerProtocolError."""
    found = request.get(name)
    names = {one.name for one in fields(RailHint)}
    if not isinstance(found, Mapping) or set(found) != names:
        raise PeerProtocolError(f"baseline: {name} is no rail")
    rail = RailHint(**found)
    integer(found, "port", 1, 255)
    integer(found, "gid_index", 0, 65_535)
    integer(found, "mtu", 256, 4096)
    integer(found, "lid", 0, 0xFFFF)
    integer(found, "pkey", 0, 0xFFFF)
    text(found, "gid")
    text(found, "link_layer")
    if not _DEVICE.match(text(found, "device")):
        raise PeerProtocolError(f"baseline: {rail.device!r} is no name of a device")
    return rail


@dataclass(frozen=True, slots=True)
class Work:
    """What one baseline does for one size: `ops` operations of `batch` items of `size` bytes,
    `inflight` at once, or as many as begin within `limit_s` seconds.
    """

    verb: Verb
    size: int
    batch: int
    inflight: int
    ops: int
    warmup: int
    limit_s: float = SECONDS_MAX

    @classmethod
    def of(cls, plan: Plan, size: int, ops: int) -> Work:
        """`ops`: those of orbit, at least one."""
        return cls(
            verb=plan.verb,
            size=size,
            batch=plan.batch,
            inflight=min(plan.inflight, ops, CONNECTIONS_MAX),
            ops=min(ops, OPS_MAX),
            warmup=plan.warmup,
            limit_s=min(plan.duration or SECONDS_MAX, SECONDS_MAX),
        )

    @property
    def nbytes(self) -> int:
        """Of one operation."""
        return self.size * self.batch

    @property
    def to_server(self) -> bool:
        return self.verb in (Verb.MSG, Verb.PUT, Verb.WRITE)

    def check_room(self, room: int) -> None:
        """Raises UsageError: it needs more memory than `room` bytes."""
        if self.nbytes * self.inflight > room:
            raise UsageError(
                f"the baseline needs {self.nbytes * self.inflight} bytes for {self.inflight} "
                f"operations at once; this end may use {room}"
            )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a baseline found."""

    seconds: float
    latency: Latency
    ops: int
    client: EndUsage
    server: EndUsage


def row_of(work: Work, source: Source, path: str, found: Measured) -> Row:
    return Row(
        source=source,
        size=work.size,
        batch=work.batch,
        inflight=work.inflight,
        ops=found.ops,
        errors=0,
        seconds=found.seconds,
        latency=found.latency,
        path=path,
        paths={path: found.ops},
        client=found.client,
        server=found.server,
    )


def failed_row(work: Work, source: Source, path: str, error: OrbitError) -> Row:
    """One that says why there are no figures: no operation, one error."""
    return Row(
        source=source,
        size=work.size,
        batch=work.batch,
        inflight=work.inflight,
        ops=0,
        errors=1,
        seconds=0.0,
        latency=NO_LATENCY,
        path=path,
        reason=str(error),
    )
