"""Two connected endpoints, made of nothing but the provider contract: what the contract of the
helper is shown on.

Host A holds the requester, host B the source whose memory is read; both may be one process. Where
devices may differ (the range of a window) the rig says which way.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orbit.testing.pattern import pattern
from orbit.verbs import status
from orbit.verbs.provider import (
    NativeChannel,
    NativeContext,
    NativeDomain,
    NativeObject,
    NativeQueuePair,
    NativeRegion,
    NativeWindow,
    Provider,
    QueuePairCaps,
)
from orbit.verbs.turn import (
    ACCESS_LOCAL_WRITE,
    ACCESS_MW_BIND,
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
    STATE_INIT,
    STATE_RTR,
    STATE_RTS,
    WINDOW_READ,
    Completion,
    QueuePairAttributes,
    Turn,
    pack_bind,
    pack_read,
    pack_recv,
    pack_write,
)

MEMORY_BYTES = 1 << 16
RECEIPT_BYTES = 141
PATIENCE_S = 8.0  # a device under emulation retries for half a second before it gives up
DEPTH = 96


class Endpoint:
    """One queue pair with all it needs, and a memory that is registered as a parent of windows."""

    def __init__(self, provider: Provider, device: str) -> None:
        self.turn: Turn = provider.turn
        self.context: NativeContext = provider.open(device)
        self.domain: NativeDomain = self.context.allocate_domain()
        self.channel: NativeChannel = self.context.create_channel()
        self.cq: NativeObject = self.context.create_cq(4 * DEPTH, self.channel)
        self.memory = mmap.mmap(-1, MEMORY_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.turn.prefault(self.address, MEMORY_BYTES)
        self.region: NativeRegion = self.register(ACCESS_LOCAL_WRITE | ACCESS_MW_BIND)
        self.qp = self.new_qp()
        self.closing: list[NativeObject] = []
        self.wr_id = 0

    def register(self, access: int) -> NativeRegion:
        return self.domain.register(self.address, MEMORY_BYTES, access)

    def new_qp(self) -> NativeQueuePair:
        return self.domain.create_queue_pair(
            self.cq, self.cq, QueuePairCaps(DEPTH, DEPTH, RECEIPT_BYTES)
        )

    def next_id(self) -> int:
        self.wr_id += 1
        return self.wr_id

    def post(self, *requests: bytes, qp: NativeQueuePair | None = None) -> None:
        result = self.turn.post_send((qp or self.qp).native, requests)
        assert result == (len(requests), 0)

    def receive(self, count: int = 1, length: int = 256, qp: NativeQueuePair | None = None) -> None:
        """Receives into the upper half of the memory, `length` bytes apart, with ids from 1000."""
        recvs = [
            pack_recv(1000 + i, self.receive_address(i, length), length, self.region.lkey)
            for i in range(count)
        ]
        assert self.turn.post_recv((qp or self.qp).native, recvs) == (count, 0)

    def receive_address(self, index: int = 0, length: int = 256) -> int:
        return self.address + MEMORY_BYTES // 2 + index * length

    def completions(self, count: int) -> list[Completion]:
        """Exactly `count`, in order."""
        found: list[Completion] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} completions: {found}"
            found += self.turn.wait(self.cq.native, self.channel.native, 100, 20_000)
        assert len(found) == count, found
        return found

    def done(self) -> Completion:
        (one,) = self.completions(1)
        return one

    def no_completion(self) -> None:
        assert self.turn.poll(self.cq.native) == []

    def window(self) -> NativeWindow:
        window = self.domain.allocate_window()
        self.closing.append(window)
        return window

    def close(self) -> None:
        """Windows, queue pairs, the rest."""
        for late in reversed(self.closing):
            late.close()
        for thing in (self.qp, self.cq, self.channel, self.region, self.domain, self.context):
            thing.close()


@dataclass
class Rig:
    a: Endpoint  # requester
    b: Endpoint  # source
    gids: tuple[tuple[int, str], tuple[int, str]]
    enforces_range: bool
    check: Callable[[], None] = lambda: None
    tag: int = 0

    def connect(
        self,
        a: NativeQueuePair,
        b: NativeQueuePair,
        *,
        retry_cnt: int = 6,
        rnr_retry: int = 6,
        timeout: int = 14,
    ) -> None:
        for own, other, (index, _), (_, gid) in (
            (a, b, self.gids[0], self.gids[1]),
            (b, a, self.gids[1], self.gids[0]),
        ):
            access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE
            own.modify(QueuePairAttributes(STATE_INIT, access=access))
            own.modify(
                QueuePairAttributes(
                    STATE_RTR, dest_qpn=other.qp_num, sgid_index=index, dgid=gid, rq_psn=7
                )
            )
            own.modify(
                QueuePairAttributes(
                    STATE_RTS, sq_psn=7, retry_cnt=retry_cnt, rnr_retry=rnr_retry, timeout=timeout
                )
            )

    def bind(self, window: NativeWindow, start: int, length: int, access: int = WINDOW_READ) -> int:
        """Bind on the source's queue pair with a key never used before; the key."""
        key = self.fresh_key(window)
        done = self.try_bind(window, key, start, length, access)
        assert done.status == status.SUCCESS, done
        assert done.opcode == status.OPCODE_BIND
        self.b.turn.set_window_key(window.native, key)
        assert window.key == key
        return key

    def fresh_key(self, window: NativeWindow) -> int:
        self.tag += 1
        return window.key >> 8 << 8 | (window.key + self.tag) & 0xFF

    def try_bind(
        self,
        window: NativeWindow,
        key: int,
        start: int,
        length: int,
        access: int = WINDOW_READ,
        region: NativeRegion | None = None,
    ) -> Completion:
        b = self.b
        parent = (region or b.region).native
        b.post(
            pack_bind(b.next_id(), window.native, parent, b.address + start, length, key, access)
        )
        return b.done()

    def read(
        self, key: int, start: int, length: int, into: int = 0, qp: NativeQueuePair | None = None
    ) -> Completion:
        a = self.a
        request = pack_read(
            a.next_id(), a.address + into, a.region.lkey, length, self.b.address + start, key
        )
        a.post(request, qp=qp)
        return a.done()

    def write(self, key: int, start: int, length: int) -> Completion:
        a = self.a
        a.post(
            pack_write(a.next_id(), a.address, a.region.lkey, length, self.b.address + start, key)
        )
        return a.done()


def made_rig(
    provider_a: Provider,
    device_a: str,
    provider_b: Provider,
    device_b: str,
    enforces_range: bool,
    timeout: int = 14,
) -> Rig:
    a, b = Endpoint(provider_a, device_a), Endpoint(provider_b, device_b)
    rig = Rig(a, b, (routable_gid(a.context), routable_gid(b.context)), enforces_range)
    rig.connect(a.qp, b.qp, timeout=timeout)
    b.memory[:] = pattern(MEMORY_BYTES)
    return rig


def routable_gid(context: NativeContext) -> tuple[int, str]:
    for index in range(16):
        gid = context.gid(1, index)
        if gid.startswith("::ffff:"):
            return index, gid
    raise AssertionError(f"{context.device} has no IPv4 GID")


def closing(rig: Rig) -> Iterator[Rig]:
    """The fixture's body: the end must be as orderly as the life."""
    yield rig
    rig.check()
    rig.a.close()
    rig.b.close()


def expected(start: int, length: int) -> bytes:
    return pattern(MEMORY_BYTES)[start : start + length]
