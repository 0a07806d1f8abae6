"""One connection for each peer: one dial at a time, sessions of either direction, newer lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from orbit.errors import (
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PeerLost,
    PeerRefused,
    PeerRestarted,
    PeerUnreachable,
    UnknownPeer,
    UsageError,
)
from orbit.model import Incarnation, PeerIdentity, WorkerId
from orbit.protocol.address import NodeAddress
from orbit.protocol.bootstrap import Epoch
from orbit.protocol.connection import BACKOFF_FIRST_S, BACKOFF_MAX_S, SUPERSEDED, StartDial
from orbit.protocol.endpoint import Endpoint
from orbit.protocol.messages import Hello
from orbit.runtime import peers as peers_module
from orbit.runtime.peer import OpenedLink, PeerWays
from orbit.runtime.peers import Peers, PeersSettings
from orbit.runtime.runner import TaskRunner
from orbit.testing.clock import run_virtual

Run = Callable[[Any], Any]
OWN = PeerIdentity(WorkerId(5), Incarnation(1))
LOW, HIGH = WorkerId(2), WorkerId(9)  # their attempts have precedence over ours, and not


class FakeLink:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class FakeSession:
    """`answers`: it answers pings."""

    def __init__(self, opened: OpenedLink, dialed: bool) -> None:
        self.peer = opened.epoch.peer
        self.attempt = opened.epoch.attempt
        self.endpoints = opened.endpoints
        self.dialed = dialed
        self.cause: OrbitError | None = None
        self.answers = True

    def abort(self, cause: OrbitError) -> None:
        self.cause = cause

    async def ping(self, timeout_s: float) -> float:
        if not self.answers:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("a ping", timeout_s)
        return 0.0


class FakeIncoming:
    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.reason = ""
        self.admitted = False
        self.gone = False
        self.on_gone: Callable[[], None] = lambda: None

    def admit(self) -> Any:
        if self.gone:
            raise ClosedError("the connection")
        self.admitted = True
        return FakeLink()

    def refuse(self, reason: str, detail: str = "") -> None:
        self.reason = reason

    def watch(self, on_gone: Callable[[], None]) -> None:
        self.on_gone = on_gone

    @property
    def waits(self) -> bool:
        return not self.admitted and not self.reason


@dataclass
class Rig:
    """Counts dials; each waits for `gate` and then fails with `error` or opens a session."""

    settings: PeersSettings = field(default_factory=PeersSettings)
    runner: TaskRunner = field(default_factory=TaskRunner)
    starts: list[StartDial] = field(default_factory=list)
    links: list[FakeLink] = field(default_factory=list)
    sessions: list[FakeSession] = field(default_factory=list)
    error: OrbitError | None = None
    fails_once: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        ways = PeerWays(self.dial, self.begin, self.runner, random.Random(1))
        self.peers = Peers(OWN, ways, self.settings)

    @property
    def dials(self) -> int:
        return len(self.starts)

    async def dial(self, address: NodeAddress, start: StartDial) -> Any:
        self.starts.append(start)
        await self.gate.wait()
        if self.error is not None:
            error, self.error = self.error, None if self.fails_once else self.error
            raise error
        self.links.append(FakeLink())
        link: Any = self.links[-1]
        return OpenedLink(epoch(address.worker_id, start.attempt, address.incarnation), link)

    def begin(self, opened: OpenedLink, dialed: bool) -> Any:
        if self.closed:
            raise ClosedError("the node")
        self.sessions.append(FakeSession(opened, dialed))
        return self.sessions[-1]

    def lose(self, session: Any) -> None:
        session.cause = session.cause or PeerLost("peer", "reset")
        self.peers.session_closed(session)

    def offer(self, worker: int, attempt: bytes = b"p", **hello: Any) -> FakeIncoming:
        incoming = FakeIncoming(epoch(worker, attempt, **hello))
        self.peers.offer(incoming)
        return incoming


def epoch(worker: int, attempt: bytes, incarnation: int = 1, **changes: Any) -> Epoch:
    hello = Hello(1, 1, worker, incarnation, 0, attempt, b"n", **{"dial_number": 1} | changes)
    peer = PeerIdentity(WorkerId(worker), Incarnation(incarnation))
    return Epoch(peer, attempt, b"k", 1, hello, hello)


def address(worker: int, incarnation: int = 1) -> NodeAddress:
    endpoint = Endpoint("127.0.0.1", 1)
    return NodeAddress(WorkerId(worker), Incarnation(incarnation), (endpoint,))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_add_does_no_io_and_an_unknown_peer_is_a_usage_error(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.peers.add(address(2)) == PeerIdentity(WorkerId(2), Incarnation(1))
        assert rig.dials == 0
        with pytest.raises(UnknownPeer) as caught:
            await rig.peers.session(WorkerId(3))
        assert isinstance(caught.value, UsageError)
        assert "add_peer" in caught.value.hint

    run_async(main())


def test_a_thousand_users_share_one_dial(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        rig.gate.clear()
        users = [asyncio.ensure_future(rig.peers.session(LOW)) for _ in range(1000)]
        await asyncio.sleep(0)
        users[0].cancel()
        rig.gate.set()
        outcomes = await asyncio.gather(*users, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert len({id(session) for session in outcomes[1:]}) == 1
        assert await rig.peers.session(LOW) is outcomes[1]
        assert rig.peers.current(LOW) is outcomes[1]
        assert rig.dials == 1

    run_async(main())


def test_a_thousand_users_of_a_dead_peer_share_one_failure() -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        rig.error = PeerUnreachable("h:1", "refused")
        for _ in range(2):  # the second round falls into the back-off and does not dial
            outcomes = await asyncio.gather(
                *(rig.peers.session(LOW) for _ in range(500)), return_exceptions=True
            )
            assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)
        assert rig.dials == 1
        await asyncio.sleep(BACKOFF_FIRST_S)
        rig.error = None
        assert (await rig.peers.session(LOW)).dialed
        assert rig.dials == 2
        await settle()
        assert len(rig.runner) == 0

    run_virtual(main())


@pytest.mark.parametrize("reason", ["version", "auth", "wrong_peer"])
def test_a_refusal_that_lasts_is_not_asked_for_again_soon(reason: str) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        rig.error = PeerRefused(reason)
        for _ in range(10):
            with pytest.raises(PeerRefused):
                await rig.peers.session(LOW)
            await asyncio.sleep(BACKOFF_MAX_S / 30)
        assert rig.dials == 1

    run_virtual(main())


def test_a_mistake_in_the_dial_ends_the_wait_and_is_not_remembered(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        mistake: Any = ZeroDivisionError("a bug")
        rig.error = mistake
        with pytest.raises(OrbitError, match="a bug"):
            await rig.peers.session(LOW)
        rig.error = None
        await rig.peers.session(LOW)
        assert "a bug" in caplog.text

    run_async(main())


def test_a_peer_that_dialed_us_is_called_back_over_its_session(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        incoming = rig.offer(2, endpoints=("10.0.0.1:7", "0.0.0.0:7", "nonsense"))
        assert incoming.admitted
        session: Any = await rig.peers.session(LOW)
        assert not session.dialed
        assert session.endpoints == (("10.0.0.1", 7),)
        assert rig.peers.address(LOW).endpoints == (Endpoint("10.0.0.1", 7),)
        rig.lose(session)
        assert (await rig.peers.session(LOW)).dialed  # and dialed, once that is gone
        assert rig.starts[0].previous == b"p"

    run_async(main())


def test_without_an_endpoint_it_cannot_be_called_back_once_it_is_gone(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.offer(2)
        session: Any = await rig.peers.session(LOW)
        assert session.endpoints == ()
        rig.lose(session)
        with pytest.raises(UnknownPeer):
            await rig.peers.session(LOW)
        with pytest.raises(UnknownPeer):
            rig.peers.address(LOW)

    run_async(main())


def test_attempts_that_cross_leave_one_session(run_async: Run) -> None:
    async def main() -> None:
        for worker, ours in ((HIGH, True), (LOW, False)):
            rig = Rig()
            rig.peers.add(address(worker))
            rig.gate.clear()
            user = asyncio.ensure_future(rig.peers.session(worker))
            await settle()
            incoming = rig.offer(worker)
            await settle()
            assert incoming.waits is ours
            assert user.done() is not ours  # whoever has precedence serves at once
            if not ours:
                rig.error = PeerRefused(SUPERSEDED)
            rig.gate.set()
            session: Any = await user
            await settle()
            assert session.dialed is ours
            assert incoming.reason == (SUPERSEDED if ours else "")
            assert len(rig.sessions) == 1
            assert [s.cause for s in rig.sessions] == [None]
            assert list(rig.peers.sessions()) == [session]
            assert await rig.peers.session(worker) is session
            assert len(rig.runner) == 0

    run_async(main())


@pytest.mark.parametrize("how", ["fails", "is slow"])
def test_the_one_that_waits_is_taken_when_ours_comes_to_nothing(how: str) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(HIGH))
        rig.gate.clear()
        user = asyncio.ensure_future(rig.peers.session(HIGH))
        await settle()
        incoming = rig.offer(HIGH)
        if how == "fails":
            rig.error = PeerUnreachable("h:1", "silent")
            rig.gate.set()
        session = await user
        assert not session.dialed
        assert incoming.admitted
        await settle()
        assert len(rig.runner) == 0  # ours was given up
        assert asyncio.get_running_loop().time() == (0 if how == "fails" else 1)

    run_virtual(main())


def test_one_that_leaves_while_it_waits_is_forgotten(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(HIGH))
        rig.gate.clear()
        user = asyncio.ensure_future(rig.peers.session(HIGH))
        await settle()
        incoming = rig.offer(HIGH)
        incoming.gone = True
        incoming.on_gone()
        rig.gate.set()
        assert (await user).dialed
        assert incoming.waits
        late = rig.offer(LOW)
        late.gone = True
        assert await rig.peers.session(LOW)

    run_async(main())


def test_a_dialer_that_is_gone_at_its_welcome_leaves_nothing(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        incoming = FakeIncoming(epoch(2, b"p"))
        incoming.gone = True
        rig.peers.offer(incoming)
        assert rig.peers.current(LOW) is None
        assert not rig.sessions
        rig.peers.add(address(2))
        assert (await rig.peers.session(LOW)).dialed

    run_async(main())


def test_who_waits_for_it_is_served_by_another_dial(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(LOW))
        rig.gate.clear()
        user = asyncio.ensure_future(rig.peers.session(LOW))
        await settle()
        incoming = FakeIncoming(epoch(LOW, b"p"))
        incoming.gone = True  # and has precedence: it is to be admitted at once
        rig.peers.offer(incoming)
        rig.error, rig.fails_once = PeerRefused(SUPERSEDED), True
        rig.gate.set()
        assert (await user).dialed
        assert rig.dials == 2

    run_async(main())


def test_a_peer_that_lost_its_end_gets_a_new_session(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.offer(2, b"p1", dial_number=1)
        old = rig.sessions[0]
        newer = rig.offer(2, b"p2", dial_number=2, previous=b"p1")
        assert newer.admitted
        assert isinstance(old.cause, PeerLost)
        assert "superseded" in str(old.cause)
        assert (await rig.peers.session(LOW)).attempt == b"p2"
        rig.lose(old)  # the end of the old one changes nothing
        assert (await rig.peers.session(LOW)).attempt == b"p2"
        stale = rig.offer(2, b"p0", dial_number=1)
        assert stale.reason == SUPERSEDED

    run_async(main())


@pytest.mark.parametrize("alive", [True, False])
def test_without_a_secret_a_new_life_displaces_only_a_dead_session(alive: bool) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        old: Any = await rig.peers.session(LOW)
        old.answers = alive
        newer = rig.offer(2, incarnation=9)
        assert newer.waits
        assert await rig.peers.session(LOW) is old  # in use as ever
        await asyncio.sleep(1.5)
        if alive:
            assert newer.reason == SUPERSEDED
            assert rig.peers.address(LOW).incarnation == 1
            assert old.cause is None
        else:
            assert newer.admitted
            assert isinstance(old.cause, PeerRestarted)
            assert rig.peers.address(LOW).incarnation == 9
        assert len(rig.runner) == 0

    run_virtual(main())


def test_with_a_secret_a_new_life_is_served_at_once(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig(PeersSettings(authenticated=True))
        rig.peers.add(address(2))
        old: Any = await rig.peers.session(LOW)
        assert rig.offer(2, incarnation=9).admitted
        assert isinstance(old.cause, PeerRestarted)
        new: Any = await rig.peers.session(LOW)
        assert new.peer.incarnation == 9
        assert new.endpoints == (("127.0.0.1", 1),)  # it came back to its old address
        rig.lose(old)
        rig.lose(new)
        await rig.peers.session(LOW)
        assert rig.sessions[-1].peer.incarnation == 9

    run_async(main())


def test_an_older_peer_that_uses_only_what_it_dialed_gets_its_way(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        await rig.peers.session(LOW)
        assert rig.offer(2, dial_number=0).admitted
        assert not (await rig.peers.session(LOW)).dialed

    run_async(main())


def test_a_new_address_ends_the_old_life_and_its_back_off(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        old: Any = await rig.peers.session(LOW)
        rig.peers.add(address(2))  # the same life: nothing changes
        assert await rig.peers.session(LOW) is old
        rig.peers.add(address(2, incarnation=9))
        assert isinstance(old.cause, PeerRestarted)
        assert (await rig.peers.session(LOW)).peer.incarnation == 9
        assert rig.dials == 2

    run_async(main())


def test_a_dial_to_a_life_that_was_replaced_meanwhile_is_given_up(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        rig.gate.clear()
        early = asyncio.ensure_future(rig.peers.session(LOW))
        await settle()
        rig.peers.add(address(2, incarnation=9))
        with pytest.raises(PeerRestarted):
            await early
        rig.gate.set()
        assert (await rig.peers.session(LOW)).peer.incarnation == 9
        assert [s.peer.incarnation for s in rig.sessions] == [9]

    run_async(main())


def test_a_closed_session_is_dialed_again(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        rig.lose(await rig.peers.session(LOW))
        assert not list(rig.peers.sessions())
        assert (await rig.peers.session(LOW)).dialed
        assert [start.number for start in rig.starts] == [1, 2]
        assert rig.starts[1].previous == rig.starts[0].attempt

    run_async(main())


def test_nothing_begins_after_close(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        for worker in (LOW, HIGH):
            rig.peers.add(address(worker))
        rig.gate.clear()
        waiting = asyncio.ensure_future(rig.peers.session(HIGH))
        await settle()
        parked = rig.offer(HIGH)
        rig.peers.close()
        with pytest.raises(ClosedError):
            await waiting
        assert parked.reason == "closing"
        with pytest.raises(ClosedError):
            await rig.peers.session(LOW)
        assert rig.offer(7).reason == "closing"
        rig.gate.set()
        await settle()
        assert not rig.sessions
        assert rig.dials == 1
        assert len(rig.runner) == 0

    run_async(main())


def test_a_node_that_begins_no_more_sessions_tells_who_waits(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        rig.peers.add(address(2))
        rig.closed = True
        with pytest.raises(ClosedError):
            await rig.peers.session(LOW)
        assert rig.peers.current(LOW) is None

    run_async(main())


def test_strangers_by_any_number_of_names_are_forgotten(
    run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(peers_module, "LEARNED_MAX", 3)
        rig = Rig()
        rig.peers.add(address(2))
        for worker in range(10, 20):
            rig.offer(worker, b"%d" % worker, endpoints=("10.0.0.1:7",))
            rig.lose(rig.sessions[-1])
        known = [w for w in range(2, 20) if w in rig.peers._peers]
        assert known == [2, 17, 18, 19]

    run_async(main())


def test_the_own_address_is_no_peer(run_async: Run) -> None:
    async def main() -> None:
        rig = Rig()
        assert rig.peers.add(address(5)) == PeerIdentity(WorkerId(5), Incarnation(1))
        with pytest.raises(UnknownPeer):
            rig.peers.address(WorkerId(5))

    run_async(main())
