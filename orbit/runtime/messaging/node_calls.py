"""The messaging calls of a Node, as its users see them.

Nothing is decided here: each call is checked and carried out by the messenger, the serving half or
streams. The node says where these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, overload

from ...errors import InternalError, PeerProtocolError, RequestFailed, UsageError
from ...model import Transport
from ...protocol.codec import decode, encode
from ...protocol.messaging.call_header import Wants
from ...protocol.streams.handle import StreamHandle
from .contract import Payload
from .draining import ShutdownPolicy
from .handlers import Dispatch
from .health import Health
from .results import OnError, SendResult
from .service import MessagingService
from .serving import Function, Serving
from .stream_objects import StreamInbox, StreamSender

ItemT = TypeVar("ItemT")

_HEALTH_TIMEOUT_S = 5.0
_HANDLER_TIMEOUT_S = 10.0
_WAIT_FOREVER = ShutdownPolicy.wait_forever()


class MessagingCalls:
    """Base of Node. `peer` is what `add_peer` returned, a NodeAddress or a worker id."""

    _serving: Serving

    def _messages(self) -> MessagingService:
        """Raises ClosedError."""
        raise NotImplementedError

    # --- sends ------------------------------------------------------------------------------------

    def send(
        self,
        peer: object,
        name: str,
        payload: Payload = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        transport: Transport | str | None = None,
        wait: bool = False,
        on_error: OnError | None = None,
    ) -> SendResult[None]:
        """Send to the handler `name` of `peer` and expect no answer. The message is on its way, or
        in its queue, when this returns; messages to one peer arrive in the order of the calls.

        Awaiting the result waits for admission: the frame was handed to the wire. At the bound
        (`messaging.queue_frames`, `queue_bytes`) it fails with BudgetExceeded and nothing was
        queued; with `wait` it stands in line instead, in order. `timeout` bounds that (None:
        `timeouts.call_s`). `on_error` is called once if the message fails, also after admission;
        what a dying TCP connection, or a peer that shuts down, took along unseen is not told by
        message but by event (`sync` knows).

        Up to `messaging.eager_max_bytes` the payload is the caller's again at once. A longer one
        must not change before the result is there: the peer fetches it, and the result resolves
        when it has, or has refused it. Headers may not begin with "_".
        Raises UsageError and ClosedError at once; the result fails with NotAdmitted (nothing left),
        OutcomeUnknown, PathUnavailable (a demanded transport), BudgetExceeded, DeadlineExceeded.
        """
        sending = self._messages().messenger.issue(
            peer,
            name,
            payload,
            Wants.NOTHING,
            headers=headers,
            timeout=timeout,
            transport=transport,
            wait=wait,
            on_error=on_error,
        )
        return SendResult(sending)

    def sync(
        self,
        peer: object,
        name: str,
        payload: Payload = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        transport: Transport | str | None = None,
        wait: bool = False,
        on_error: OnError | None = None,
    ) -> SendResult[None]:
        """As `send`; the result resolves when the peer's handler has finished. `timeout` bounds the
        whole call (None: `timeouts.call_s`).

        Beside what `send` fails with: RequestFailed (the handler raised, or there is none),
        PeerDraining, OutcomeUnknown (the link ended before the answer).
        """
        sending = self._messages().messenger.issue(
            peer,
            name,
            payload,
            Wants.ACK,
            headers=headers,
            timeout=timeout,
            transport=transport,
            wait=wait,
            on_error=on_error,
        )
        return SendResult(sending)

    def unary(
        self,
        peer: object,
        name: str,
        payload: Payload = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        transport: Transport | str | None = None,
        wait: bool = False,
        on_error: OnError | None = None,
    ) -> SendResult[memoryview]:
        """As `sync`; the result is what the handler returned, read-only. A handler that returns
        nothing gives an empty answer.
        """
        sending = self._messages().messenger.issue(
            peer,
            name,
            payload,
            Wants.RESPONSE,
            headers=headers,
            timeout=timeout,
            transport=transport,
            wait=wait,
            on_error=on_error,
        )
        return SendResult(sending)

    def typed_unary(
        self,
        peer: object,
        name: str,
        value: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        transport: Transport | str | None = None,
        wait: bool = False,
        on_error: OnError | None = None,
    ) -> SendResult[object]:
        """As `unary`, with plain values in place of bytes: None, bool, int, float, str, bytes, and
        lists and dicts (with text keys) of these, as msgpack. For typed handlers.

        Raises UsageError for a value that has no encoding; the result fails with
        RequestFailed("decode") for an answer that has none.
        """
        sending = self._messages().messenger.issue(
            peer,
            name,
            _encoded(value),
            Wants.RESPONSE,
            headers=headers,
            timeout=timeout,
            transport=transport,
            wait=wait,
            on_error=on_error,
            decode=_decoded,
        )
        return SendResult(sending)

    async def capacity(self, peer: object, *, timeout: float | None = None) -> None:
        """Wait until a send to `peer` would be admitted; others may be faster to use the room.
        Raises DeadlineExceeded, NotAdmitted.
        """
        await self._messages().messenger.capacity(peer, timeout)

    # --- handlers ---------------------------------------------------------------------------------

    @overload
    def handler(
        self, name: str, function: None = None, *, mode: Dispatch | None = None
    ) -> Callable[[Function], Function]: ...

    @overload
    def handler(
        self, name: str, function: Function, *, mode: Dispatch | None = None
    ) -> Function: ...

    def handler(
        self, name: str, function: Function | None = None, *, mode: Dispatch | None = None
    ) -> Function | Callable[[Function], Function]:
        """Register `function(message)` for messages to `name`; without it, a decorator. Plain or
        async; what it returns (bytes, or None) answers a unary call, what it raises fails it.

        `mode` None: Dispatch.spawn(), which keeps no order between async handlers. May be called
        before the node is open. Raises UsageError: a name that is taken, or begins with "_".
        """
        if function is None:
            return self._serving.handler(name, mode=mode)
        return self._serving.handler(name, function, mode=mode)

    @overload
    def typed_handler(
        self, name: str, function: None = None, *, mode: Dispatch | None = None
    ) -> Callable[[Function], Function]: ...

    @overload
    def typed_handler(
        self, name: str, function: Function, *, mode: Dispatch | None = None
    ) -> Function: ...

    def typed_handler(
        self, name: str, function: Function | None = None, *, mode: Dispatch | None = None
    ) -> Function | Callable[[Function], Function]:
        """As `handler`, for `function(value, message)` that returns a value (see `typed_unary`)."""
        if function is None:
            return self._serving.handler(name, mode=mode, typed=True)
        return self._serving.handler(name, function, mode=mode, typed=True)

    def remove_handler(self, name: str) -> None:
        """Further messages to `name` are refused; those that arrived are handled. Raises
        UsageError.
        """
        self._serving.remove_handler(name)

    async def list_handlers(
        self, peer: object | None = None, *, timeout: float | None = None
    ) -> list[str]:
        """The names that `peer` (None: this node) has handlers for, sorted. Raises as a call."""
        return await self._serving.list_handlers(peer, timeout)

    async def wait_for_handler(
        self, peer: object, name: str, *, timeout: float = _HANDLER_TIMEOUT_S
    ) -> None:
        """Until `peer` has a handler `name`. Raises DeadlineExceeded, and as a call."""
        await self._serving.wait_for_handler(peer, name, timeout)

    # --- streams ----------------------------------------------------------------------------------

    @overload
    def open_stream(
        self, item_type: None = None, *, capacity: int = 256
    ) -> StreamInbox[memoryview]: ...

    @overload
    def open_stream(self, item_type: type[ItemT], *, capacity: int = 256) -> StreamInbox[ItemT]: ...

    def open_stream(
        self, item_type: type[ItemT] | None = None, *, capacity: int = 256
    ) -> StreamInbox[ItemT] | StreamInbox[memoryview]:
        """A stream that this node receives: `async with` it, give its `handle` to the producer, and
        iterate. Items are bytes, or, with `item_type`, values of that type (see `typed_unary`).
        `capacity` items may wait unread. Raises UsageError.
        """
        streams = self._messages().streams
        if item_type is None:
            return streams.open(capacity=capacity)
        return streams.open(item_type, capacity)

    async def attach_stream(
        self, handle: StreamHandle | bytes | str, *, timeout: float | None = None
    ) -> StreamSender:
        """Become the one producer of a stream. Raises StreamError (unknown, attached, full, lost),
        and as a call.
        """
        return await self._messages().streams.attach(handle, timeout=timeout)

    # --- health and the end -----------------------------------------------------------------------

    async def check_health(self, peer: object, *, timeout: float = _HEALTH_TIMEOUT_S) -> Health:
        """Whether `peer` can be reached, asked over its message link, else over the control
        connection (dialed if need be). Never raises for what is wrong with the peer.
        """
        return await self._serving.check_health(peer, timeout)

    def begin_drain(self) -> None:
        """From now on new requests are turned away: calls fail with PeerDraining at their callers,
        plain sends are counted at both ends. Those that were taken on are finished, and this node
        may still send. Idempotent.
        """
        self._serving.begin_drain()

    async def graceful_shutdown(self, policy: ShutdownPolicy = _WAIT_FOREVER) -> None:
        """Drain, wait for what was taken on and for streams with a producer, as long as `policy`
        says, then close. Idempotent; concurrent callers share it, and the soonest of their
        deadlines holds.
        """
        await self._serving.graceful_shutdown(policy)


def _encoded(value: object) -> bytes:
    try:
        return encode(value)
    except InternalError as error:
        raise UsageError(f"the value {error}") from error


def _decoded(payload: memoryview) -> object:
    if not len(payload):
        return None
    try:
        return decode(payload)
    except PeerProtocolError as error:
        raise RequestFailed("decode", str(error)) from error
