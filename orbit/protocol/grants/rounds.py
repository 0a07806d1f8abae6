"""Which READs or WRITEs of a transfer may be posted now: pieces in order, bounded by send slots and
bytes in flight.

One slot of the allotment is kept for the receipt, so that the last round can always carry it. Knows
no queue pair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InternalError, UsageError


@dataclass(frozen=True, slots=True)
class Piece:
    """One READ or WRITE: bytes [offset, offset + nbytes) of the granted range."""

    offset: int
    nbytes: int


class RoundPlanner:
    """Plans the work requests of `total_bytes` in pieces of at most `piece_bytes`.

    At most `inflight_bytes_max` bytes and `send_slots - 1` pieces are in flight; a single piece is
    always allowed, so a small byte limit shortens the pieces instead of stopping the transfer.
    `borders`: offsets that no piece crosses, in rising order, since one work request has one local
    key.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        piece_bytes: int,
        inflight_bytes_max: int,
        send_slots: int,
        borders: Sequence[int] = (),
    ) -> None:
        if total_bytes < 1 or piece_bytes < 1 or inflight_bytes_max < 1 or send_slots < 2:
            raise UsageError(
                f"cannot plan {total_bytes} bytes in pieces of {piece_bytes},"
                f" {inflight_bytes_max} in flight, {send_slots} send slots"
            )
        self.total_bytes = total_bytes
        self.completed_bytes = 0
        self.inflight_bytes = 0
        self._piece_bytes = min(piece_bytes, inflight_bytes_max)
        self._inflight_bytes_max = inflight_bytes_max
        self._pieces_max = send_slots - 1
        self._inflight: deque[int] = deque()
        self._borders = deque(borders)

    @property
    def pieces_in_flight(self) -> int:
        return len(self._inflight)

    @property
    def all_posted(self) -> bool:
        return self.completed_bytes + self.inflight_bytes == self.total_bytes

    @property
    def finished(self) -> bool:
        return self.completed_bytes == self.total_bytes

    def next_round(self) -> tuple[Piece, ...]:
        """The pieces that fit now, in order; they count as in flight from here on."""
        pieces: list[Piece] = []
        while not self.all_posted and len(self._inflight) < self._pieces_max:
            offset = self.completed_bytes + self.inflight_bytes
            nbytes = min(self._piece_bytes, self._next_border(offset) - offset)
            if self.inflight_bytes + nbytes > self._inflight_bytes_max:
                break
            self._inflight.append(nbytes)
            self.inflight_bytes += nbytes
            pieces.append(Piece(offset, nbytes))
        return tuple(pieces)

    def complete(self, count: int) -> int:
        """The oldest `count` pieces have succeeded (a queue pair completes in order). Returns
        their bytes.
        """
        if not 0 < count <= len(self._inflight):
            raise InternalError(f"{count} pieces completed, {len(self._inflight)} in flight")
        nbytes = sum(self._inflight.popleft() for _ in range(count))
        self.inflight_bytes -= nbytes
        self.completed_bytes += nbytes
        return nbytes

    def _next_border(self, offset: int) -> int:
        """The first one behind `offset`; the end where there is none."""
        borders = self._borders
        while borders and borders[0] <= offset:
            borders.popleft()
        return min(borders[0], self.total_bytes) if borders else self.total_bytes
