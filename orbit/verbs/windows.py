"""Memory windows of one queue pair, and the keys that a protection domain has ever used.

Owns which key comes next. A key that once carried authority never carries it again within its
domain; an index whose 255 tags are spent is parked with a window that is never bound, so that the
device cannot hand it out again. It does not post binds: it yields the window and the fresh key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import DeviceError, PathUnavailable
from ..model import PathName, PathReason, RemoteKey
from .provider import NativeDomain, NativeWindow

TAGS_PER_INDEX = 256  # the low byte of a key
_USABLE_TAGS = TAGS_PER_INDEX - 1  # the tag that the allocation came with is never used
_ALL_TAGS = (1 << TAGS_PER_INDEX) - 1
_SCARCE_PART = 10


class KeyHistory:
    """Tags used per index, as one 256-bit set each. Bounded, and nothing is ever evicted."""

    def __init__(self, indices_max: int) -> None:
        self.ran_out = False  # somebody found no fresh key
        self._indices_max = indices_max
        self._used: dict[int, int] = {}
        # Tags left of the indexes that have a window now. Those of a window that was freed are out
        # of reach, until the device happens to hand its index out again.
        self._unspent: dict[int, int] = {}
        self._at_hand = indices_max * _USABLE_TAGS
        self._keys_used = 0
        self._on_scarce: Callable[[], None] | None = None

    @property
    def keys_used(self) -> int:
        return self._keys_used

    @property
    def keys_total(self) -> int:
        return self._indices_max * _USABLE_TAGS

    @property
    def keys_remaining(self) -> int:
        return max(0, self.keys_total - self._keys_used)

    @property
    def scarce(self) -> bool:
        """At most a tenth of all keys is still within reach."""
        return self.ran_out or self._at_hand * _SCARCE_PART <= self._indices_max * _USABLE_TAGS

    def watch(self, on_scarce: Callable[[], None]) -> None:
        """Call it when the keys become `scarce`, or now if they are; once."""
        self._on_scarce = on_scarce
        self._look()

    def admit(self, allocated_key: int) -> bool:
        """Take note of a newly allocated window. False: its index would be one too many."""
        index, tag = allocated_key >> 8, allocated_key & 0xFF
        if index not in self._used:
            if len(self._used) >= self._indices_max:
                return False
            self._unspent[index] = _USABLE_TAGS
        used = self._used[index] = self._used.get(index, 0) | 1 << tag
        unspent = TAGS_PER_INDEX - used.bit_count()
        self._at_hand += unspent - self._unspent.get(index, 0)
        self._unspent[index] = unspent
        return True

    def next_key(self, current: int) -> RemoteKey | None:
        """A key of the same index that was never used, marked as used now; None when spent.

        Marked when it is handed out and not when the bind succeeds: of a bind that failed it is
        not known how far it came.
        """
        index, tag = current >> 8, current & 0xFF
        used = self._used[index]
        if used == _ALL_TAGS:
            return None
        for step in range(1, TAGS_PER_INDEX):
            candidate = (tag + step) % TAGS_PER_INDEX
            if not used >> candidate & 1:
                self._used[index] = used | 1 << candidate
                self._keys_used += 1
                if self._unspent.get(index):
                    self._unspent[index] -= 1
                    self._at_hand -= 1
                self._look()
                return RemoteKey(index << 8 | candidate)
        return None

    def freed(self, key: int) -> None:
        """The window of that index was deallocated."""
        self._at_hand -= self._unspent.pop(key >> 8, 0)
        self._look()

    def run_out(self) -> None:
        """There was no fresh key for somebody."""
        self.ran_out = True
        self._look()

    def _look(self) -> None:
        if self._on_scarce is not None and self.scarce:
            on_scarce, self._on_scarce = self._on_scarce, None
            on_scarce()


class ParkedWindows:
    """Never-bound windows that keep spent indices out of circulation until their domain closes."""

    def __init__(self) -> None:
        self._windows: list[NativeWindow] = []

    def __len__(self) -> int:
        return len(self._windows)

    def park(self, window: NativeWindow) -> None:
        self._windows.append(window)

    def close(self) -> None:
        """Free them all. What the device refuses to free stays listed and the error is raised."""
        while self._windows:
            self._windows[-1].close()
            self._windows.pop()


class DomainWindows:
    """What the pools of one protection domain share."""

    def __init__(self, domain: NativeDomain, indices_max: int) -> None:
        self._domain = domain
        self.history = KeyHistory(indices_max)
        self.parked = ParkedWindows()

    def pool(self) -> WindowPool:
        """For one queue pair that exists already."""
        return WindowPool(self._domain, self.history, self.parked)


@dataclass(frozen=True, slots=True, eq=False)
class FreshWindow:
    """A window that is not bound, and the key for its next bind. `key_now`: of its last bind, or of
    its allocation.
    """

    window: NativeWindow
    key: RemoteKey
    key_now: int


class WindowPool:
    """Windows that live and die with one queue pair.

    Create it after the queue pair, and close it after the queue pair was drained in the error
    state and before it is destroyed: the kernel of a software device otherwise waits 50 s for a
    bound window.
    """

    def __init__(self, domain: NativeDomain, history: KeyHistory, parked: ParkedWindows) -> None:
        self._domain = domain
        self._history = history
        self._parked = parked
        self._free: list[tuple[NativeWindow, int]] = []
        self._taken: dict[int, FreshWindow] = {}  # by id of the window
        self._closed = False

    @property
    def taken(self) -> int:
        return len(self._taken)

    @property
    def allocated(self) -> int:
        return len(self._taken) + len(self._free)

    def take(self) -> FreshWindow:
        """A free window with a fresh key. Raises PathUnavailable (window_keys, windows_busy)."""
        while self._free:
            window, last_key = self._free.pop()
            key = self._history.next_key(last_key)
            if key is not None:
                return self._hand_out(window, key, last_key)
            self._discard(window, last_key)
        while True:
            window = self._allocate()
            if not self._history.admit(window.key):
                self._discard(window, window.key)
                self._history.run_out()
                raise _no_keys()
            key = self._history.next_key(window.key)
            if key is not None:
                return self._hand_out(window, key, window.key)
            self._parked.park(window)

    def give_back(self, fresh: FreshWindow, *, bound: bool = True) -> None:
        """The window was invalidated by its receipt; or its bind never took effect."""
        if self._taken.pop(id(fresh.window), None) is not None and not self._closed:
            self._free.append((fresh.window, fresh.key if bound else fresh.key_now))

    def free(self, fresh: FreshWindow) -> None:
        """Deallocate one taken window, which revokes its key if it is bound. Only after its queue
        pair was drained in the error state. Raises DeviceError; the window stays taken then.
        """
        if id(fresh.window) in self._taken:
            fresh.window.close()
            del self._taken[id(fresh.window)]
            self._history.freed(fresh.key)

    def close(self) -> None:
        """Free every window, bound ones too (that revokes them). Raises DeviceError; what could
        not be freed stays listed and a further call tries again.
        """
        self._closed = True
        while self._free:
            window, last_key = self._free[-1]
            window.close()
            self._free.pop()
            self._history.freed(last_key)
        for fresh in list(self._taken.values()):
            self.free(fresh)

    def _hand_out(self, window: NativeWindow, key: RemoteKey, key_now: int) -> FreshWindow:
        fresh = self._taken[id(window)] = FreshWindow(window, key, key_now)
        return fresh

    def _allocate(self) -> NativeWindow:
        try:
            return self._domain.allocate_window()
        except DeviceError as error:
            raise PathUnavailable(PathName.RDMA, PathReason.WINDOWS_BUSY, str(error)) from error

    def _discard(self, window: NativeWindow, key: int) -> None:
        try:
            window.close()
        except DeviceError:
            self._parked.park(window)  # unbound: it can wait for the domain's close
        else:
            self._history.freed(key)


def _no_keys() -> PathUnavailable:
    return PathUnavailable(
        PathName.RDMA,
        PathReason.WINDOW_KEYS,
        "every key of this protection domain was used once",
        hint="a fresh protection domain is being opened; it needs room for all registrations",
    )
