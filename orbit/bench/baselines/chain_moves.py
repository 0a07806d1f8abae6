"""Operations of a READ chain: a window of pieces over one queue pair, as many bytes in flight as
orbit's own paths have, completions awaited asleep on the channel.

It posts and waits; what it moves is scratch. Blocking, for one thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import ClosedError, CompletionError, DeadlineExceeded, DeviceError
from ...verbs import records
from ...verbs.status import status_name
from .asking import STALL_S, Work
from .chain_end import ChainEnd, Target

_NAP_US = 500_000  # between two looks at whether it is to stop


class _Piece(NamedTuple):
    offset: int
    nbytes: int
    first: bool  # of its operation
    last: bool


@dataclass(slots=True)
class Moved:
    """Seconds of each operation, from its first post to its last completion."""

    samples: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    crossings: int = 0


class Mover:
    def __init__(self, end: ChainEnd, target: Target, work: Work) -> None:
        self._end = end
        self._target = target
        self._work = work
        self._pack = records.pack_write if work.to_server else records.pack_read
        self._piece_bytes = min(end.config.piece_bytes, end.message_bytes_max)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """From another thread: `move` raises ClosedError soon."""
        self._stopped.set()

    def move(self, ops: int) -> Moved:
        """Raises DeviceError, CompletionError, DeadlineExceeded, ClosedError."""
        found = Moved()
        turn = self._end.turn
        cpu_s, crossings = time.thread_time(), turn.crossings.total
        began = now = time.perf_counter()
        pieces = self._pieces(ops, began + self._work.limit_s)
        waiting = next(pieces, None)
        flying: deque[_Piece] = deque()
        starts: deque[float] = deque()
        in_flight = 0
        while waiting is not None or flying:
            chain = []
            while waiting is not None and self._fits(waiting, in_flight, len(flying), len(starts)):
                if waiting.first:
                    starts.append(time.perf_counter())
                chain.append(self._packed(waiting))
                flying.append(waiting)
                in_flight += waiting.nbytes
                waiting = next(pieces, None)
            if chain:
                self._post(chain)
            for piece in [flying.popleft() for _ in range(self._completed())]:  # RC: in order
                in_flight -= piece.nbytes
                if piece.last:
                    now = time.perf_counter()
                    found.samples.append(now - starts.popleft())
        found.seconds = now - began
        found.cpu_s = time.thread_time() - cpu_s
        found.crossings = turn.crossings.total - crossings
        return found

    def _pieces(self, ops: int, limit: float) -> Iterator[_Piece]:
        """Of all operations, in order. An operation has a slot of the buffer to itself while it is
        in flight.
        """
        work = self._work
        for number in range(ops):
            if time.perf_counter() > limit:
                return
            base = number % work.inflight * work.nbytes
            for item in range(work.batch):
                for offset in range(0, work.size, self._piece_bytes):
                    nbytes = min(self._piece_bytes, work.size - offset)
                    first = not item and not offset
                    last = item == work.batch - 1 and offset + nbytes == work.size
                    yield _Piece(base + item * work.size + offset, nbytes, first, last)

    def _fits(self, piece: _Piece, in_flight: int, pieces: int, ops: int) -> bool:
        if piece.first and ops == self._work.inflight:
            return False
        if not pieces:
            return True
        return pieces < self._end.depth and (
            in_flight + piece.nbytes <= self._end.config.inflight_bytes
        )

    def _packed(self, piece: _Piece) -> bytes:
        end, target = self._end, self._target
        local = end.address + piece.offset
        remote = target.address + piece.offset
        return self._pack(0, local, end.region.lkey, piece.nbytes, remote, target.rkey)

    def _post(self, chain: list[bytes]) -> None:
        result = self._end.turn.post_send(self._end.pair.native, chain)
        if result.errno:
            raise DeviceError(self._end.rail.device, "post_send", result.errno)

    def _completed(self) -> int:
        """How many pieces have, at least one."""
        end, turn = self._end, self._end.turn
        deadline = time.monotonic() + STALL_S
        while not self._stopped.is_set():
            spin_us = end.config.effective_spin_us
            found = turn.wait(end.cq.native, end.channel.native, spin_us, _NAP_US)
            turn.drain_events(end.channel.native, end.cq.native)
            for one in found:
                if one.status:
                    name = status_name(one.status)
                    raise CompletionError(
                        one.status, name, one.vendor_err, end.pair.qp_num, "the bare chain"
                    )
            if found:
                return len(found)
            if time.monotonic() > deadline:
                raise DeadlineExceeded("a completion of the bare chain", STALL_S)
        raise ClosedError("the bare chain")
