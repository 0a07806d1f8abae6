"""Where a lane's completions come from: the event channel, or a thread that polls (D10).

Owns the completion queue, its channel and how the event loop is woken. One queue has one poller:
in either mode everything goes through its source. It does not look at a completion.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..errors import DeviceError
from .poller import NativePoller
from .provider import NativeChannel, NativeContext, NativeObject
from .records import Completion
from .turn import POLL_MAX, Turn

BATCH: Final = POLL_MAX


class CompletionSource(Protocol):
    """One completion queue. Errors are DeviceError."""

    events: int  # wake-ups read so far

    @property
    def cq(self) -> NativeObject: ...

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there is something to poll."""

    def poll(self) -> list[Completion]:
        """Up to BATCH; fewer mean that there were no more."""

    def spin(self, spin_us: int) -> list[Completion]:
        """Without the GIL, poll until there is one or the time is over."""

    def nap(self, spin_us: int, nap_us: int) -> list[Completion]:
        """As `spin`, and then sleep until there is one, for about `nap_us`."""

    def park(self) -> bool:
        """Nothing was found. True: the loop may sleep. False: poll once more first."""

    def look_for_event(self) -> bool:
        """Whether a wake-up was pending. It must be parked again afterwards."""

    def stop(self) -> None:
        """Wake nobody any more, and end what polls."""

    def close(self) -> None:
        """Destroy the queue and the channel; what uses them is gone. A further call continues."""


class EventSource:
    """The channel's descriptor in the event loop: arm, poll again, sleep."""

    def __init__(self, turn: Turn, channel: NativeChannel, cq: NativeObject) -> None:
        self._turn = turn
        self._channel = channel
        self._cq = cq
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] = _nothing
        self._fd = -1
        self._armed = False
        self._unreadable: DeviceError | None = None
        self.events = 0

    @property
    def cq(self) -> NativeObject:
        return self._cq

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake, self._fd = loop, wake, self._channel.fd
        loop.add_reader(self._fd, self._on_readable)
        wake()  # the first arming

    def poll(self) -> list[Completion]:
        return self._turn.poll(self._cq.native, BATCH)

    def spin(self, spin_us: int) -> list[Completion]:
        return self._turn.wait(self._cq.native, 0, spin_us, 0, BATCH)

    def nap(self, spin_us: int, nap_us: int) -> list[Completion]:
        channel = self._channel.native
        found = self._turn.wait(self._cq.native, channel, spin_us, nap_us, BATCH)
        self._armed = not found  # the helper leaves it armed only when it found nothing
        return found

    def park(self) -> bool:
        if self._unreadable is not None:
            raise self._unreadable
        if self._armed:
            return True
        self._turn.arm(self._cq.native)
        self._armed = True
        # A completion that was there at arm time raises no event.
        return False

    def look_for_event(self) -> bool:
        self._armed = False
        count = self._turn.drain_events(self._channel.native, self._cq.native)
        self.events += count
        return count > 0

    def stop(self) -> None:
        if self._loop is not None and self._fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._fd = -1

    def close(self) -> None:
        self.stop()
        self._cq.close()
        self._channel.close()

    def _on_readable(self) -> None:
        try:
            self.look_for_event()
        except DeviceError as error:
            self._unreadable = error  # `park` says it, to somebody who can act
        self._wake()


class PollerSource:
    """A native thread polls, on `cpus` if there are any; it wakes the loop when its ring stops
    being empty.
    """

    def __init__(
        self,
        turn: Turn,
        channel: NativeChannel,
        cq: NativeObject,
        depth: int,
        cpus: Sequence[int] = (),
    ) -> None:
        self._turn = turn
        self._channel = channel
        self._cq = cq
        self._depth = depth
        self._cpus = cpus
        self._poller: NativePoller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left: list[Completion] = []  # what the ring held when the thread was stopped
        self.events = 0

    @property
    def cq(self) -> NativeObject:
        return self._cq

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._poller = NativePoller(self._turn, self._cq, self._depth, cpus=self._cpus)
        self._loop = loop

        def on_readable() -> None:
            self.events += 1
            wake()

        loop.add_reader(self._poller.fd, on_readable)

    def poll(self) -> list[Completion]:
        if self._poller is not None:
            return self._poller.drain(BATCH)
        if self._left:
            found, self._left = self._left[:BATCH], self._left[BATCH:]
            return found
        return self._turn.poll(self._cq.native, BATCH)

    def spin(self, spin_us: int) -> list[Completion]:
        return self.poll()

    def nap(self, spin_us: int, nap_us: int) -> list[Completion]:
        found = self.poll()
        if found or self._poller is None or nap_us <= 0:
            return found
        sleeper = select.poll()
        sleeper.register(self._poller.fd, select.POLLIN)
        sleeper.poll(max(1, nap_us // 1000))
        return self.poll()

    def park(self) -> bool:
        return True

    def look_for_event(self) -> bool:
        return True  # the thread is the backstop: no event can be missed

    def stop(self) -> None:
        poller, self._poller = self._poller, None
        if poller is None:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(poller.fd)
        self._left += poller.stop()

    def close(self) -> None:
        self.stop()
        self._cq.close()
        self._channel.close()


def open_source(
    turn: Turn, context: NativeContext, depth: int, *, polling: bool, cpus: Sequence[int] = ()
) -> CompletionSource:
    """A completion queue of `depth` on a channel of its own; a thread that polls it stays on `cpus`
    if there are any. Raises DeviceError, having closed what it made.
    """
    channel = context.create_channel()
    try:
        cq = context.create_cq(depth, channel)
    except DeviceError:
        channel.close()
        raise
    if polling:
        return PollerSource(turn, channel, cq, depth, cpus)
    return EventSource(turn, channel, cq)


def _nothing() -> None:
    """Not started yet."""
