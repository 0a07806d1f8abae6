"""The contract of helper and provider on real devices: host A's reads host B's across the link."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.async_events import AsyncEvent, AsyncEventKind
from orbit.verbs.provider import NativeContext, QueuePairCaps
from orbit.verbs.turn import pack_read
from tests.contract.poller_suite import PollerContract
from tests.contract.shared_receive_suite import (
    AsyncEventContract,
    LimitEventContract,
    SharedReceiveContract,
    next_event,
)
from tests.contract.turn_rig import PATIENCE_S, Rig, closing, made_rig
from tests.contract.turn_suite import BindContract, QueueContract, TurnContract, readable
from tests.softroce.conftest import Lab


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from opened()


def opened(**options: int) -> Iterator[Rig]:
    provider = PyverbsProvider()
    source = "rxb1" if "rxb1" in provider.devices() else provider.devices()[0]
    # rdma_rxe checks the range of a window's parent only.
    yield from closing(
        made_rig(provider, provider.devices()[0], provider, source, False, **options)
    )


class TestTurnOnADevice(TurnContract):
    pass


class TestBindOnADevice(BindContract):
    pass


class TestQueuesOnADevice(QueueContract):
    pass


class TestSharedReceivesOnADevice(SharedReceiveContract):
    pass


class TestLimitEventsOnADevice(LimitEventContract):
    pass


class TestAsyncEventsOnADevice(AsyncEventContract):
    pass


class TestPollersOnADevice(PollerContract):
    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        """A thread that polls takes a processor from the device, so that retries take longer."""
        yield from opened(timeout=17)


def test_a_port_that_goes_and_comes_is_told(lab: Lab) -> None:
    context = PyverbsProvider().open(lab.devices("B")[0])
    try:
        for state, kind in (("down", AsyncEventKind.PORT_ERR), ("up", AsyncEventKind.PORT_ACTIVE)):
            subprocess.run(["orbit-link", "b1", state], check=True)
            assert kind in kinds_until(context, kind)
    finally:
        context.close()


def kinds_until(context: NativeContext, kind: AsyncEventKind) -> list[AsyncEventKind]:
    """Addresses that go with a link are told as well."""
    kinds: list[AsyncEventKind] = []
    while kind not in kinds:
        assert readable(context.async_fd, PATIENCE_S), kinds
        event = context.next_async_event()
        if event is not None:
            assert event.port == 1
            kinds.append(event.kind)
    return kinds


def test_an_overrun_is_told_and_the_queue_still_ends(rig: Rig) -> None:
    """One event for each completion that rdma_rxe lost. An event that was not acknowledged would
    hold the destroy up for ever."""
    a = rig.a
    small = a.context.create_cq(7, a.channel)
    qp = a.domain.create_queue_pair(small, small, QueuePairCaps(32, 4))
    peer = rig.b.new_qp()
    rig.connect(qp, peer)
    a.post(*(pack_read(i, a.address, a.region.lkey, 0, rig.b.address, 0) for i in range(12)), qp=qp)
    for _ in range(5):
        assert next_event(a) == AsyncEvent(AsyncEventKind.CQ_ERR, small.native)
    assert [done.wr_id for done in a.turn.poll(small.native)] == list(range(7))
    for thing in (qp, peer, small):
        thing.close()
