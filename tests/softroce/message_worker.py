"""A worker that runs a messaging node on command: one JSON command per line in, one JSON answer per
line out. `lives` starts it. `open` replaces the node of the command before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orbit
from orbit.events import SendRejected
from orbit.testing.pattern import pattern
from orbit.transport.rails import RailedPath
from tests.softroce.message_rogue import Rogue
from tests.softroce.node_worker import rdma_config

# A bound for hangs alone; a soak's single steps take minutes.
WAIT_S = 1800.0 if os.environ.get("ORBIT_SOAK") == "1" else 40.0
CLEAR_REFS_PEAK = "5"  # /proc/self/clear_refs: forget the peak of the resident set
PAYLOAD = pattern(256 << 10)
Facts = dict[str, Any]


def say(**facts: Any) -> None:
    print(json.dumps(facts, default=str), flush=True)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise orbit.DeadlineExceeded("a condition of the test", WAIT_S)
        await asyncio.sleep(0.002)


def numbered(number: int, nbytes: int) -> bytes:
    return number.to_bytes(4, "big") + PAYLOAD[: max(0, nbytes - 4)]


class Sink:
    """The sequence oracle of one sender: each number once, in order, with its bytes."""

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.faults: list[str] = []

    def take(self, payload: memoryview) -> None:
        number = int.from_bytes(payload[:4], "big")
        if number != self.count and len(self.faults) < 20:
            self.faults.append(f"{number} in place of {self.count}")
        if payload[4:] != memoryview(PAYLOAD)[: len(payload) - 4]:
            self.faults.append(f"the bytes of {number}")
        self.count = number + 1
        self.nbytes += len(payload)


class Worker:
    """The node, its handlers, and the jobs that `begin` left running."""

    def __init__(self, listen: str, worker_id: int) -> None:
        self.listen = listen
        self.worker_id = worker_id
        self.rogue = Rogue(self)
        self.jobs: dict[str, asyncio.Task[Facts]] = {}
        self._reset()

    def _reset(self) -> None:
        self.node: orbit.Node | None = None
        self.peers: dict[str, orbit.PeerIdentity] = {}
        self.sinks: dict[int, Sink] = {}
        self.events: list[Facts] = []
        self.delay_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.held = 0

    @property
    def opened(self) -> orbit.Node:
        assert self.node is not None
        return self.node

    # --- the node ---------------------------------------------------------------------------------

    async def open(
        self,
        transport: str = "auto",
        rdma: Mapping[str, Any] | None = None,
        messaging: Mapping[str, Any] | None = None,
        timeouts: Mapping[str, Any] | None = None,
    ) -> Facts:
        await self.close()
        self._reset()
        config = orbit.NodeConfig(
            listen=self.listen,
            worker_id=self.worker_id,
            transport=transport,
            rdma=rdma_config(**(rdma or {})),
            messaging=orbit.MessagingConfig(**(messaging or {})),
            timeouts=orbit.TimeoutConfig(**(timeouts or {})),
        )
        node = orbit.Node(config, on_event=self._on_event)
        node.handler("sink", self._on_sink, mode=orbit.Dispatch.ordered())
        node.handler("echo", lambda message: message.payload)
        node.handler("hold", self._on_hold)
        await node.open()
        self.node = node
        return {"address": str(node.address)}

    async def close(self) -> Facts:
        begin = time.monotonic()
        if self.node is not None:
            await self.node.close()
            self.node = None
        return {"seconds": time.monotonic() - begin}

    async def meet(self, name: str, address: str) -> Facts:
        self.peers[name] = self.opened.add_peer(address)
        return {}

    async def drop_session(self, to: str) -> Facts:
        """As if the connection had broken."""
        session = await self.opened._open().session_to(self.peers[to].worker_id)
        session.abort(orbit.PeerLost(to, "dropped by the test"))
        return {}

    def _on_event(self, event: object) -> None:
        if not isinstance(event, SendRejected):  # one for each call of a dead peer
            self.events.append({"event": type(event).__name__, **asdict(event)})  # type: ignore[call-overload]

    # --- handlers ---------------------------------------------------------------------------------

    async def _on_sink(self, message: orbit.Message) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self.gate.wait()
        self.sinks.setdefault(message.sender.worker_id, Sink()).take(message.payload)

    async def _on_hold(self, message: orbit.Message) -> bytes:
        self.held += 1
        await self.gate.wait()
        self.held -= 1
        return bytes(message.payload)

    async def slow(self, delay_s: float) -> Facts:
        self.delay_s = delay_s
        return {}

    async def shut(self, shut: bool) -> Facts:
        """Handlers stand still."""
        if shut:
            self.gate.clear()
        else:
            self.gate.set()
        return {}

    async def await_held(self, count: int) -> Facts:
        await until(lambda: self.held >= count)
        return {"held": self.held}

    async def await_sink(self, count: int, sender: int) -> Facts:
        await until(lambda: sender in self.sinks and self.sinks[sender].count >= count)
        await asyncio.sleep(0.05)  # nothing may follow
        return await self.sink(sender)

    async def sink(self, sender: int) -> Facts:
        sink = self.sinks.get(sender) or Sink()
        return {"count": sink.count, "nbytes": sink.nbytes, "faults": sink.faults}

    # --- sends and calls --------------------------------------------------------------------------

    async def flood(
        self, to: str, sizes: Sequence[int], count: int = 0, seconds: float = 0.0
    ) -> Facts:
        """Numbered messages, without waiting for anything but room in the queue."""
        node, peer = self.opened, self.peers[to]
        end = time.monotonic() + seconds
        failures: Counter[str] = Counter()
        number = refused = 0

        def on_error(error: orbit.OrbitError) -> None:
            if not isinstance(error, orbit.BudgetExceeded):
                failures[type(error).__name__] += 1

        while not failures and (number < count if count else time.monotonic() < end):
            payload = numbered(number, sizes[number % len(sizes)])
            result = node.send(peer, "sink", payload, timeout=WAIT_S, on_error=on_error)
            if result.done and result.state is orbit.SendState.FAILED:
                refused += 1
                try:
                    await node.capacity(peer, timeout=WAIT_S)
                except orbit.NotAdmitted:
                    failures["NotAdmitted"] += 1
                continue
            number += 1
            if number % 64 == 0:
                await asyncio.sleep(0)
        return {"sent": number, "refused": refused, "failures": dict(failures)}

    async def push(self, to: str, nbytes: int, count: int, timeout: float) -> Facts:
        """Each send with a deadline of its own; one that says that it never left is sent again."""
        node, peer = self.opened, self.peers[to]
        late = number = 0
        while number < count:
            sending = node.send(peer, "sink", numbered(number, nbytes), timeout=timeout, wait=True)
            try:
                await sending.admitted()
            except orbit.DeadlineExceeded as error:
                if not isinstance(error.__cause__, orbit.NotAdmitted):
                    raise
                late += 1
                continue
            number += 1
        return {"sent": number, "late": late}

    async def call(
        self,
        to: str,
        nbytes: int = 4096,
        timeout: float = WAIT_S,
        transport: str | None = None,
        name: str = "echo",
    ) -> Facts:
        begin = time.monotonic()
        payload = PAYLOAD[:nbytes]
        result = self.opened.unary(
            self.peers[to], name, payload, timeout=timeout, transport=transport
        )
        same = await result == payload
        assert result.route is not None
        return {
            "same": same,
            "by": result.route.transport.value,
            "seconds": time.monotonic() - begin,
        }

    async def calls(
        self, to: str, count: int, timeout: float = WAIT_S, name: str = "hold", nbytes: int = 16
    ) -> Facts:
        """All of them at once; how many ended in which way, and when the last one did."""
        node, peer = self.opened, self.peers[to]
        results = [
            node.unary(peer, name, PAYLOAD[:nbytes], timeout=timeout, wait=True)
            for _ in range(count)
        ]
        outcomes: Counter[str] = Counter()
        texts: set[str] = set()
        for result in results:
            try:
                same = await result == PAYLOAD[:nbytes]
                outcomes["ok" if same else "wrong"] += 1
            except orbit.OrbitError as error:
                outcomes[type(error).__name__] += 1
                texts.add(str(error))
        return {"outcomes": dict(outcomes), "texts": sorted(texts)[:5], "end": time.monotonic()}

    async def meet_at(self, to: str, at: float, users: int) -> Facts:
        """Call from many tasks at the same instant of the machine's clock."""
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        begin = time.monotonic()
        found = await self.calls(to, users, name="echo", nbytes=4096)
        return {"outcomes": found["outcomes"], "seconds": time.monotonic() - begin}

    async def ping_pong(self, to: str, turns: int, seed: int) -> Facts:
        node, peer = self.opened, self.peers[to]
        rng = random.Random(seed)
        worst_s = 0.0
        for turn in range(turns):
            payload = turn.to_bytes(4, "big")
            begin = time.monotonic()
            if await node.unary(peer, "echo", payload, timeout=WAIT_S) != payload:
                raise orbit.InternalError("an answer to another question")
            worst_s = max(worst_s, time.monotonic() - begin)
            if pause_us := rng.randrange(200):
                await asyncio.sleep(pause_us / 1e6)
        return {"worst_s": worst_s}

    async def health(self, to: str, timeout: float = 5.0) -> Facts:
        found = await self.opened.check_health(self.peers[to], timeout=timeout)
        return {"kind": found.kind.value, "by": found.transport}

    async def get(self, to: str, handle: str) -> Facts:
        data, lease = await self.opened.get(orbit.Handle.parse(handle))
        await self.opened.detach(lease.handle, lease)
        return {"same": data == PAYLOAD}

    async def register(self) -> Facts:
        handle = await self.opened.register_data(PAYLOAD, orbit.RegisterOptions(retain=True))
        return {"handle": str(handle)}

    # --- jobs -------------------------------------------------------------------------------------

    async def begin(self, job: str, what: str, **arguments: Any) -> Facts:
        operation: Callable[..., Awaitable[Facts]] = getattr(self, what)

        async def run() -> Facts:
            return await operation(**arguments)

        self.jobs[job] = asyncio.create_task(run())
        return {}

    async def finish(self, job: str) -> Facts:
        return await self.jobs.pop(job)

    # --- what a test looks at ---------------------------------------------------------------------

    async def statistics(self) -> Facts:
        found = self.opened.statistics()
        messaging = found.messaging
        return {
            "sessions": found.sessions,
            "retained": len(found.retained),
            "pending_calls": messaging.pending_calls,
            "late_replies": messaging.late_replies,
            "queued_frames": messaging.queued_frames,
            "links": [link.transport.value for link in messaging.links],
            "credits": [link.counts.credits for link in messaging.links],
            "unconsumed_bytes": [link.counts.unconsumed_bytes for link in messaging.links],
            "frames_sent": {t.transport.value: t.frames_sent for t in messaging.traffic},
            "devices": dict(messaging.devices),
            "events": self.events,
            "counters": dict(found.counters),
        }

    async def await_links(self, count: int, sessions: int = 1) -> Facts:
        """Until that many queue pairs and sessions exist here."""

        def there() -> bool:
            found = self.opened.statistics()
            links = found.messaging.devices.get("links", 0)
            return links == count and found.sessions == sessions

        await until(there)
        return {}

    async def await_rails(self) -> Facts:
        """Until none of the rails is paused."""
        rendezvous = self.opened._rendezvous
        assert rendezvous is not None
        path = rendezvous._paths.rdma
        assert isinstance(path, RailedPath)
        await until(lambda: all(rail.active for rail in path.rails()))
        return {}

    async def memory(self, reset: bool = False) -> Facts:
        """The resident set in bytes, now and at its peak since the last reset."""
        own = Path("/proc/self")
        if reset:
            (own / "clear_refs").write_text(CLEAR_REFS_PEAK)
        lines = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
        return {key: int(lines[key].split()[0]) << 10 for key in ("VmRSS", "VmHWM")}

    async def descriptors(self) -> Facts:
        return {"count": len(os.listdir("/proc/self/fd"))}

    async def idle_cpu(self, seconds: float) -> Facts:
        before = time.process_time()
        await asyncio.sleep(seconds)
        return {"share": (time.process_time() - before) / seconds}

    # --- trouble ----------------------------------------------------------------------------------

    async def misbehave(self, to: str, how: str) -> Facts:
        """See Rogue."""
        getattr(self.rogue, how)(self.peers[to].worker_id)
        return {}

    async def become_user(self, memlock_bytes: int = resource.RLIM_INFINITY) -> Facts:
        """A plain one, who may lock that much. For good: kill the worker afterwards."""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
        return {"user": os.getuid()}


async def serve(listen: str, worker_id: int) -> None:
    worker = Worker(listen, worker_id)
    say(ready=os.getpid())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        operation: Callable[..., Awaitable[Facts]] = getattr(worker, command.pop("op"))
        try:
            say(**await operation(**command))
        except orbit.OrbitError as error:
            say(error=type(error).__name__, code=error.code, text=str(error))
    await worker.close()
