"""Which handlers a peer has: asked with calls that every node answers.

Waiting for a handler is done where it will be registered, so nobody polls. What a handler does is
not known here.
"""

from __future__ import annotations

import asyncio
from typing import Final

from ...errors import DeadlineExceeded, RequestFailed, UsageError
from ...protocol.codec import decode, encode
from .contract import Caller
from .dispatch import Dispatcher
from .handlers import Message, check_name

HANDLERS_CALL: Final = "_handlers"
AWAIT_CALL: Final = "_await_handler"

# One held call is answered after that long at the latest, and repeated by whoever still waits: a
# graceful shutdown never waits longer for it, and a peer that forgot its wait costs no more.
_HELD_S_MAX: Final = 5.0
_ANSWER_S: Final = 5.0  # for the way there and back, beyond the time that a call is held
_WAITERS_MAX: Final = 1024


class Directory:
    """Answers for the own node, and asks others."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._waiting = 0
        dispatcher.add(HANDLERS_CALL, self._answer_list, typed=True, reserved=True)
        dispatcher.add(AWAIT_CALL, self._answer_wait, typed=True, reserved=True)

    async def list_handlers(
        self, caller: Caller, peer: object, timeout_s: float | None
    ) -> list[str]:
        """Names of `peer`'s handlers, sorted. Raises as a unary call."""
        answer = decode(await caller.call(peer, HANDLERS_CALL, timeout=timeout_s))
        if not isinstance(answer, list) or not all(isinstance(name, str) for name in answer):
            raise RequestFailed("decode", "the peer's list of handlers is none")
        return answer

    async def wait_for_handler(
        self, caller: Caller, peer: object, name: str, timeout_s: float
    ) -> None:
        """Until `peer` has a handler `name`. Raises DeadlineExceeded, and as a unary call."""
        check_name(name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := deadline - loop.time()) > 0:
            held = min(left, _HELD_S_MAX)
            request = encode({"name": name, "timeout_s": held})
            try:
                answer = await caller.call(
                    peer, AWAIT_CALL, request, timeout=min(left, held + _ANSWER_S)
                )
            except DeadlineExceeded:
                break
            if decode(answer) is True:
                return
        raise DeadlineExceeded(f"waiting for handler {name!r}", timeout_s)

    # --- answers ----------------------------------------------------------------------------------

    def _answer_list(self, value: object, message: Message) -> object:
        return self._dispatcher.registry.names()

    async def _answer_wait(self, value: object, message: Message) -> bool:
        name, timeout_s = _checked(value)
        if self._waiting >= _WAITERS_MAX:
            raise UsageError("too many wait for handlers here")
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._dispatcher.registry.wait(name)
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True


def _checked(value: object) -> tuple[str, float]:
    if isinstance(value, dict):
        name, timeout_s = value.get("name"), value.get("timeout_s")
        if isinstance(name, str) and isinstance(timeout_s, int | float) and timeout_s > 0:
            return name, min(float(timeout_s), _HELD_S_MAX)
    raise UsageError("a wait for a handler needs its name and a time")
