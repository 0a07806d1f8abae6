"""Slabs: equal pieces of one registered block, each of which holds one packet.

Owns the memory and which of the sending ones are free. It does not know what is in a slab or which
queue it was posted on.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import records
from ..device import DeviceContext
from ..registration import RegisteredBlock

_ALIGNMENT = 64  # a cache line: two slabs never share one


class Slabs:
    """`count` slabs of `slab_bytes` on one device. Registered for local access alone: no peer can
    name this memory (D1).
    """

    def __init__(self, block: RegisteredBlock, count: int, slab_bytes: int) -> None:
        stride = stride_of(slab_bytes)
        self._block = block
        self.count = count
        self.slab_bytes = slab_bytes
        self.lkey = block.lkey
        self.addresses = tuple(block.address + i * stride for i in range(count))
        self.views = tuple(block.view[i * stride : i * stride + slab_bytes] for i in range(count))

    @classmethod
    async def open(cls, device: DeviceContext, count: int, slab_bytes: int) -> Slabs:
        """Raises DeviceError (ENOMEM: the locked-memory limit)."""
        nbytes = count * stride_of(slab_bytes)
        domain = device.messaging.domain
        block = await RegisteredBlock.open(domain, nbytes, records.ACCESS_LOCAL_WRITE)
        return cls(block, count, slab_bytes)

    @property
    def nbytes(self) -> int:
        return self._block.view.nbytes

    async def close(self) -> None:
        """Nothing is posted from or to them any more. Raises DeviceError; the memory stays then."""
        await self._block.close()


class SendSlabs:
    """Which slabs of a device's sending half belong to which link: taken when it opens, given back
    when its queue pair is gone, so that no link can starve another one.
    """

    def __init__(self, slabs: Slabs) -> None:
        self.slabs = slabs
        self._free = list(range(slabs.count))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int, count_min: int) -> tuple[int, ...]:
        """`count` of them, or half and half again until they fit; empty when not even `count_min`
        do.
        """
        while count > len(self._free) and count > count_min:
            count = max(count_min, count // 2)
        if count > len(self._free):
            return ()
        taken = tuple(self._free[-count:])
        del self._free[-count:]
        return taken

    def give_back(self, taken: Sequence[int]) -> None:
        self._free.extend(taken)


def stride_of(slab_bytes: int) -> int:
    return -(-slab_bytes // _ALIGNMENT) * _ALIGNMENT
