"""Message links over RC queue pairs of the scripted device against their contract: by the
specification and in rxe mode, woken by events, spinning and by a polling thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from orbit.testing.message_link_contract import MESSAGE_LINK_CASES, check_message_link
from orbit.verbs.messaging.settings import RdmaMessagesConfig
from orbit.verbs.offload import Offload
from orbit.verbs.scripted import ScriptedDevice, ScriptedFabric, ScriptedProvider
from tests.contract.message_pairs import QUICK, MessagePair, join, open_side
from tests.contract.rdma_link_rig import RdmaLinkRig
from tests.contract.rdma_pairs import rail_of

# Every value of each parameter, and most pairs of them once.
VARIANTS = [
    pytest.param("asyncio", False, "event", id="asyncio-specification-event"),
    pytest.param("uvloop", True, "event", id="uvloop-rxe-event"),
    pytest.param("asyncio", True, "spin", id="asyncio-rxe-spin"),
    pytest.param("uvloop", False, "polling", id="uvloop-specification-polling"),
]


@contextlib.asynccontextmanager
async def scripted_rig(config: RdmaMessagesConfig, *, rxe: bool) -> AsyncIterator[RdmaLinkRig]:
    fabric = ScriptedFabric(rxe=rxe)
    devices = fabric.add_device("fake_a"), fabric.add_device("fake_b")

    async def open_pair(left: RdmaMessagesConfig, right: RdmaMessagesConfig) -> MessagePair:
        offload = Offload()
        sides = [
            await open_side(
                ScriptedProvider(fabric, [device.name]),
                rail_of(device),
                own,
                offload,
                dialer=device is devices[0],
            )
            for device, own in zip(devices, (left, right), strict=True)
        ]
        join(sides[0], sides[1], limits=[left.limits, right.limits])
        return MessagePair(sides[0], sides[1])

    rig = RdmaLinkRig(config, open_pair, lambda: not_ready(devices))
    try:
        yield rig
    finally:
        await rig.close()
    for device in devices:
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters


def not_ready(devices: tuple[ScriptedDevice, ...]) -> int:
    return sum(device.counters().receiver_not_ready for device in devices)


@pytest.mark.parametrize("case", MESSAGE_LINK_CASES)
@pytest.mark.parametrize(("loop_kind", "rxe", "progress"), VARIANTS)
def test_scripted(case: str, rxe: bool, progress: str, run_async: Callable[..., Any]) -> None:
    config = replace(QUICK, progress=progress)
    run_async(check_message_link(case, lambda: scripted_rig(config, rxe=rxe)))
