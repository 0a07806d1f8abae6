"""Objects that stand for something of this process, and so cannot travel: they say so at once.

Handles, addresses, leases and metadata are plain data and travel as they are. Without this, pickle
would fail deep within such an object, or make a second one that looks alive.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex


class Live:
    """Refuses to be pickled or copied, with a TypeError that names the class and what to do."""

    __slots__ = ()

    _instead: ClassVar[str]  # what travels in its place

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__qualname__
        raise TypeError(f"a {name} cannot be pickled or copied: {self._instead}")
