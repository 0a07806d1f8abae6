"""What a check finds, kind by kind."""

from __future__ import annotations

import pytest

from orbit.errors import (
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
)
from orbit.model import PathName
from orbit.runtime.messaging.health import HealthChecks, HealthKind
from orbit.testing.clock import run_virtual
from tests.unit.runtime.messaging.callers import FakeCaller, FakeSession


def test_an_open_link_is_asked_itself() -> None:
    async def main() -> None:
        caller = FakeCaller()
        caller.add_route(2)
        health = await HealthChecks(caller).check(2, 5.0)
        assert (health.kind, health.rtt_s) == (HealthKind.OK, 0.25)
        assert health.transport is PathName.TCP
        assert health.reachable

    run_virtual(main())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (DeadlineExceeded("ping", 1.0), HealthKind.TIMEOUT),
        (60.0, HealthKind.TIMEOUT),
        (PeerLost("2", "reset"), HealthKind.CONNECTION_FAILED),
    ],
)
def test_a_link_that_does_not_answer(answer: float | OrbitError, kind: HealthKind) -> None:
    async def main() -> None:
        caller = FakeCaller()
        _, link = caller.add_route(2)
        link.ping_answer = answer
        health = await HealthChecks(caller).check(2, 1.0)
        assert health.kind is kind
        assert health.rtt_s is None
        assert health.detail
        assert not health.reachable

    run_virtual(main())


def test_without_a_link_the_control_connection_answers_for_the_peer() -> None:
    async def main() -> None:
        caller = FakeCaller()
        caller.sessions[2] = FakeSession(2)
        checks = HealthChecks(caller)
        first = await checks.check(2, 5.0)
        assert first.kind is HealthKind.NEVER_CONNECTED
        assert first.rtt_s == pytest.approx(0.5)
        assert first.transport is None
        assert first.reachable
        _, link = caller.add_route(2)
        checks.link_opened(caller.open_routes[0].peer)
        assert (await checks.check(2, 5.0)).kind is HealthKind.OK
        link.closed = True  # as idle: the peer is as healthy as before
        assert (await checks.check(2, 5.0)).kind is HealthKind.OK
        link.closed = False
        link.ping_answer = ClosedError("the link")  # closed while it was asked
        assert (await checks.check(2, 5.0)).kind is HealthKind.OK

    run_virtual(main())


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (None, HealthKind.PEER_NOT_REGISTERED),
        (PeerUnreachable("h:1", "refused"), HealthKind.CONNECTION_FAILED),
        (PeerUnreachable("h:1", "timeout"), HealthKind.TIMEOUT),
        (PeerUnreachable("h:1", "silent"), HealthKind.TIMEOUT),
        (PeerRefused("wrong_secret"), HealthKind.CONNECTION_FAILED),
    ],
)
def test_a_peer_that_cannot_be_reached(outcome: OrbitError | None, kind: HealthKind) -> None:
    async def main() -> None:
        caller = FakeCaller()
        if outcome is not None:
            caller.sessions[2] = outcome
        health = await HealthChecks(caller).check(2, 5.0)
        assert health.kind is kind
        assert health.detail

    run_virtual(main())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (30.0, HealthKind.TIMEOUT),
        (DeadlineExceeded("call", 1.0), HealthKind.TIMEOUT),
        (PeerLost("2", "reset"), HealthKind.CONNECTION_FAILED),
    ],
)
def test_a_control_connection_that_does_not_answer(
    answer: float | OrbitError, kind: HealthKind
) -> None:
    async def main() -> None:
        caller = FakeCaller()
        session = caller.sessions[2] = FakeSession(2)
        session.answer = answer
        assert (await HealthChecks(caller).check(2, 1.0)).kind is kind

    run_virtual(main())


def test_the_own_node_is_healthy() -> None:
    async def main() -> None:
        health = await HealthChecks(FakeCaller()).check(1, 1.0)
        assert (health.kind, health.transport) == (HealthKind.OK, PathName.LOCAL)

    run_virtual(main())
