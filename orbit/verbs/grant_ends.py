"""What names a grant, on both sides: the connection that it was made on, and which of a lease's
grants it is. A record that names anything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter

from ..protocol.binding import GrantRecord


@dataclass(frozen=True, slots=True)
class GrantEnds:
    """The fields of a grant record that one connected queue pair fixes, and the epoch's key."""

    direction: int
    source_process: bytes
    requester_process: bytes
    source_connection: bytes
    requester_connection: bytes
    array: int
    index: int
    source_qpn: int
    requester_qpn: int
    session_key: bytes = field(repr=False)

    def mismatch(self, record: GrantRecord) -> tuple[str, ...]:
        """Fields in which a record is not one of this connection's; empty when it fits."""
        expected, found = _connection_values(self), _connection_values(record)
        if found == expected:
            return ()
        names = _CONNECTION_FIELDS
        return tuple(n for n, a, b in zip(names, found, expected, strict=True) if a != b)

    def record(self, part: GrantPart, address: int, length: int, key: int) -> GrantRecord:
        return GrantRecord(
            source_process=self.source_process,
            requester_process=self.requester_process,
            source_connection=self.source_connection,
            requester_connection=self.requester_connection,
            request_id=part.request_id,
            array=self.array,
            index=self.index,
            source_qpn=self.source_qpn,
            requester_qpn=self.requester_qpn,
            generation=part.generation,
            address=address,
            length=length,
            key=key,
            direction=self.direction,
            slice_index=part.index,
            slice_count=part.count,
        )


@dataclass(frozen=True, slots=True)
class GrantPart:
    """Which of a lease's grants one is. All of them bear the same request id."""

    request_id: bytes
    generation: int
    index: int = 0
    count: int = 1


_CONNECTION_FIELDS = tuple(f.name for f in fields(GrantEnds) if f.name != "session_key")
_connection_values = attrgetter(*_CONNECTION_FIELDS)
