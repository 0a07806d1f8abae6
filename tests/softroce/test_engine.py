"""The engine's scenarios between the two hosts' rails of the lab."""

from __future__ import annotations

import asyncio

import pytest

from tests.scenarios.engine import OWN, SHARED
from tests.scenarios.engine_rig import EngineScenario
from tests.soak import SOAK
from tests.softroce.engine_pairs import SharedPair, engines


@pytest.mark.parametrize("scenario", SHARED, ids=lambda scenario: scenario.__name__)
def test_shared(scenario: EngineScenario, engine_pair: SharedPair) -> None:
    engine_pair.run(scenario)


@pytest.mark.parametrize("name", OWN)
def test_own(name: str) -> None:
    needs = OWN[name]

    async def main() -> None:
        async with engines(needs.source, needs.requester) as rig:
            await (needs.run if SOAK or needs.brief is None else needs.brief)(rig)

    asyncio.run(main())
