"""The kill switch of the RDMA path is read once, when a node opens."""

from __future__ import annotations

import asyncio
import os
from typing import ClassVar

import pytest

import orbit
from orbit.config import KILL_SWITCH

TCP = orbit.NodeConfig(transport="tcp")


@pytest.mark.parametrize(
    ("text", "enabled"),
    [("1", False), ("True", False), ("YES", False), ("on", False), ("0", True), ("ture", True)],
)
def test_a_node_keeps_what_it_read_when_it_opened(
    text: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setenv(KILL_SWITCH, text)
        async with orbit.Node(TCP) as first:
            monkeypatch.setenv(KILL_SWITCH, "1" if enabled else "0")
            async with orbit.Node(TCP) as second:
                monkeypatch.delenv(KILL_SWITCH)
                handle = await first.register_data_pinned(bytes(100_000))
                second.add_peer(first.address)
                data, lease = await second.get(handle)
                assert len(data) == 100_000
                await second.release(handle, lease)
                found = [n._config.rendezvous.enabled for n in (first, second)]
        assert found == [enabled, not enabled]

    asyncio.run(main())


def test_an_open_node_never_looks_at_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sealed:
        """Stands for os.environ as orbit.config sees it."""

        environ: ClassVar = dict(os.environ)

    monkeypatch.setattr("orbit.config.os", Sealed)

    async def main() -> None:
        async with orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            del Sealed.environ
            handle = await owner.register_data_pinned(bytes(100_000))
            consumer.add_peer(owner.address)
            _, lease = await consumer.get(handle)
            await consumer.release(handle, lease)
            owner.handler("f", lambda message: None)
            await consumer.sync(owner.identity, "f")

    asyncio.run(main())
