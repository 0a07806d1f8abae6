"""The RC message links of one epoch: at most one serves at a time, numbered by attempts.

Owns who opens a link and how many wait for it, the *ready* step with its verdict on the epoch, and
the notices between both sides. It posts nothing and knows no packet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from ...errors import (
    ClosedError,
    DeadlineExceeded,
    DeviceError,
    OrbitError,
    PathUnavailable,
    PeerError,
    PeerLost,
    PeerRefused,
    Unquiesced,
)
from ...model import PathName, PathReason
from ...protocol.messages import (
    ConnectMessagesReply,
    ConnectMessagesRequest,
    MessagesLostNotice,
    OpenMessagesNotice,
)
from ...protocol.messaging.credits import Windows
from ...transport.interface import Session
from ...transport.messages import LinkClient, LinkOpened, MessageLink
from ..device import find_device
from .introductions import (
    CLOSED,
    DETAIL_MAX,
    FAILED,
    announced_windows,
    choose_rail,
    known_reason,
    notify_lost,
    reason_of,
    reply_of,
    request_of,
    their_end,
    usable_rails,
)
from .link_end import LinkEnd, TheirEnd
from .rail import MessageRail
from .settings import RdmaMessagesConfig
from .statistics import MessagesCounters

_LAST_PACKET_S = 0.1  # by then the device has shown what it has acknowledged

Opened = MessageLink | PathUnavailable


class _Verdict:
    """What past attempts mean for the next one."""

    __slots__ = ("final", "recent", "retry_at")

    def __init__(self) -> None:
        self.final = PathReason.OK  # anything else: no link in this epoch any more
        self.recent = PathReason.OK
        self.retry_at = 0.0

    def note(self, reason: PathReason, backoff_s: float) -> None:
        self.recent = reason
        self.retry_at = asyncio.get_running_loop().time() + backoff_s
        if reason in (PathReason.NOT_READY, PathReason.PEER_WITHOUT):
            self.final = reason


class _Asked(NamedTuple):
    """The accepting side's wait for a link newer than `after`."""

    outcome: asyncio.Future[Opened]
    after: int

    def settle(self, outcome: Opened) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class EpochLinks:
    """One per session, on either side."""

    def __init__(
        self,
        session: Session,
        rails: Sequence[MessageRail],
        config: RdmaMessagesConfig,
        counters: MessagesCounters,
        client: LinkClient | None,
        on_opened: LinkOpened,
    ) -> None:
        self._session = session
        self._rails = tuple(rails)
        self._config = config
        self._counters = counters
        self._client = client
        self._on_opened = on_opened
        self._attempt = 0  # the newest, on either side
        self._current: LinkEnd | None = None
        self._ends: set[LinkEnd] = set()  # whose resources are not all given back
        self._opening: asyncio.Task[Opened] | None = None
        self._asked: _Asked | None = None  # the accepting side waits for a link
        self._accepting = asyncio.Lock()
        self._verdict = _Verdict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def availability(self) -> PathReason:
        """From facts at hand, without I/O."""
        if self._closed or self._session.closed:
            return PathReason.DRAINING
        if self._verdict.final is not PathReason.OK:
            return self._verdict.final
        if self._serving() is not None:
            return PathReason.OK
        if not self._session.peer_hello.limits.message_credits:
            return PathReason.PEER_WITHOUT
        usable, reason = usable_rails(self._rails)
        if not usable:
            return reason
        if choose_rail(usable, self._session) is None:
            return PathReason.PEER_WITHOUT
        if self._opening is None and asyncio.get_running_loop().time() < self._verdict.retry_at:
            return self._verdict.recent
        return PathReason.OK

    async def open(self, client: LinkClient) -> MessageLink:
        """The serving link, or a new one. Concurrent callers share the attempt. Raises
        PathUnavailable.
        """
        self._client = self._client or client
        serving = self._serving()
        if serving is not None:
            return serving
        reason = self.availability()
        if reason is not PathReason.OK:
            raise _unavailable(reason)
        outcome = await asyncio.shield(self._start_opening())
        if isinstance(outcome, PathUnavailable):
            raise outcome.with_traceback(None)
        return outcome

    # --- the dialing side -------------------------------------------------------------------------

    def asked(self) -> None:
        """The other side wants a link. It hears of a failure by a notice."""
        if not self._session.dialed or self._closed or self._serving() is not None:
            return
        reason = self.availability()
        if reason is PathReason.OK and self._client is None:
            reason = PathReason.NOT_CONFIGURED
        if reason is not PathReason.OK:
            notify_lost(self._session, self._attempt + 1, reason, "asked for a link")
            return
        task = asyncio.get_running_loop().create_task(self._serve_asked())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_asked(self) -> None:
        outcome = await asyncio.shield(self._start_opening())
        if isinstance(outcome, PathUnavailable):
            notify_lost(self._session, self._attempt, PathReason(outcome.reason), outcome.detail)

    def _start_opening(self) -> asyncio.Task[Opened]:
        if self._opening is None:
            opening = self._dial() if self._session.dialed else self._ask()
            self._opening = asyncio.get_running_loop().create_task(self._run(opening))
        return self._opening

    async def _run(self, opening: Coroutine[Any, Any, MessageLink]) -> Opened:
        """The outcome as a value, so that many can wait for it."""
        try:
            return await opening
        except PathUnavailable as error:
            failure = error
        except PeerRefused as error:
            failure = _unavailable(reason_of(error), error.detail or error.reason)
        except (OrbitError, TimeoutError) as error:
            failure = _unavailable(PathReason.CONNECT_FAILED, str(error))
        except asyncio.CancelledError:
            return _unavailable(PathReason.DRAINING)  # only `close` cancels it
        finally:
            self._opening = None
        self._counters.refused += 1
        self._verdict.note(PathReason(failure.reason), self._config.connect_backoff_s)
        return failure

    async def _dial(self) -> MessageLink:
        self._attempt += 1
        usable, reason = usable_rails(self._rails)
        pair = choose_rail(usable, self._session)
        if pair is None:
            raise _unavailable(PathReason.PEER_WITHOUT if usable else reason)
        rail, remote = pair
        await self._end_older()  # what they hold may be all that there is
        await rail.ensure()
        end = self._open_end(rail, announced_windows(self._session))
        try:
            reply = await self._session.call(
                request_of(end, remote, self._config.limits),
                ConnectMessagesReply,
                timeout_s=2 * self._config.connect_timeout_s,  # the other side connects within
            )
            theirs = their_end(reply)
            await end.connect(theirs)
            self._check_open()
            link = self._start(end, theirs)
            await self._wait_ready(end, link)
        except BaseException as error:
            end.abort(error if isinstance(error, OrbitError) else _given_up())
            raise
        return link

    async def _wait_ready(self, end: LinkEnd, link: MessageLink) -> None:
        """The ready step: a packet crosses the queue pair in both directions."""
        try:
            await link.ping(self._config.ready_timeout_s)
        except (DeadlineExceeded, PeerLost, ClosedError) as error:
            if self._closed or self._session.closed:
                raise
            self._not_ready(end, str(error))
            raise _unavailable(PathReason.NOT_READY, str(error)) from error

    # --- the accepting side -----------------------------------------------------------------------

    async def _ask(self) -> MessageLink:
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[Opened] = loop.create_future()
        self._asked = _Asked(asked, self._attempt)
        self._session.notify(OpenMessagesNotice())
        timeout_s = 3 * self._config.connect_timeout_s + self._config.ready_timeout_s
        try:
            await asyncio.wait([asked], timeout=timeout_s)
        finally:
            self._asked = None
        if not asked.done():
            raise _unavailable(PathReason.CONNECT_FAILED, "the peer opened no link in time")
        outcome = asked.result()
        if isinstance(outcome, PathUnavailable):
            raise outcome
        return outcome

    async def accept(self, request: ConnectMessagesRequest) -> ConnectMessagesReply:
        """Answer `_connect_messages`. Raises PeerRefused."""
        rail = self._check(request)
        async with self._accepting:
            if request.attempt <= self._attempt:
                raise PeerRefused("stale_attempt", f"attempt {request.attempt}")
            self._attempt = request.attempt
            await self._end_older()
            try:
                return await self._accept(rail, request)
            except PathUnavailable as error:
                raise PeerRefused(error.reason, error.detail) from error
            except (DeviceError, DeadlineExceeded) as error:
                raise PeerRefused(PathReason.CONNECT_FAILED, str(error)) from error

    async def _accept(
        self, rail: MessageRail, request: ConnectMessagesRequest
    ) -> ConnectMessagesReply:
        theirs = their_end(request)
        await rail.ensure()
        self._check_open()
        end = self._open_end(rail, theirs.windows)
        try:
            await end.connect(theirs)
            self._check_open()
            self._start(end, theirs)
        except BaseException as error:
            end.abort(error if isinstance(error, OrbitError) else _given_up())
            raise
        loop = asyncio.get_running_loop()
        end.timer = loop.call_later(self._config.ready_timeout_s, self._ready_overdue, end)
        return reply_of(end, self._config.limits)

    def _ready_overdue(self, end: LinkEnd) -> None:
        if not end.ready and not end.ended:
            self._not_ready(end, f"no packet within {self._config.ready_timeout_s:g} s")

    async def _end_older(self) -> None:
        """A new link takes their place, so whoever opens it has given them up."""
        older = list(self._ends)
        for end in older:
            end.told = True
            end.abort(PeerLost(str(self._session.peer), "replaced by a newer link"))
        for end in older:
            # What is retained stays listed; the new link does not depend on it.
            with contextlib.suppress(Unquiesced):
                await end.wait_closed()

    def _check(self, request: ConnectMessagesRequest) -> MessageRail:
        self._check_open()
        if self._session.dialed:
            raise PeerRefused("bad_request", "links are opened by the side that dialed")
        if self._client is None:
            raise PeerRefused(PathReason.NOT_CONFIGURED)
        device = find_device([rail.device for rail in self._rails], request.peer_gid)
        for rail in self._rails:
            if rail.device is device:
                return rail
        raise PeerRefused("no_rail", f"this node has no rail {request.peer_gid[:64]}")

    # --- both -------------------------------------------------------------------------------------

    def lost_at_peer(self, notice: MessagesLostNotice) -> None:
        """The other side's end is gone, or there never was one."""
        for end in self._ends:
            if end.attempt == notice.attempt and not end.ended:
                end.rail.poll()  # its last packets came before the notice
                end.told = True
                _end_with(end, str(self._session.peer), notice)
        reason = known_reason(notice.reason)
        if reason is PathReason.NOT_READY and notice.attempt >= self._attempt:
            self._verdict.final = reason
        # A link that died earlier says nothing about the one that was asked for.
        if self._asked is not None and notice.attempt > self._asked.after:
            self._asked.settle(_unavailable(reason, notice.detail[:DETAIL_MAX]))

    async def close(self, cause: OrbitError) -> None:
        """End everything. Raises Unquiesced (the first, after all were tried)."""
        self._closed = True
        opening = self._opening
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        async with self._accepting:  # one in progress sees the end and cleans up
            pass
        failure: Unquiesced | None = None
        for end in self._ends:
            end.abort(cause)
        for end in self._ends:
            try:
                await end.wait_closed()
            except Unquiesced as error:
                failure = failure or error
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if failure is not None:
            raise failure

    def _open_end(self, rail: MessageRail, allowed: Windows) -> LinkEnd:
        self._ends = {end for end in self._ends if not end.closed.is_set()}
        end = LinkEnd.open(rail, allowed, self._attempt, str(self._session.peer), self._config)
        self._ends.add(end)
        return end

    def _start(self, end: LinkEnd, theirs: TheirEnd) -> MessageLink:
        assert self._client is not None
        self._current = end
        return end.start(theirs, self._client, self._on_ready, self._on_lost)

    def _on_ready(self, end: LinkEnd) -> None:
        end.cancel_timer()
        if end.link is None or self._closed:
            return
        self._counters.opened += 1
        self._on_opened(self._session, end.link)
        if self._asked is not None:
            self._asked.settle(end.link)

    def _on_lost(self, end: LinkEnd, error: OrbitError | None) -> None:
        end.cancel_timer()
        if self._current is end:
            self._current = None
        if self._closed:
            return
        if error is not None and end.ready:
            self._counters.lost += not end.closed_by_peer
        elif error is not None:
            self._not_ready(end, str(error))
        if not end.told:
            # A queue pair does not notice that the other one is gone: without this the peer would
            # learn of it from the retries of its next send.
            end.told = True
            notify_lost(
                self._session, end.attempt, CLOSED if error is None else FAILED, str(error or "")
            )

    def _not_ready(self, end: LinkEnd, detail: str) -> None:
        """Nothing was sent by it yet, so nothing is lost: this epoch's messages go by TCP."""
        if end.told:
            return
        end.told = True
        self._verdict.final = PathReason.NOT_READY
        self._counters.not_ready += 1
        notify_lost(self._session, end.attempt, PathReason.NOT_READY, detail)
        end.abort(PeerLost(str(self._session.peer), f"the link did not get ready: {detail}"))

    def _serving(self) -> MessageLink | None:
        end = self._current
        return end.link if end is not None and end.ready and not end.ended else None

    def _check_open(self) -> None:
        if self._closed or self._session.closed:
            raise PeerRefused("closing")


def _end_with(end: LinkEnd, peer: str, notice: MessagesLostNotice) -> None:
    error = PeerLost(peer, f"ended by the peer: {notice.detail[:DETAIL_MAX] or notice.reason[:32]}")
    if notice.reason != CLOSED:
        end.abort(error)
        return
    # The peer has it confirmed that its last packet, a goodbye, arrived here. The device may show
    # it a moment later all the same.
    end.closed_by_peer = True
    end.timer = asyncio.get_running_loop().call_later(_LAST_PACKET_S, end.abort, error)


def _unavailable(reason: PathReason, detail: str = "") -> PathUnavailable:
    return PathUnavailable(PathName.RDMA, reason, detail)


def _given_up() -> OrbitError:
    return PeerError("the dial was given up")
