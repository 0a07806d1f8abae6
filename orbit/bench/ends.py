"""One end of a measurement: a node and the transfer engine on it, as the options of that end say.

Budgets follow from how many bytes the end may use at once, so that no default decides a figure.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

from ..availability import available
from ..config import GIB, EngineConfig, MessagingConfig, NodeConfig, RdmaConfig, RendezvousConfig
from ..engine import TransferEngine
from ..errors import BudgetExceeded, BusyError
from ..events import EventSink
from ..model import PathName, Transport
from ..node import Node, PinnedWriter
from ..runtime.payload_store import SEND_COPY_MAX_BYTES
from .paths import rail_words, rdma_words

_NODE_DEFAULTS: Final = RdmaConfig()
# Larger messages are staged; in registered memory up to the second size.
_STAGED_MIN: Final = MessagingConfig().eager_max_bytes
_STAGED_MAX: Final = SEND_COPY_MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What one end of a measurement is opened with; each end has its own. `devices` are pins, best
    first; `rails` (None: all) takes only so many. `buffer_bytes`: payload memory that this end may
    use at once.
    """

    listen: str = "127.0.0.1:0"
    advertise: tuple[str, ...] = ()
    secret_file: str | os.PathLike[str] | None = None
    transport: Transport = Transport.AUTO
    devices: tuple[str, ...] = ()
    gid_index: int | None = None
    rails: int | None = None
    lanes: int = 2
    progress: str = "event"
    host_memory: str = "direct"
    buffer_bytes: int = GIB

    def engine_config(self, *, of_engine: bool) -> EngineConfig:
        """`of_engine`: queues as deep as an engine has them by default, not as a node has. Raises
        ConfigError.
        """
        names = self.devices[: self.rails]
        chosen = () if names or self.rails is None else available().devices[: self.rails]
        rdma = RdmaConfig(device=",".join(names) or None, gid_index=self.gid_index)
        node = NodeConfig(
            listen=self.listen,
            advertise=self.advertise,
            secret_file=self.secret_file,
            transport=self.transport,
            rdma=replace(rdma, whitelist=tuple(chosen)),
            rendezvous=RendezvousConfig(staged_payload_max=self.buffer_bytes),
        )
        config = EngineConfig.for_bytes(
            self.buffer_bytes,
            rails=len(names or chosen or available().devices) or 1,
            node=node,
            host_memory=self.host_memory,
            num_lanes=self.lanes,
            progress="polling" if self.progress == "polling" else "event",
        )
        if of_engine:
            return config
        depths = _NODE_DEFAULTS.max_send_wr, _NODE_DEFAULTS.max_cqes
        return replace(config, max_send_wr=depths[0], max_cqes=depths[1])

    def node_config(self, *, of_engine: bool) -> NodeConfig:
        """Raises ConfigError."""
        config = self.engine_config(of_engine=of_engine).node_config()
        return replace(config, rdma=replace(config.rdma, progress=self.progress))


class End:
    """`async with` opens node and engine and closes both. Raises as Node.open: PathUnavailable
    where the settings demand RDMA and this host has none.
    """

    def __init__(
        self, settings: NodeSettings, *, of_engine: bool, on_event: EventSink | None = None
    ) -> None:
        self.settings = settings
        self.node = Node(settings.node_config(of_engine=of_engine), on_event=on_event)
        self.engine = TransferEngine(settings.engine_config(of_engine=of_engine), node=self.node)

    async def __aenter__(self) -> Self:
        await self.node.open()
        try:
            await self.engine.open()
        except BaseException:
            await self.node.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises Unquiesced when that is what the end comes to."""
        try:
            await self.engine.__aexit__(kind, error, trace)
        finally:
            await self.node.close()

    async def map_registered(self, size: int, count: int) -> None:
        """Have room in registered memory for `count` payloads of `size` bytes of large messages:
        staging one never waits for memory to be mapped. Nothing where there is no RDMA, or no room.
        """
        if self.node.statistics().rdma is None or not _STAGED_MIN < size <= _STAGED_MAX:
            return
        writers: list[PinnedWriter] = []
        with contextlib.suppress(BudgetExceeded, BusyError):
            while len(writers) < count:
                writers.append(await self.node.alloc_pinned_writer(size))
        for writer in writers:
            writer.free()

    def path_text(self, path: PathName, rails: Iterable[str] = ()) -> str:
        """What really ran, for people: "tcp", or "rdma/mlx5_0:1 gid 3", several joined by " + ".
        `rails`: the devices of this end that moved the bytes.
        """
        if path is not PathName.RDMA:
            return path.value
        hints = self.node.address.rails
        ports = Counter(hint.device for hint in hints)
        known = {one.device: rail_words(one.device, one.port, one.gid_index) for one in hints}
        # Of a device with two ports nobody says which one it was.
        return rdma_words(known[name] if ports[name] == 1 else name for name in sorted(rails))
