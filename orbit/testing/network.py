"""Simulated control links: frames between two ends with seeded delays, a backlog limit and cuts.

Runs on any event loop, and makes sense on VirtualLoop. Behaves as the contract of ControlLink says
and as TCP would: order is kept, loss means the end, a cut is seen by both ends a delay later.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence

from ..errors import (
    BusyError,
    ClosedError,
    InternalError,
    OrbitError,
    PeerLost,
    PeerProtocolError,
    UsageError,
)
from ..protocol.framing import FRAME_BYTES_MAX, split_frame
from ..transport.interface import ClosedHandler, FrameHandler, LoopCallback
from .faults import LinkFaults

BACKLOG_BYTES_MAX = 4 << 20


class SimNetwork:
    """Owns the randomness of a world: one seed replays one run."""

    def __init__(self, seed: int = 0, faults: LinkFaults | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.faults = faults or LinkFaults()
        self.links: list[SimLink] = []

    def link_pair(
        self, left: str = "left", right: str = "right", faults: LinkFaults | None = None
    ) -> tuple[SimLink, SimLink]:
        """Two ends of one connection, not started. Each is named after the end that it leads to."""
        faults = faults or self.faults
        a, b = SimLink(self, right, faults), SimLink(self, left, faults)
        a.attach(b)
        b.attach(a)
        self.links += [a, b]
        return a, b

    def delay_s(self, faults: LinkFaults) -> float:
        return self.random.uniform(faults.delay_min_s, faults.delay_max_s)

    def cut(self, link: SimLink, cause: str = "cut") -> None:
        """The connection is gone: both ends see PeerLost, each after its own delay."""
        link.lose(cause)

    def cut_all(self, cause: str = "cut") -> None:
        for link in self.links:
            link.lose(cause)


class SimLink:
    """One end. Made by SimNetwork.link_pair."""

    frames_stay = False  # to find out who keeps one

    def __init__(self, network: SimNetwork, endpoint: str, faults: LinkFaults) -> None:
        self._network = network
        self._endpoint = endpoint
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._other: SimLink | None = None
        self._inbox: deque[bytes] = deque()  # arrived, but not started yet
        self._accepted_bytes = 0
        self._in_flight_bytes = 0  # sent by this end, not yet delivered to a handler
        self._clear_at = 0.0  # no frame may arrive before the one sent earlier
        self._frames = 0
        self._ending = ""
        self._handlers: tuple[FrameHandler, ClosedHandler, LoopCallback] | None = None
        self._on_taken: LoopCallback = _nothing
        self._cause: OrbitError | None = None

    def attach(self, other: SimLink) -> None:
        self._other = other

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def closed(self) -> bool:
        return self._gone.done()

    @property
    def accepted_bytes(self) -> int:
        return self._accepted_bytes

    @property
    def taken_bytes(self) -> int:
        return self._accepted_bytes - self._in_flight_bytes

    def watch_taken(self, on_taken: LoopCallback) -> None:
        self._on_taken = on_taken

    def start(
        self,
        on_frame: FrameHandler,
        on_closed: ClosedHandler,
        on_pass_end: LoopCallback | None = None,
    ) -> None:
        self._handlers = on_frame, on_closed, on_pass_end or _nothing
        if self._gone.done():
            self._report_soon()
        else:
            self._loop.call_soon(self._drain_inbox)

    def send_nowait(self, frame: bytes) -> None:
        if self.closed:
            raise ClosedError(f"the link to {self._endpoint}")
        if not 0 < len(frame) <= FRAME_BYTES_MAX:
            raise UsageError(f"a frame of {len(frame)} bytes; the limit is {FRAME_BYTES_MAX}")
        if self._in_flight_bytes and self._in_flight_bytes + len(frame) > BACKLOG_BYTES_MAX:
            raise BusyError(f"{self._endpoint}: {self._in_flight_bytes} bytes wait to be sent")
        self._in_flight_bytes += len(frame)
        self._accepted_bytes += len(frame)
        other = self._other
        assert other is not None
        self._frames += 1
        limit = self._faults.cut_after_frames
        if limit is not None and self._frames + other._frames > limit:
            self.lose("cut after frames")
        elif not self._faults.stalled:
            self._loop.call_at(self._arrival(), other._arrive, bytes(frame))

    def send_gathered(self, frames: Sequence[tuple[bytes, memoryview]]) -> None:
        whole = [head + body for head, body in frames]
        if not all(0 < len(frame) <= FRAME_BYTES_MAX for frame in whole):
            raise UsageError("a frame over the limit, or an empty one")
        for frame in whole:
            self.send_nowait(frame)

    def close(self) -> None:
        if not self.closed:
            self._tell_other("closed by the peer")
            self._end(None)

    def abort(self) -> None:
        self.close()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)

    def lose(self, cause: str) -> None:
        """The connection is cut: this end sees it at once, the other one a delay later."""
        if self.closed:
            return
        self._tell_other(cause)
        self._end(PeerLost(self._endpoint, cause))

    def _arrival(self) -> float:
        due = self._loop.time() + self._network.delay_s(self._faults)
        # Timers of one instant have no order: a nanosecond keeps frames in theirs.
        self._clear_at = max(due, self._clear_at + 1e-9)
        return self._clear_at

    def _tell_other(self, cause: str) -> None:
        other = self._other
        if other is not None and not self._faults.stalled:
            self._loop.call_at(self._arrival(), other._peer_ended, cause)

    def _arrive(self, frame: bytes) -> None:
        if self.closed:
            return
        self._inbox.append(frame)
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        try:
            while self._handlers is not None and self._inbox and not self.closed:
                self._deliver(self._inbox.popleft(), self._handlers[0])
            if self._handlers is not None:
                self._handlers[2]()
        except PeerProtocolError as error:
            self._tell_other("closed by the peer")
            self._end(error)
        except Exception as error:
            self._tell_other("closed by the peer")
            self._end(InternalError(f"a frame handler failed: {error!r}"))
        if self._ending and not self._inbox:
            self._end(PeerLost(self._endpoint, self._ending))

    def _deliver(self, frame: bytes, on_frame: FrameHandler) -> None:
        if self._other is not None:
            self._other._in_flight_bytes -= len(frame)
            self._other._on_taken()
        split_frame(frame)
        # A view of a copy that dies now: a handler that keeps it finds zeros.
        scratch = bytearray(frame)
        on_frame(memoryview(scratch).toreadonly())
        scratch[:] = bytes(len(scratch))

    def _peer_ended(self, cause: str) -> None:
        if self.closed:
            return
        self._ending = (
            cause  # a stream's end stands behind its bytes: not seen before they are read
        )
        self._drain_inbox()

    def _end(self, cause: OrbitError | None) -> None:
        if self.closed:
            return
        self._gone.set_result(None)
        self._cause = cause
        self._inbox.clear()
        self._report_soon()

    def _report_soon(self) -> None:
        handlers, self._handlers = self._handlers, None
        self._on_taken = _nothing
        if handlers is not None:
            self._loop.call_soon(handlers[1], self._cause)


def _nothing() -> None:
    pass
