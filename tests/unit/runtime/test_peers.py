"""The address book: one dial at a time, shared errors, newer lives replace older ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from orbit.errors import (
    ClosedError,
    OrbitError,
    PeerRestarted,
    PeerUnreachable,
    UnknownPeer,
    UsageError,
)
from orbit.model import Incarnation, PeerIdentity, WorkerId
from orbit.protocol.address import NodeAddress
from orbit.protocol.endpoint import Endpoint
from orbit.runtime.peers import BACKOFF_FIRST_S, Peers
from orbit.runtime.runner import TaskRunner
from orbit.testing.clock import run_virtual

Run = Callable[[Any], Any]
OWN = PeerIdentity(WorkerId(1), Incarnation(1))


class FakeSession:
    def __init__(self, peer: PeerIdentity) -> None:
        self.peer = peer
        self.closed = False
        self.cause: OrbitError | None = None

    def abort(self, cause: OrbitError | None = None) -> None:
        self.closed = True
        self.cause = cause


class Dialer:
    """Counts dials; each waits for `gate` and then fails with `error` or opens a session."""

    def __init__(self) -> None:
        self.dials = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: OrbitError | None = None

    async def __call__(self, address: NodeAddress) -> Any:
        self.dials += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return FakeSession(PeerIdentity(address.worker_id, address.incarnation))


def address(worker: int, incarnation: int = 1) -> NodeAddress:
    endpoint = Endpoint("127.0.0.1", 1)
    return NodeAddress(WorkerId(worker), Incarnation(incarnation), (endpoint,))


def make() -> tuple[Peers, Dialer, TaskRunner]:
    dialer, runner = Dialer(), TaskRunner()
    return Peers(OWN, dialer, runner, random.Random(1)), dialer, runner


def test_add_does_no_io_and_an_unknown_peer_is_a_usage_error(run_async: Run) -> None:
    async def main() -> None:
        peers, dialer, _ = make()
        assert peers.add(address(2)) == PeerIdentity(WorkerId(2), Incarnation(1))
        assert dialer.dials == 0
        with pytest.raises(UnknownPeer) as caught:
            await peers.session(WorkerId(3))
        assert isinstance(caught.value, UsageError)
        assert "add_peer" in caught.value.hint

    run_async(main())


def test_a_thousand_users_share_one_dial(run_async: Run) -> None:
    async def main() -> None:
        peers, dialer, _ = make()
        peers.add(address(2))
        dialer.gate.clear()
        users = [asyncio.ensure_future(peers.session(WorkerId(2))) for _ in range(1000)]
        await asyncio.sleep(0)
        users[0].cancel()
        dialer.gate.set()
        outcomes = await asyncio.gather(*users, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert len({id(session) for session in outcomes[1:]}) == 1
        assert await peers.session(WorkerId(2)) is outcomes[1]
        assert dialer.dials == 1

    run_async(main())


def test_a_thousand_users_of_a_dead_peer_share_one_failure() -> None:
    async def main() -> None:
        peers, dialer, runner = make()
        peers.add(address(2))
        dialer.error = PeerUnreachable("h:1", "refused")
        for _ in range(2):  # the second round falls into the back-off and does not dial
            outcomes = await asyncio.gather(
                *(peers.session(WorkerId(2)) for _ in range(500)), return_exceptions=True
            )
            assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)
        assert dialer.dials == 1
        await asyncio.sleep(BACKOFF_FIRST_S)
        dialer.error = None
        assert not (await peers.session(WorkerId(2))).closed
        assert dialer.dials == 2
        assert len(runner) == 0

    run_virtual(main())


def test_a_new_address_ends_the_old_life_and_its_back_off(run_async: Run) -> None:
    async def main() -> None:
        peers, dialer, _ = make()
        peers.add(address(2))
        old: Any = await peers.session(WorkerId(2))
        peers.add(address(2))  # the same life: nothing changes
        assert await peers.session(WorkerId(2)) is old
        peers.add(address(2, incarnation=9))
        assert isinstance(old.cause, PeerRestarted)
        assert (await peers.session(WorkerId(2))).peer.incarnation == 9
        assert dialer.dials == 2

    run_async(main())


def test_a_dial_to_a_life_that_was_replaced_meanwhile_is_discarded(run_async: Run) -> None:
    async def main() -> None:
        peers, dialer, _ = make()
        peers.add(address(2))
        dialer.gate.clear()
        early = asyncio.ensure_future(peers.session(WorkerId(2)))
        await asyncio.sleep(0)
        peers.add(address(2, incarnation=9))
        dialer.gate.set()
        with pytest.raises(PeerRestarted):
            await early
        assert (await peers.session(WorkerId(2))).peer.incarnation == 9

    run_async(main())


def test_a_closed_session_is_dialed_again(run_async: Run) -> None:
    async def main() -> None:
        peers, dialer, _ = make()
        peers.add(address(2))
        (await peers.session(WorkerId(2))).abort()
        assert not list(peers.sessions())
        assert not (await peers.session(WorkerId(2))).closed
        assert dialer.dials == 2

    run_async(main())


def test_no_dial_after_close_and_a_late_one_is_dropped(run_async: Run) -> None:
    async def main() -> None:
        peers, dialer, _ = make()
        peers.add(address(2))
        dialer.gate.clear()
        waiting = asyncio.ensure_future(peers.session(WorkerId(2)))
        await asyncio.sleep(0)
        peers.close()
        dialer.gate.set()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await peers.session(WorkerId(2))
        assert dialer.dials == 1

    run_async(main())


def test_the_own_address_is_no_peer(run_async: Run) -> None:
    async def main() -> None:
        peers, _, _ = make()
        assert peers.add(address(1)) == OWN
        with pytest.raises(UnknownPeer):
            peers.address(WorkerId(1))

    run_async(main())
