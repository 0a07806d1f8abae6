"""The scripted device in both of its modes, as two endpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orbit.verbs.scripted import ScriptedProvider
from orbit.verbs.scripted_fabric import ScriptedFabric
from tests.contract.turn_rig import Rig, closing, made_rig


@pytest.fixture(params=[False, True], ids=["specification", "rxe"])
def fabric(request: pytest.FixtureRequest) -> ScriptedFabric:
    fabric = ScriptedFabric(rxe=request.param)
    fabric.add_device("fakea1")
    fabric.add_device("fakeb1")
    return fabric


@pytest.fixture
def rig(fabric: ScriptedFabric) -> Iterator[Rig]:
    provider = ScriptedProvider(fabric)
    made = made_rig(provider, "fakea1", provider, "fakeb1", not fabric.rxe)
    yield from closing(made)
    for device in fabric.devices.values():
        assert device.counters().live_objects == 0
        assert not device.counters().misuse
        assert not device.panicked
