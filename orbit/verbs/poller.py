"""NativePoller: a native thread that polls one completion queue, for progress mode `polling` (D10).

Owns the thread, its ring and the eventfd that wakes the loop, and their order of ending: stopped
and joined, drained, freed; only then may anything of the queue be destroyed. It knows no lane and
no loop: whoever reads `fd` drains until `drain` returns fewer than it was asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ..errors import ClosedError, DeviceError
from .provider import NativeObject
from .turn import POLL_MAX, Completion, Turn

# Long enough to bridge the gap between a request and its answer, short enough to leave an idle
# machine to others; asleep, a completion is found half a nap late on average.
IDLE_US = 1000
NAP_US = 50

logger = logging.getLogger("orbit.verbs")


class NativePoller:
    """Polls `cq` from its making to `stop`; nobody else may poll the queue meanwhile. `entries` is
    the depth of the queue, so that the ring holds all of it. After `idle_us` without a completion
    the thread sleeps `nap_us` between polls (0: never). It stays on `cpus`, unless there are none
    or it may use none of them. Raises DeviceError.

    Not for a machine of few cores: until it is idle the thread uses one up.
    """

    def __init__(
        self,
        turn: Turn,
        cq: NativeObject,
        entries: int,
        *,
        idle_us: int = IDLE_US,
        nap_us: int = NAP_US,
        cpus: Sequence[int] = (),
    ) -> None:
        self._turn = turn
        self._cq: NativeObject | None = cq  # alive as long as the thread polls it
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._native = turn.poller_start(cq.native, self._fd, entries, idle_us, nap_us)
        except BaseException:
            os.close(self._fd)
            raise
        if cpus:
            self._bind(cpus)

    def _bind(self, cpus: Sequence[int]) -> None:
        """Elsewhere it polls as well, only slower: no reason to do without it."""
        try:
            self._turn.poller_bind(self._native, cpus)
        except DeviceError as error:
            logger.warning("a poller does not stay on processors %s: %s", list(cpus), error)

    @property
    def fd(self) -> int:
        """For `add_reader`: readable once the ring has become non-empty. `drain` clears it. Raises
        ClosedError after `stop`."""
        self._check_running()
        return self._fd

    @property
    def running(self) -> bool:
        return self._native != 0

    def drain(self, max_completions: int = POLL_MAX) -> list[Completion]:
        """Up to `max_completions` (at most POLL_MAX), oldest first; never waits. As many as asked:
        call again, now or from the loop's next turn. Fewer: the next one is announced on `fd`.
        Raises DeviceError after the last of them when the device refused to be polled."""
        self._check_running()
        return self._turn.poller_drain(self._native, max_completions)

    def stop(self) -> list[Completion]:
        """Stop and join the thread, free the ring and close `fd` (remove the reader before); what
        had not been drained. Waits without the GIL for a nap at most. The queue is the caller's
        again: it may hold completions that came since. A second call returns nothing."""
        if not self._native:
            return []
        native = self._native
        self._turn.poller_stop(native)
        left: list[Completion] = []
        try:
            while found := self._turn.poller_drain(native):
                left += found
        except DeviceError:
            pass  # what was found is kept; the caller's own next poll meets the failure
        finally:
            self._native, self._cq = 0, None
            self._turn.poller_free(native)
            os.close(self._fd)
        return left

    def _check_running(self) -> None:
        if not self._native:
            raise ClosedError("the native poller")


__all__ = ["IDLE_US", "NAP_US", "NativePoller"]
