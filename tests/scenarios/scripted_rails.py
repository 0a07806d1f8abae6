"""Scripted devices under whole nodes: what a configuration names is opened on a fabric of fakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orbit.protocol.messages import RailHint
from orbit.verbs import opening
from orbit.verbs.scripted import ScriptedFabric, ScriptedProvider
from orbit.verbs.settings import RdmaPathConfig

QUICK = {
    "connect_backoff_s": 0.05,
    "receipt_timeout_s": 0.5,
    "bind_timeout_s": 0.5,
    "drain_timeout_s": 0.5,
}


@contextlib.contextmanager
def scripted_rails(
    names: Sequence[str], chosen: Callable[[RdmaPathConfig], Sequence[str]]
) -> Iterator[None]:
    """`chosen` tells which of the devices `names` a node's configuration asks for. Afterwards they
    were used as they may be, and hold nothing.
    """
    fabric = ScriptedFabric()
    devices = {name: fabric.add_device(name) for name in names}
    real = opening.open_rdma_path

    async def open_scripted(provider: Any, config: RdmaPathConfig, **_: Any) -> Any:
        mine = chosen(config)
        rails = [RailHint(name, 1, devices[name].gids[1], 1, 4096) for name in mine]
        quick = replace(config, **QUICK)
        return await real(ScriptedProvider(fabric, mine), quick, rails=rails)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "open_rdma_path", open_scripted)
        yield
    for device in devices.values():
        counters = device.counters()
        assert not counters.misuse, counters
        assert counters.live_objects == 0, counters
