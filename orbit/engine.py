"""The transfer engine: one node's registered memory and rails, for transfers that name their
transport and say exactly what became of them.

The root that joins an engine with the node under it, opened here or given. How requests run is
runtime/engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, overload

from .config import EngineConfig
from .errors import ClosedError, UsageError
from .model import RegionAccess
from .node import Node
from .protocol.address import NodeAddress
from .protocol.remote_region import RemoteRange, RemoteRegion
from .runtime.engine.batch import Batch
from .runtime.engine.core import EngineCore, EngineStatistics
from .runtime.engine.peers import EnginePeer
from .runtime.engine.region import EngineRegion, RegionRange
from .runtime.engine.requests import RangeRequest, TransferRequest, TransferResult, TransferState
from .runtime.engine.story import RequestExplanation
from .runtime.live import Live
from .runtime.retained import Retained

__all__ = [
    "Batch",
    "EnginePeer",
    "EngineRegion",
    "EngineStatistics",
    "RangeRequest",
    "RegionRange",
    "RemoteRange",
    "RemoteRegion",
    "RequestExplanation",
    "Retained",
    "TransferEngine",
    "TransferRequest",
    "TransferResult",
    "TransferState",
]


class TransferEngine(Live):
    """READs and WRITEs between registered regions of this process and of peers that have an engine.

    `async with TransferEngine(config) as engine` opens a node of its own (`config.node_config()`)
    and closes it; with `node` it rides on an open one, whose device settings are its own. One
    engine to a node. Every method belongs to the event loop that opened it.
    """

    _instead = "send its address (bytes) and remote regions (bytes)"

    def __init__(self, config: EngineConfig | None = None, *, node: Node | None = None) -> None:
        self._config = config or EngineConfig()
        self._given = node is not None
        self._node = node
        self._core: EngineCore | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """What still runs is given up. A node of its own is closed in any case."""
        if self._core is not None:
            self._core.cancel_all()
        try:
            await self.close()
        finally:
            if not self._given and self._node is not None:
                await self._node.close()

    async def open(self) -> None:
        """Once. Raises as Node.open; UsageError (a second engine on one node)."""
        if self._core is not None:
            raise UsageError("this engine was opened before")
        if self._node is None:
            self._node = Node(self._config.node_config())
            await self._node.open()
        try:
            self._core = EngineCore(self._config, self._node._open().parts())
        except BaseException:
            if not self._given:
                await self._node.close()
            raise

    async def close(self, timeout: float | None = None) -> None:
        """`close_source` and `close_requester`, then every region is unregistered, then a node of
        its own closes. At most `timeout` seconds (None: the teardown window of the configuration).

        Raises DeadlineExceeded (something is not over yet: closing again goes on waiting) and
        Unquiesced (it will not be); then the node stays open. Batches, results and the memory of
        regions stay their holders'.
        """
        core = self._core
        if core is None:
            return
        await core.close(timeout)
        if not self._given and self._node is not None:
            await self._node.close()

    async def close_requester(self, timeout: float | None = None) -> None:
        """No more requests begin; returns when all are over and what they held is given back.
        Errors as of `close`. Peers go on.
        """
        await self._opened().close_requester(timeout)

    async def close_source(self, timeout: float | None = None) -> None:
        """No peer begins anything with a region of this engine any more; returns when none reaches
        one. Errors as of `close`. Own requests go on.
        """
        await self._opened().close_source(timeout)

    # --- who is who -------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The node that it rides on."""
        if self._node is None:
            raise ClosedError("the engine")
        return self._node

    @property
    def address(self) -> NodeAddress:
        """What peers give to `open_peer`."""
        return self.node.address

    async def open_peer(self, address: NodeAddress | bytes | str) -> EnginePeer:
        """Remember where an engine is, connect, and ask for its policies. Raises UsageError,
        PeerError (PeerRefused `no_engine`: none is open on that node).
        """
        core = self._opened()
        return await core.peer(self.node.add_peer(address))

    # --- regions ----------------------------------------------------------------------------------

    @overload
    async def register(  # type: ignore[overload-overlap]  # a list is no buffer
        self, buffers: list[Any] | tuple[Any, ...], access: RegionAccess | str = ...
    ) -> list[EngineRegion]: ...

    @overload
    async def register(self, buffers: object, access: RegionAccess | str = ...) -> EngineRegion: ...

    async def register(
        self, buffers: object, access: RegionAccess | str = RegionAccess.LOCAL
    ) -> EngineRegion | list[EngineRegion]:
        """Register a writable buffer in place, or each of a list or tuple of them: all or none.
        `access`: what peers may do with it ("local", "read", "write", "readwrite").

        The buffer is held until the region is unregistered. Raises UsageError (read-only, not
        contiguous, no bytes), BudgetExceeded (see EngineConfig.for_bytes), DeviceError,
        ClosedError, Unquiesced (after an error, a device did not let go of a part).
        """
        core = self._opened()
        if isinstance(buffers, list | tuple):
            return await core.register(buffers, access)
        (region,) = await core.register([buffers], access)
        return region

    # --- transfers --------------------------------------------------------------------------------

    def submit(
        self,
        requests: Sequence[TransferRequest | RangeRequest] | TransferRequest | RangeRequest,
        *,
        timeout: float | None = None,
    ) -> Batch:
        """Start them all, now. `timeout` (seconds) holds for each beside its own; when it is over,
        what is posted is still drained. Raises ClosedError, UsageError; what goes wrong with a
        request is told by its result.
        """
        return self._opened().submit(requests, timeout)

    # --- how it is --------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """Regions, requests, budgets and rails, as one frozen value."""
        return self._opened().statistics()

    def retained(self) -> tuple[Retained, ...]:
        """What this process keeps since nobody could prove that nothing reaches it any more: age,
        bytes and cause of each since this engine was opened, another engine's included.
        """
        return () if self._core is None else self._core.retained()

    # --- within -----------------------------------------------------------------------------------

    def _opened(self) -> EngineCore:
        if self._core is None:
            raise ClosedError("the engine")
        return self._core
