"""What an engine knows of another one: the policies and limits that both tell, asked once for each
epoch.

A node on which none is open knows no such call. Nothing here knows a request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ...errors import PeerRefused
from ...model import PeerIdentity
from ...protocol.engine_messages import EngineHelloReply, EngineHelloRequest
from ...protocol.messages import Message
from ...transport.interface import CallHandler, Session
from ...transport.rails import RailRoute


@dataclass(frozen=True, slots=True)
class EnginePeer:
    """The engine at the other end. `routes`: the pairs of rails that transfers would use now; that
    they reach each other is known only once a transfer has used them.
    """

    identity: PeerIdentity
    host_memory: str
    routes: tuple[RailRoute, ...] = ()


class PeerFacts:
    """What the engines of current epochs have said."""

    def __init__(self) -> None:
        self._known: dict[Session, EngineHelloReply] = {}
        self._asking: dict[Session, asyncio.Task[EngineHelloReply]] = {}

    async def of(self, session: Session) -> EngineHelloReply:
        """Asks at the first use. Raises PeerRefused (no engine there), PeerError."""
        found = self._known.get(session)
        if found is not None:
            return found
        task = self._asking.get(session)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(session))
            self._asking[session] = task
            task.add_done_callback(lambda done: self._asked(session, done))
        # Shielded: who gives up leaves the answer to the others.
        return await asyncio.shield(task)

    def _asked(self, session: Session, task: asyncio.Task[EngineHelloReply]) -> None:
        self._asking.pop(session, None)
        if task.cancelled() or task.exception() is not None:
            return
        for old in [known for known in self._known if known.closed]:
            del self._known[old]
        self._known[session] = task.result()

    async def _ask(self, session: Session) -> EngineHelloReply:
        try:
            return await session.call(EngineHelloRequest(), EngineHelloReply)
        except PeerRefused as error:
            if error.reason != "unknown_method":
                raise
            text = "no transfer engine is open on that node"
            raise PeerRefused("no_engine", text) from error


def answering(says: EngineHelloReply) -> CallHandler:
    """The handler of other engines' hellos."""

    async def on_hello(session: Session, body: object) -> Message:
        EngineHelloRequest.from_wire(body)
        return says

    return on_hello
