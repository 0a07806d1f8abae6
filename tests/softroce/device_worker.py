"""What a process finds of the devices of host B, given or not given what it needs for them: run by
test_engine_devices.py, and prints it as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import orbit
from orbit.verbs.discovery import discover

RDMA = orbit.RdmaConfig(device_timeout_s=20.0, whitelist=("rxb1", "rxb2"))
PLAIN_USER = 1000


async def found() -> dict[str, Any]:
    config = orbit.EngineConfig(node=orbit.NodeConfig(rdma=RDMA))
    async with orbit.TransferEngine(config) as engine:
        rails = engine.statistics().rails
        paths = engine.node._open().parts().paths
        return {
            "verdicts": {d.name: d.verdict.value for d in discover().devices},
            "rails": [facts.device for facts in rails.rails] if rails else [],
            "reason": paths.rdma_reason.value,
            "detail": paths.rdma_detail,
        }


def main() -> None:
    if "plain" in sys.argv:
        os.setgroups([])
        os.setresgid(PLAIN_USER, PLAIN_USER, PLAIN_USER)
        os.setresuid(PLAIN_USER, PLAIN_USER, PLAIN_USER)
    print(json.dumps(asyncio.run(found())))


if __name__ == "__main__":
    main()
