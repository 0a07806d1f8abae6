"""The serving end: what one client at a time asks for by calls, before and between its operations.

A client is let go when it says so, when its connection ends, or when it is silent for too long;
what was offered to it is taken back then. Nothing that a client says is believed: plans are checked
and need no more memory than this end may use. A baseline may take as much again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Self

from ..errors import OrbitError, PeerRefused, UsageError
from ..events import Event, SessionClosed
from ..model import PeerIdentity
from ..node import Message
from ..protocol.address import NodeAddress
from .aside import Aside
from .baselines import BaselineServer
from .ends import End, NodeSettings
from .header import circumstances
from .offers import Offer, offer_for
from .plan import Plan
from .slots import bytes_needed, check_memory
from .usage import Usage

ASK: Final = "orbit.bench.ask"
ALIVE_EVERY_S: Final = 5.0  # a client that measures says so
SILENCE_MAX_S: Final = 30.0

_log = logging.getLogger("orbit")


class Guest:
    """The client that is being served."""

    def __init__(self, identity: PeerIdentity, plan: Plan, now: float) -> None:
        self.identity = identity
        self.plan = plan
        self.heard_at = now
        self.offer: Offer | None = None
        self.op_bytes = 0  # of one operation on what is offered
        self.aside = Aside()  # comparing its bytes


class BenchServer:
    """`async with`. Raises as Node.open."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._end = End(settings, of_engine=False, on_event=self._on_event)
        self._guest: Guest | None = None
        self._busy = asyncio.Lock()  # one request at a time changes what is offered
        self._baselines: BaselineServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._end.__aenter__()
        node = self._end.node
        self._baselines = BaselineServer(self._settings, node.address)
        node.typed_handler(ASK, self._on_ask)
        self._spawn(self._watch())
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        try:
            await self._let_go(self._guest)
            if self._baselines is not None:
                await self._baselines.close()
        finally:
            await self._end.__aexit__(*error)

    @property
    def address(self) -> NodeAddress:
        """For clients, to paste or to dial."""
        return self._end.node.address

    @property
    def end(self) -> End:
        """Its node and engine, for who exports their metrics."""
        return self._end

    @property
    def busy(self) -> bool:
        """Whether it serves a client."""
        return self._guest is not None

    async def serve_forever(self) -> None:
        """Until cancelled."""
        await asyncio.Event().wait()

    # --- requests ---------------------------------------------------------------------------------

    async def _on_ask(self, value: object, message: Message) -> Mapping[str, object]:
        try:
            if not isinstance(value, dict):
                raise UsageError("a request is a mapping")
            return await self._answer(message.sender, value)
        except OrbitError as error:
            code = error.reason if isinstance(error, PeerRefused) else error.code
            detail = error.detail if isinstance(error, PeerRefused) else str(error)
            return {"refused": code, "detail": detail, "hint": error.hint}

    async def _answer(
        self, sender: PeerIdentity, request: Mapping[str, Any]
    ) -> Mapping[str, object]:
        kind = request.get("kind")
        if kind == "begin":
            async with self._busy:
                return await self._begin(sender, request)
        guest = self._guest
        if guest is None or guest.identity != sender:
            raise self._refused(guest)
        guest.heard_at = asyncio.get_running_loop().time()
        match kind:
            case "alive":
                return {}
            case "usage":
                return Usage.of(self._end.node, guest.aside.cpu_s).to_wire()
            case "check":
                return await _checked(guest, request)
            case "baseline" | "offer":
                async with self._busy:
                    if self._guest is not guest:  # let go meanwhile
                        raise self._refused(self._guest)
                    change = self._baseline if kind == "baseline" else self._offer
                    return await change(guest, request)
            case "end":
                await self._let_go(guest)
                return {}
        raise UsageError(f"{kind!r} is no request of this version of orbit bench")

    async def _begin(self, sender: PeerIdentity, request: Mapping[str, Any]) -> dict[str, object]:
        if self._guest is not None and self._guest.identity != sender:
            raise self._refused(self._guest)
        plan = Plan.from_json(_mapping(request.get("plan")))
        self._check_room(plan)
        await self._take_back(self._guest)
        now = asyncio.get_running_loop().time()
        self._guest = Guest(sender, plan, now)
        found = self._end.node.statistics()
        about = circumstances(self.address.rails, rdma=str(found.rdma_reason))
        return {
            "circumstances": about,
            "rdma": str(found.rdma_reason),
            "rdma_detail": found.rdma_detail,
            "host_memory": self._settings.host_memory,
        }

    def _check_room(self, plan: Plan) -> None:
        needed, limit = bytes_needed(plan), self._settings.buffer_bytes
        if needed > limit:
            raise UsageError(
                f"the plan needs {needed} bytes at the server, which may use {limit}",
                hint="give the server a larger --max-bytes, or the client fewer bytes at once",
            )
        check_memory(plan)

    async def _offer(self, guest: Guest, request: Mapping[str, Any]) -> Mapping[str, object]:
        size = request.get("size")
        if size not in guest.plan.sizes:
            raise UsageError(f"{size!r} is no size of the plan")
        await self._take_back(guest)
        guest.op_bytes = size * guest.plan.batch
        guest.offer = offer_for(guest.plan, size, self._end)
        return await guest.offer.open()

    async def _baseline(self, guest: Guest, request: Mapping[str, Any]) -> Mapping[str, object]:
        assert self._baselines is not None
        what, asked = str(request.get("what")), _mapping(request.get("request"))
        return await self._baselines.answer(what, asked)

    def _refused(self, guest: Guest | None) -> PeerRefused:
        if guest is None:
            return PeerRefused("not_served", "this client is not, or no longer, served")
        return PeerRefused("busy", f"busy with client {guest.identity}")

    # --- the end of a client ----------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        guest = self._guest
        if isinstance(event, SessionClosed) and guest and event.peer == guest.identity.worker_id:
            self._spawn(self._let_go(guest))

    async def _watch(self) -> None:
        """Lets go of a client that says nothing any more."""
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            guest, now = self._guest, asyncio.get_running_loop().time()
            if guest is not None and now > guest.heard_at + SILENCE_MAX_S:
                _log.warning("bench: client %s is silent and served no more", guest.identity)
                await self._let_go(guest)

    async def _let_go(self, guest: Guest | None) -> None:
        """The next client may come when all of this one's is given back."""
        async with self._busy:
            if guest is None or self._guest is not guest:
                return
            assert self._baselines is not None
            try:
                for give_back in (partial(self._take_back, guest), self._baselines.close):
                    try:
                        await give_back()
                    except OrbitError as error:
                        who = guest.identity
                        _log.warning("bench: client %s left something behind: %s", who, error)
            finally:
                self._guest = None

    async def _take_back(self, guest: Guest | None) -> None:
        if guest is not None and guest.offer is not None:
            offer, guest.offer = guest.offer, None
            await offer.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _checked(guest: Guest, request: Mapping[str, Any]) -> dict[str, object]:
    worker, turn = request.get("worker"), request.get("turn")
    if guest.offer is None:
        raise UsageError("nothing is offered")
    if type(worker) is not int or not 0 <= worker < guest.plan.inflight or type(turn) is not int:
        raise UsageError(f"there is no operation {turn!r} of worker {worker!r}")
    differs = guest.offer.differs
    return {"differs": await guest.aside.run(guest.op_bytes, differs, worker, turn)}


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError("a part of the request is no mapping")
    return value
