"""A process that imports orbit, moves bytes by TCP and asks for RDMA, on whatever verbs library it
finds; what it saw, as JSON. The argument "without-pyverbs" hides that package from it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

SIZE = 1_000_003


def loaded() -> list[str]:
    """The libraries of verbs that are mapped, by name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {Path(line.split()[-1]).name for line in lines if ".so" in line}
    return sorted(name for name in names if "ibverbs" in name or "_native" in name)


async def moved(transport: str) -> dict[str, Any]:
    """By an engine whose node was told nothing of transports."""
    import orbit
    from orbit.testing.pattern import pattern

    async with orbit.TransferEngine() as source, orbit.TransferEngine() as requester:
        there = await source.register(bytearray(pattern(SIZE)), "read")
        into = bytearray(SIZE)
        here = await requester.register(into)
        await requester.open_peer(source.address)
        request = orbit.TransferRequest("read", here, there.remote(), transport, 20.0)
        try:
            await requester.submit(request)
        except orbit.PathUnavailable as error:
            return {"reason": error.reason, "detail": error.detail}
        return {"right": into == pattern(SIZE)}


async def demanded() -> str:
    """The error of a node that needs RDMA."""
    import orbit

    try:
        await orbit.Node(orbit.NodeConfig(transport="rdma")).open()
    except orbit.OrbitError as error:
        return f"{type(error).__name__}: {error}"
    return "it opened"


def main() -> None:
    if "without-pyverbs" in sys.argv:
        sys.modules["pyverbs"] = None  # type: ignore[assignment]
    seen: dict[str, Any] = {}
    import orbit

    seen["after import"] = loaded(), "pyverbs" in sys.modules and bool(sys.modules["pyverbs"])
    seen["pyverbs"] = importlib.util.find_spec("pyverbs") is not None
    seen["available"] = orbit.available().rdma
    seen["after looking"] = loaded()
    seen["tcp"] = asyncio.run(moved("tcp"))
    seen["rdma"] = asyncio.run(moved("rdma"))
    seen["demand"] = asyncio.run(demanded())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
