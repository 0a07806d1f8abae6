"""The start probe: what a device really does, tried on two queue pairs that end with it.

It binds a type-2B window and reads 4 KiB through it, because a capability flag proves nothing,
then reads one byte outside the window: a device that answers does not enforce the range. It
reports; what follows from the report is the path's decision.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from ..errors import CompletionError, DeviceError, OrbitError, Unquiesced
from ..model import PathReason
from . import records
from .device import DeviceContext
from .queue_pair import BulkQueuePair, Posting, RemoteEnd, completion_error
from .records import Completion
from .registration import PARENT_ACCESS, RegisteredBlock
from .windows import FreshWindow, WindowPool

_WINDOW_BYTES = 4096
_SOURCE_BYTES = 2 * _WINDOW_BYTES  # the second page is parent memory outside the window
_BYTE = 0xA7


@dataclass(frozen=True, slots=True)
class ProbeResult:
    reason: PathReason  # OK, no_windows or device_failed
    detail: str = ""
    range_enforced: bool = False


class _ProbePair:
    """Two queue pairs of one device, connected to each other."""

    def __init__(
        self, device: DeviceContext, source: BulkQueuePair, requester: BulkQueuePair
    ) -> None:
        self.device = device
        self.source = source
        self.requester = requester
        self.windows: WindowPool = device.domain.windows.pool()
        self.blocks: list[RegisteredBlock] = []

    @classmethod
    async def open(cls, device: DeviceContext) -> _ProbePair:
        """Raises DeviceError, BudgetExceeded."""
        source = device.create_queue_pair(_ignore, trial=True)
        try:
            requester = device.create_queue_pair(_ignore, trial=True)
        except OrbitError:
            await device.destroy_queue_pair(source)
            raise
        return cls(device, source, requester)

    async def connect(self) -> None:
        rail, timeout_s = self.device.rail, self.device.config.connect_timeout_s
        ends = {
            qp: self.device.local_end(psn, remote_read=True)
            for psn, qp in enumerate((self.source, self.requester), start=7)
        }
        for qp, other in ((self.source, self.requester), (self.requester, self.source)):
            remote = RemoteEnd(
                rail.gid,
                rail.lid,
                other.qp_num,
                ends[other].psn,
                rail.mtu,
                1,
                rail.link_layer,
            )
            await qp.connect(ends[qp], remote, timeout_s)

    async def bind(self, parent: RegisteredBlock) -> FreshWindow:
        fresh = self.windows.take()
        pack = partial(
            records.pack_bind,
            window=fresh.window.native,
            region=parent.native,
            address=parent.address,
            length=_WINDOW_BYTES,
            key=fresh.key,
            access=records.WINDOW_READ,
        )
        await self._complete(self.source, "bind", pack)
        self.device.turn.set_window_key(fresh.window.native, fresh.key)
        return fresh

    async def read(self, target: RegisteredBlock, length: int, address: int, key: int) -> None:
        pack = partial(
            records.pack_read,
            local_addr=target.address,
            lkey=target.lkey,
            length=length,
            remote_addr=address,
            rkey=key,
        )
        await self._complete(self.requester, "read", pack)

    async def _complete(self, qp: BulkQueuePair, opcode: str, pack: partial[bytes]) -> None:
        """Post one request and wait for it. Raises CompletionError, DeviceError, TimeoutError."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def complete(completion: Completion) -> None:
            if not done.done():
                done.set_result(completion)

        qp.post_send([Posting(opcode, pack, complete)])
        completion = await asyncio.wait_for(done, self.device.config.bind_timeout_s)
        if completion.status != 0:
            raise completion_error(completion, qp.qp_num, opcode)

    async def close(self) -> None:
        """Raises Unquiesced, DeviceError."""
        cause = OrbitError("the probe is over")
        await self.requester.drain(cause)
        await self.source.drain(cause)
        self.windows.close()
        await self.device.destroy_queue_pair(self.requester)
        await self.device.destroy_queue_pair(self.source)
        for block in self.blocks:
            await block.close()


async def prove(device: DeviceContext) -> tuple[PathReason, str]:
    """Probe it once in its life, before it serves: OK, or what is wrong. Never raises for what the
    device does.
    """
    if device.state.proven:
        return PathReason.OK, ""
    result = await probe(device)
    if result.reason is not PathReason.OK:
        return result.reason, result.detail
    if device.config.require_range and not result.range_enforced:
        detail = f"{device.name} ignores the range of a window, and require_range is set"
        return PathReason.RANGE_NOT_ENFORCED, detail
    device.state.readdress(replace(device.rail, range_enforced=result.range_enforced))
    device.state.proven = True
    return PathReason.OK, ""


async def probe(device: DeviceContext) -> ProbeResult:
    """Try the device. Never raises for what the device does; nothing of the trial is left."""
    if not device.limits.window_type_2b:
        return ProbeResult(
            PathReason.NO_WINDOWS, f"{device.name} reports no type-2B memory windows"
        )
    if min(device.limits.max_rd_atomic, device.limits.max_init_rd_atomic) < 1:
        detail = f"{device.name} serves no READs: max_qp_rd_atom or max_qp_init_rd_atom is 0"
        return ProbeResult(PathReason.DEVICE_FAILED, detail)
    try:
        pair = await _ProbePair.open(device)
    except (OrbitError, TimeoutError) as error:
        return ProbeResult(PathReason.DEVICE_FAILED, str(error))
    try:
        result = await _try(pair)
    except (OrbitError, TimeoutError) as error:
        result = ProbeResult(
            PathReason.DEVICE_FAILED, f"{device.name}: {error or 'no completion in time'}"
        )
    try:
        await pair.close()
    except (Unquiesced, DeviceError, TimeoutError) as error:
        result = ProbeResult(PathReason.DEVICE_FAILED, f"{device.name}: probe not closed: {error}")
    return result


async def _try(pair: _ProbePair) -> ProbeResult:
    device = pair.device
    parent = await RegisteredBlock.open(device.domain, _SOURCE_BYTES, PARENT_ACCESS)
    pair.blocks.append(parent)
    target = await RegisteredBlock.open(device.domain, _WINDOW_BYTES, records.ACCESS_LOCAL_WRITE)
    pair.blocks.append(target)
    parent.view[:] = bytes([_BYTE]) * len(parent.view)
    await pair.connect()
    try:
        window = await pair.bind(parent)
    except (OrbitError, TimeoutError) as error:
        return ProbeResult(
            PathReason.NO_WINDOWS, f"{device.name}: no type-2B window can be bound: {error}"
        )
    await pair.read(target, _WINDOW_BYTES, parent.address, window.key)
    if bytes(target.view[:_WINDOW_BYTES]) != bytes([_BYTE]) * _WINDOW_BYTES:
        return ProbeResult(PathReason.DEVICE_FAILED, f"{device.name}: a READ brought other bytes")
    try:
        await pair.read(target, 1, parent.address + _WINDOW_BYTES, window.key)
    except CompletionError:
        return ProbeResult(PathReason.OK, range_enforced=True)
    return ProbeResult(PathReason.OK, range_enforced=False)


def _ignore(cause: OrbitError) -> None:
    """The pair is a sacrifice: its failures are read from completions."""
