"""Simulated packet wires: two ends with seeded delays, receive slabs, and an end at any moment.

Behaves as a queue pair does: order is kept, a packet takes one of the receiver's slabs when it
arrives and gives it back at the end of a pass, a confirmation travels back on its own, and whether
what was on its way at the end arrived is open. It reads a packet's body only when it arrives, so
that a sender which reuses a buffer early is found out. Runs on any event loop, and makes sense on
VirtualLoop.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..errors import OrbitError, PeerLost
from ..transport.messages import PacketClient

_ROOM_UNBOUNDED = 1 << 20


@dataclass(slots=True)
class WireFaults:
    """Delays are drawn evenly from [delay_min_s, delay_max_s] for each packet and confirmation."""

    delay_min_s: float = 0.000_01
    delay_max_s: float = 0.000_2
    pass_packets_max: int = 16  # delivered in one pass
    room: int = _ROOM_UNBOUNDED  # packets pushed and not confirmed
    stalled: bool = False  # nothing arrives or is confirmed until `resume`


class SimPacketNetwork:
    """Owns the randomness: one seed replays one run."""

    def __init__(self, seed: int = 0, faults: WireFaults | None = None) -> None:
        self.random = random.Random(seed)
        self.faults = faults or WireFaults()
        self.held: list[Callable[[], None]] = []  # what a stall keeps back

    def wire_pair(
        self, slab_bytes: int, left_slabs: int, right_slabs: int
    ) -> tuple[SimPacketWire, SimPacketWire]:
        """Two ends, not started, each with as many receive slabs as it grants."""
        left = SimPacketWire(self, slab_bytes, left_slabs)
        right = SimPacketWire(self, slab_bytes, right_slabs)
        left.attach(right)
        right.attach(left)
        return left, right

    def delay_s(self) -> float:
        return self.random.uniform(self.faults.delay_min_s, self.faults.delay_max_s)

    def cut(self, wire: SimPacketWire, cause: str = "cut") -> None:
        """Both ends lose the wire, each after its own delay; what is under way meanwhile may
        arrive, and may be confirmed.
        """
        wire.cut(cause)

    def resume(self) -> None:
        """What stalled goes on."""
        self.faults.stalled = False
        held, self.held = self.held, []
        for happening in held:
            happening()


class SimPacketWire:
    """One end. Made by SimPacketNetwork.wire_pair."""

    def __init__(self, network: SimPacketNetwork, slab_bytes: int, slabs: int) -> None:
        self.slab_bytes = slab_bytes
        self.underruns = 0  # packets that found no slab: the sender's credit was wrong
        self.slabs_free = slabs
        self.slabs_free_min = slabs
        self._network = network
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._other: SimPacketWire | None = None
        self._client: PacketClient | None = None
        self._gathered: list[tuple[bytes, memoryview]] = []
        self._unconfirmed = 0
        self._inbox: deque[bytes] = deque()
        self._clear_at = 0.0  # nothing may arrive before what was sent earlier
        self._closed = False

    def attach(self, other: SimPacketWire) -> None:
        self._other = other

    @property
    def room(self) -> int:
        return 0 if self._closed else max(self._network.faults.room - self._unconfirmed, 0)

    def start(self, client: PacketClient) -> None:
        self._client = client
        self._loop.call_soon(self._deliver)

    def push(self, head: bytes, body: memoryview) -> None:
        assert len(head) + len(body) <= self.slab_bytes, "a packet over the slab"
        self._gathered.append((head, body))
        self._unconfirmed += 1

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        other = self._other
        if self._closed or other is None or not gathered:
            return
        for head, body in gathered:
            self._later(partial(other._arrive, head, body))
        self._later(lambda: self._later(lambda: self._confirm(len(gathered))))

    def close(self) -> None:
        if not self._closed:
            self.flush()
            self._closed = True
            self._loop.call_soon(self._end, None)

    def abort(self, error: OrbitError | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._end, error)
            if self._other is not None:
                self._loop.call_later(self._network.delay_s(), self._other._lose, "gone")

    async def wait_closed(self) -> None:
        await asyncio.shield(self._gone)

    def cut(self, cause: str) -> None:
        for end in (self, self._other):
            if end is not None:
                end._closed = True
                end._loop.call_later(self._network.delay_s(), end._lose, cause)

    def inject(self, packet: bytes) -> None:
        """What a rogue peer could send."""
        self._arrive(packet, memoryview(b""))

    def _later(self, happening: Callable[[], None]) -> None:
        due = self._loop.time() + self._network.delay_s()
        # Timers of one instant have no order: a nanosecond keeps packets in theirs.
        self._clear_at = max(due, self._clear_at + 1e-9)
        self._loop.call_at(self._clear_at, self._happen, happening)

    def _happen(self, happening: Callable[[], None]) -> None:
        if self._network.faults.stalled:
            self._network.held.append(happening)
        else:
            happening()

    def _arrive(self, head: bytes, body: memoryview) -> None:
        if self._gone.done():
            return
        if not self.slabs_free:
            self.underruns += 1
        else:
            self.slabs_free -= 1
        self.slabs_free_min = min(self.slabs_free_min, self.slabs_free)
        self._inbox.append(head + body)
        if len(self._inbox) == 1:
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        client, inbox = self._client, self._inbox
        if client is None or not inbox or self._gone.done():
            return
        count = self._network.random.randint(1, self._network.faults.pass_packets_max)
        count = min(count, len(inbox))
        for _ in range(count):
            # A view of a copy that dies now: a client that keeps it finds zeros.
            scratch = bytearray(inbox.popleft())
            client.on_packet(memoryview(scratch))
            scratch[:] = bytes(len(scratch))
        self.slabs_free += count
        client.on_pass_end()
        if inbox:
            self._loop.call_soon(self._deliver)

    def _confirm(self, count: int) -> None:
        if self._gone.done() or self._client is None:
            return
        was_full = not self.room
        self._unconfirmed -= count
        self._client.on_sent(count)
        if was_full and self.room:
            self._client.on_room()

    def _lose(self, cause: str) -> None:
        self._closed = True
        self._end(PeerLost("the other end", cause))

    def _end(self, error: OrbitError | None) -> None:
        if self._gone.done():
            return
        self._inbox.clear()
        self._gone.set_result(None)
        if self._client is not None:
            self._client.on_lost(error)
