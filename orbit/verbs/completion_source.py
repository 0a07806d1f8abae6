"""Where a lane's completions come from: the event channel, or a thread that polls (D10).

Owns the completion queue, its channel and how the event loop is woken. One queue has one poller:
in either mode everything goes through its source. It does not look at a completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..errors import DeviceError
from .poller import NativePoller
from .provider import NativeChannel, NativeContext, NativeObject
from .records import Completion
from .turn import POLL_MAX, Look, Posted, Turn

BATCH: Final = POLL_MAX


class CompletionSource(Protocol):
    """One completion queue. Errors are DeviceError."""

    events: int  # wake-ups read so far

    @property
    def cq(self) -> NativeObject: ...

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there is something to poll."""

    def post(self, qp: int, receives: Sequence[bytes], sends: Sequence[bytes]) -> Posted:
        """Post to a queue pair of this queue, as `Turn.post`, and look for completions where that
        needs no further call; they are at hand then.
        """

    def take(self) -> list[Completion]:
        """What is at hand, without a look."""

    def poll(self) -> list[Completion]:
        """Up to BATCH, what is at hand among them; fewer mean that there were no more."""

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
    """The channel's descriptor in the event loop: read events, poll, arm and poll again in one
    crossing, then sleep. `spins`: whoever polls goes on polling for a while, so that only `park`
    arms.
    """

    def __init__(
        self, turn: Turn, channel: NativeChannel, cq: NativeObject, *, spins: bool = False
    ) -> None:
        self._turn = turn
        self._channel = channel
        self._cq = cq
        self._spins = spins
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] = _nothing
        self._fd = -1
        self._armed = False  # by the last call into the helper, or an event is on its way
        self._looked = False  # just now, so that the next `poll` need not
        self._found: list[Completion] = []  # at hand
        self.events = 0

    @property
    def cq(self) -> NativeObject:
        return self._cq

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop, self._wake, self._fd = loop, wake, self._channel.fd
        loop.add_reader(self._fd, self._on_readable)
        wake()  # the first arming

    def post(self, qp: int, receives: Sequence[bytes], sends: Sequence[bytes]) -> Posted:
        channel, cq = self._channel.native, self._cq.native
        posted = self._turn.post(qp, receives, sends, channel, cq, self._armed, self._room)
        if posted.look is not None:
            self._keep(posted.look)
        return posted

    def take(self) -> list[Completion]:
        found, self._found = self._found, []
        return found

    def poll(self) -> list[Completion]:
        if not self._looked:
            if self._spins:
                self._found += self._turn.poll(self._cq.native, self._room)
            else:
                self._look()
        self._looked = False
        return self.take()

    def spin(self, spin_us: int) -> list[Completion]:
        return self.take() or self._turn.wait(self._cq.native, 0, spin_us, 0, BATCH)

    def nap(self, spin_us: int, nap_us: int) -> list[Completion]:
        if not self._found:
            channel, cq = self._channel.native, self._cq.native
            self._keep(self._told(self._turn.nap, channel, cq, spin_us, nap_us, self._armed))
        return self.take()

    def park(self) -> bool:
        if not (self._armed or self._found):
            self._look()
            self._looked = True
        return self._armed and not self._found

    def look_for_event(self) -> bool:
        before = self.events
        self._look()
        return self.events > before

    def stop(self) -> None:
        if self._loop is not None and self._fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._fd = -1

    def close(self) -> None:
        self.stop()
        self._cq.close()
        self._channel.close()

    def _on_readable(self) -> None:
        # What is wrong is met again by the poll, which somebody can act on.
        with contextlib.suppress(DeviceError):
            if self._spins:
                self._armed = False
                self.events += self._turn.drain_events(self._channel.native, self._cq.native)
            else:
                self.look_for_event()
                self._looked = True
        self._wake()
        self._looked = False

    @property
    def _room(self) -> int:
        return max(0, BATCH - len(self._found))

    def _look(self) -> None:
        channel, cq = self._channel.native, self._cq.native
        self._keep(self._told(self._turn.wake, channel, cq, self._armed, self._room))

    def _told(self, ask: Callable[..., Look], *arguments: int) -> Look:
        """Raises DeviceError; it is not known then whether the queue is armed."""
        try:
            return ask(*arguments)
        except DeviceError:
            self._armed = False
            raise

    def _keep(self, look: Look) -> None:
        self._armed = look.armed
        self.events += look.events
        self._found += look.found


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

    def post(self, qp: int, receives: Sequence[bytes], sends: Sequence[bytes]) -> Posted:
        return self._turn.post(qp, receives, sends)

    def take(self) -> list[Completion]:
        return []  # they are in the ring, or left of it

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
    turn: Turn,
    context: NativeContext,
    depth: int,
    *,
    polling: bool,
    spins: bool = False,
    cpus: Sequence[int] = (),
) -> CompletionSource:
    """A completion queue of `depth` on a channel of its own; a thread that polls it stays on `cpus`
    if there are any; `spins` is of one without a thread. Raises DeviceError, having closed what it
    made.
    """
    channel = context.create_channel()
    try:
        cq = context.create_cq(depth, channel)
    except DeviceError:
        channel.close()
        raise
    if polling:
        return PollerSource(turn, channel, cq, depth, cpus)
    return EventSource(turn, channel, cq, spins=spins)


def _nothing() -> None:
    """Not started yet."""
