"""What an engine makes of a machine with two memory nodes and a rail on each: run inside it by
test_numa.py, and prints its findings as one line of JSON.

Both engines have the same two devices, so that each rail's peer is the rail itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orbit
from tests.scenarios.engine_rig import MIB, Devices, filled, open_engines

RAILS = Devices(("rxe0", "rxe1"), ("rxe0", "rxe1"))
NODE = orbit.NodeConfig(rdma=orbit.RdmaConfig(device_timeout_s=20.0))


async def chosen(preferred: int) -> dict[str, Any]:
    """A READ for memory on that node."""
    knobs = {"preferred_numa_node": preferred}
    async with open_engines(RAILS, {}, knobs, node=NODE) as rig:
        data, into = filled(MIB), bytearray(MIB)
        async with (
            await rig.source.register(data, access="read") as region,
            await rig.requester.register(into, access="local") as local,
        ):
            batch = rig.requester.submit([rig.request("read", local, region.remote())])
            (result,) = await batch
        rails = rig.requester.statistics().rails
        assert rails is not None
        return {
            "same": into == data,
            "rails": sorted(result.rails),
            "reasons": list(batch.explanation()[0].reasons),
            "nodes": {facts.device: facts.numa_node for facts in rails.rails},
            "distances": {facts.device: dict(facts.numa_distances) for facts in rails.rails},
        }


def main() -> None:
    found = {str(preferred): asyncio.run(chosen(preferred)) for preferred in (0, 1)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
