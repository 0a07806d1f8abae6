"""One end of the READ chain: a plain RC queue pair and a scratch buffer that is registered as a
whole, with a context and a protection domain of their own.

The buffer's remote key goes to the peer. That is the point of this baseline, and what orbit itself
never does (D1): the key opens this scratch buffer alone, which holds nobody's data, for the time of
one run. Everything here blocks and belongs to one thread at a time.
"""

from __future__ import annotations

import mmap
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from ...memory.buffer import address_of
from ...memory.pages import whole_pages
from ...protocol.messages import RailHint
from ...verbs import records
from ...verbs.provider import NativeContext, Provider, QueuePairCaps
from ...verbs.queue_pair import LocalEnd, RemoteEnd, connect_steps
from ...verbs.rail_pairs import path_mtu
from ...verbs.settings import RdmaPathConfig
from .asking import Request, integer, rail_of, rail_to_wire

DEPTH: Final = 64  # work requests in flight, at most
_PSN_BITS: Final = 24
_U32: Final = 0xFFFFFFFF
_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Target:
    """The peer's buffer."""

    address: int
    rkey: int
    nbytes: int


def open_provider() -> Provider:
    """The system's pyverbs. Raises DeviceError."""
    from ...verbs._pyverbs import PyverbsProvider

    return PyverbsProvider()


class ChainEnd:
    """`access` is what the peer may do: records.ACCESS_REMOTE_READ, _WRITE, or 0."""

    def __init__(self, provider: Provider, rail: RailHint, nbytes: int, access: int) -> None:
        """Raises DeviceError, having closed what it opened."""
        self.turn = provider.turn
        self.config = RdmaPathConfig()
        self.nbytes = nbytes
        self._access = access
        self._psn = secrets.randbits(_PSN_BITS)
        with ExitStack() as stack:
            self.context = provider.open(rail.device)
            stack.callback(self.context.close)
            self._limits = self.context.limits()
            port = self.context.port(rail.port)
            self.rail = replace(rail, mtu=port.mtu, lid=port.lid, link_layer=port.link_layer)
            self.message_bytes_max = port.max_message_bytes
            self.depth = min(DEPTH, self._limits.max_qp_wr)
            self._open_objects(stack)
            self._closing = stack.pop_all()

    def _open_objects(self, stack: ExitStack) -> None:
        """In an order whose reverse a device accepts."""
        domain = self.context.allocate_domain()
        stack.callback(domain.close)
        self.channel = self.context.create_channel()
        stack.callback(self.channel.close)
        self.cq = self.context.create_cq(2 * self.depth, self.channel)
        stack.callback(self.cq.close)
        self.memory = memoryview(mmap.mmap(-1, whole_pages(self.nbytes)))
        self.address = address_of(self.memory)
        self.turn.prefault(self.address, len(self.memory))
        mine = records.ACCESS_LOCAL_WRITE | self._access
        self.region = domain.register(self.address, len(self.memory), mine)
        stack.callback(self.region.close)
        self.pair = domain.create_queue_pair(self.cq, self.cq, QueuePairCaps(self.depth, 1))
        stack.callback(self.pair.close)

    @property
    def offer(self) -> dict[str, Any]:
        """What the peer's `connect` takes."""
        return {
            "rail": rail_to_wire(self.rail),
            "qpn": self.pair.qp_num,
            "psn": self._psn,
            "address": self.address,
            "rkey": self.region.rkey,
            "nbytes": self.nbytes,
            "initiator": self._limits.max_init_rd_atomic,
            "responder": self._limits.max_rd_atomic,
        }

    def connect(self, peer: Request, *, initiator: bool) -> Target:
        """To RTS. Raises DeviceError, PeerProtocolError for an offer that cannot be one."""
        rail = rail_of(peer, "rail")
        theirs = integer(peer, "responder" if initiator else "initiator", 1, 0xFFFF)
        own = self._limits.max_init_rd_atomic if initiator else self._limits.max_rd_atomic
        local = LocalEnd(
            port=self.rail.port,
            gid_index=self.rail.gid_index,
            pkey_index=_pkey_index(self.context, self.rail),
            psn=self._psn,
            remote_read=bool(self._access & records.ACCESS_REMOTE_READ),
            remote_write=bool(self._access & records.ACCESS_REMOTE_WRITE),
            gid=self.rail.gid,
            initiator_depth_max=self._limits.max_init_rd_atomic,
            responder_depth_max=self._limits.max_rd_atomic,
        )
        remote = RemoteEnd(
            gid=rail.gid,
            lid=rail.lid,
            qpn=integer(peer, "qpn", 0, _U32),
            psn=integer(peer, "psn", 0, (1 << _PSN_BITS) - 1),
            path_mtu=path_mtu(self.rail.mtu, rail.mtu),
            rd_atomic=min(self.config.rd_atomic, own, theirs),
            link_layer=self.rail.link_layer,
        )
        for step in connect_steps(local, remote, self.config):
            self.pair.modify(step)
        return Target(
            integer(peer, "address", 0, _U64),
            integer(peer, "rkey", 0, _U32),
            integer(peer, "nbytes", 1, _U64),
        )

    def close(self) -> None:
        """Idempotent. Destroying the queue pair ends every access of the peer. Raises DeviceError:
        then what is left stays registered, with its memory.
        """
        self._closing.close()


def _pkey_index(context: NativeContext, rail: RailHint) -> int:
    """Where the port's table holds the rail's partition key; the first row when it does not."""
    for index in range(context.port(rail.port).pkey_count):
        if context.pkey(rail.port, index) == rail.pkey:
            return index
    return 0
