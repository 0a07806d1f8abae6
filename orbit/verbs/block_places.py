"""Equal places in one registered block, and which of them are free: where receipts arrive, and
where they are sent from. It does not know what lies in a place.
"""

from __future__ import annotations

from typing import Final

from . import records
from .domain import Domain
from .registration import RegisteredBlock

_STRIDE: Final = 192  # a binding of 141 bytes, on its own cache lines


class BlockPlaces:
    """A place is its offset in `block`."""

    def __init__(self, block: RegisteredBlock, count: int) -> None:
        self.block = block
        self.free = [place * _STRIDE for place in range(count)]

    @classmethod
    async def open(cls, domain: Domain, count: int) -> BlockPlaces:
        """Raises DeviceError."""
        access = records.ACCESS_LOCAL_WRITE
        return cls(await RegisteredBlock.open(domain, count * _STRIDE, access), count)

    async def close(self) -> None:
        """Nothing is posted in any place. Raises DeviceError; the memory stays then."""
        await self.block.close()
