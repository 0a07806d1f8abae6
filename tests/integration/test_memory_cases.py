"""The cases of registered memory on this host: over TCP, and over RDMA on scripted devices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit import node as node_module
from tests.integration.test_rendezvous_scenarios import KINDS, fakes
from tests.scenarios.key_cases import KEY_CASES
from tests.scenarios.memory_cases import CASES, IN_PARTS
from tests.scenarios.rig import MIB, Devices, Scenario, open_rig

__all__ = ["fakes"]


def run(scenario: Scenario, devices: Devices) -> None:
    async def main() -> None:
        async with open_rig(devices) as rig:
            await scenario(rig)
            for node in (rig.owner, rig.consumer):
                assert node.statistics().leases_held == 0

    asyncio.run(main())


@KINDS
@pytest.mark.parametrize("scenario", CASES + KEY_CASES, ids=lambda scenario: scenario.__name__)
def test_case(scenario: Scenario, devices: Devices) -> None:
    run(scenario, devices)


@KINDS
@pytest.mark.parametrize("scenario", IN_PARTS, ids=lambda scenario: scenario.__name__)
def test_in_parts(scenario: Scenario, devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = node_module._rdma_path_config
    monkeypatch.setattr(
        node_module, "_rdma_path_config", lambda config: replace(real(config), mr_bytes_max=MIB)
    )
    run(scenario, devices)
