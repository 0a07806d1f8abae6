"""The contract of helper and provider on real devices: host A's reads host B's across the link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orbit.verbs._pyverbs import PyverbsProvider
from tests.contract.turn_rig import Rig, closing, made_rig
from tests.contract.turn_suite import BindContract, QueueContract, TurnContract


@pytest.fixture
def rig() -> Iterator[Rig]:
    provider = PyverbsProvider()
    source = "rxb1" if "rxb1" in provider.devices() else provider.devices()[0]
    # rdma_rxe checks the range of a window's parent only.
    yield from closing(made_rig(provider, provider.devices()[0], provider, source, False))


class TestTurnOnADevice(TurnContract):
    pass


class TestBindOnADevice(BindContract):
    pass


class TestQueuesOnADevice(QueueContract):
    pass
