"""The consumer's calls of the handle API: what callers pass is checked, the consumer does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..config import NodeConfig
from ..errors import OutOfRange, UsageError
from ..model import Handle, Lease, Metadata, Transport
from ..protocol.messages import U64_MAX
from ..transport.interface import Progress
from .borrowed import Borrowed, CallerSink
from .consumer import Consumer, Wish
from .gathering import gather_all
from .options import Put
from .paths import Paths
from .sinks import FreshSink, PinnedPayload, PinnedSink
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
        self,
        handle: Handle,
        *,
        transport: Transport | str | None,
        timeout: float | None,
        payload_max: int | None = None,
    ) -> tuple[memoryview, Lease]:
        """See Node.get. `payload_max`: a larger payload is refused with BudgetExceeded (which names
        both sizes) before anything is allocated, and the refusal *releases* the handle: for what a
        peer staged for this reader alone.
        """
        checked = checked_handle(handle)
        wish = self._wish(transport, timeout, staged_payload_max=payload_max)
        sink = FreshSink()
        lease = await self._consumer.fetch(checked, sink, wish)
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
        checked = checked_handle(handle)
        wish = self._wish(transport, timeout, progress)
        sink = CallerSink(dest)
        lease = await self._consumer.fetch(checked, sink, wish)
        sink.release()
        return lease

    async def get_pinned(
        self, handle: Handle, *, transport: Transport | str | None, timeout: float | None
    ) -> tuple[PinnedPayload, Lease]:
        """See Node.get_pinned."""
        checked = checked_handle(handle)
        wish = self._wish(transport, timeout)
        sink = PinnedSink(self._paths)
        lease = await self._consumer.fetch(checked, sink, wish)
        return sink.result(), lease

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
        checked = [checked_handle(handle) for handle in handles]
        if into is not None and len(into) != len(checked):
            raise UsageError(f"{len(into)} destinations for {len(checked)} handles")
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise UsageError(f"concurrency={concurrency!r} is not a number of gets, 1 or more")
        wish = self._wish(transport, timeout)

        async def get_one(number: int) -> tuple[memoryview | None, Lease]:
            if into is None:
                fresh = FreshSink()
                lease = await self._consumer.fetch(checked[number], fresh, wish)
                return fresh.result(), lease
            sink = CallerSink(into[number])
            lease = await self._consumer.fetch(checked[number], sink, wish)
            sink.release()
            return None, lease

        return await gather_all(
            len(checked), concurrency, get_one, lambda got: self._consumer.drop(got[1])
        )

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
        checked = checked_handle(handle)
        wish = self._wish(transport, timeout, progress)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise UsageError(f"offset={offset!r} is not a number of bytes")
        if not 0 <= offset <= U64_MAX:
            raise OutOfRange(f"there is no byte {offset}")
        return await self._consumer.put(checked, Borrowed(source, writable=False), offset, wish)

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

    # --- within -----------------------------------------------------------------------------------

    def _wish(
        self,
        transport: Transport | str | None,
        timeout: float | None,
        progress: Progress | None = None,
        staged_payload_max: int | None = None,
    ) -> Wish:
        """The deadline is set here, before anything else takes its time."""
        self._check_open()
        chosen = chosen_transport(transport, self._config.transport)
        checked_timeout(timeout)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        return Wish(chosen, timeout, deadline, progress, staged_payload_max)
