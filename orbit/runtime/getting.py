"""The consumer's calls of the handle API: what callers pass is checked, the consumer does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config import NodeConfig
from ..model import Handle, Lease, Metadata, Transport
from ..transport.interface import Progress
from .consumer import Consumer
from .options import Put
from .paths import Paths
from .sinks import CallerSink, FreshSink, PinnedPayload, PinnedSink, Sink
from .usage import checked_handle, checked_timeout, chosen_transport


class Getting:
    """`check_open` raises ClosedError once the node closes."""

    def __init__(
        self,
        config: NodeConfig,
        paths: Paths,
        consumer: Consumer,
        check_open: Callable[[], None],
    ) -> None:
        self._config = config
        self._paths = paths
        self._consumer = consumer
        self._check_open = check_open

    async def metadata(self, handle: Handle) -> Metadata:
        """See Node.metadata."""
        self._check_open()
        return await self._consumer.metadata(checked_handle(handle))

    async def get(
        self, handle: Handle, *, transport: Transport | str | None, timeout: float | None
    ) -> tuple[memoryview, Lease]:
        """See Node.get."""
        sink = FreshSink()
        lease = await self._fetch(handle, sink, transport, timeout, None)
        return sink.result(), lease

    async def get_into(
        self,
        handle: Handle,
        dest: object,
        *,
        transport: Transport | str | None,
        timeout: float | None,
        progress: Progress | None,
    ) -> Lease:
        """See Node.get_into."""
        checked_handle(handle)
        sink = CallerSink(dest)
        lease = await self._fetch(handle, sink, transport, timeout, progress)
        sink.release()
        return lease

    async def get_pinned(
        self, handle: Handle, *, transport: Transport | str | None, timeout: float | None
    ) -> tuple[PinnedPayload, Lease]:
        """See Node.get_pinned."""
        sink = PinnedSink(self._paths)
        lease = await self._fetch(handle, sink, transport, timeout, None)
        return sink.result(), lease

    async def ref_handle(self, handle: Handle) -> None:
        """See Node.ref_handle."""
        self._check_open()
        await self._consumer.ref(checked_handle(handle))

    async def detach(self, handle: Handle, lease: Lease) -> None:
        """See Node.detach."""
        self._check_open()
        await self._consumer.detach(checked_handle(handle), lease)

    async def release(self, handle: Handle, lease: Lease) -> None:
        """See Node.release."""
        self._check_open()
        await self._consumer.release(checked_handle(handle), lease)

    async def get_many(
        self,
        handles: Sequence[Handle],
        *,
        into: Sequence[object] | None,
        transport: Transport | str | None,
        timeout: float | None,
        concurrency: int,
    ) -> list[tuple[memoryview | None, Lease]]:
        """See Node.get_many."""
        raise NotImplementedError

    async def put(
        self,
        handle: Handle,
        source: object,
        *,
        offset: int,
        transport: Transport | str | None,
        timeout: float | None,
        progress: Progress | None,
    ) -> Put:
        """See Node.put."""
        raise NotImplementedError

    # --- within -----------------------------------------------------------------------------------

    async def _fetch(
        self,
        handle: Handle,
        sink: Sink,
        transport: Transport | str | None,
        timeout: float | None,
        progress: Progress | None,
    ) -> Lease:
        try:
            self._check_open()
            chosen = chosen_transport(transport, self._config.transport)
            checked_timeout(timeout)
            checked = checked_handle(handle)
        except BaseException:
            sink.discard()
            raise
        return await self._consumer.fetch(checked, sink, chosen, timeout, progress)
