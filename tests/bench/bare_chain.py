"""READs and WRITEs on one plain RC queue pair, without windows, grants or an event loop: what the
grant protocol is compared with. Each end is a process that answers one JSON line with another.

The chain is that of `orbit bench`; the memory of each end is open to the other for both directions.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
from owner import say

from orbit.bench.baselines.asking import Work
from orbit.bench.baselines.chain_end import ChainEnd, open_provider
from orbit.bench.baselines.chain_moves import Mover
from orbit.bench.plan import Verb
from orbit.protocol.messages import RailHint
from orbit.verbs import records
from orbit.verbs.discovery import read_gids

PORT, MTU = 1, 1024  # the opened port's own MTU replaces it
ACCESS = records.ACCESS_REMOTE_READ | records.ACCESS_REMOTE_WRITE


class End(ChainEnd):
    """`memory` begins with a pattern."""

    def __init__(self, device: str, size: int) -> None:
        gid = next(row for row in read_gids(device, PORT) if row.gid.startswith("::ffff:"))
        rail = RailHint(device, PORT, gid.gid, gid.index, MTU)
        super().__init__(open_provider(), rail, size, ACCESS)
        self.memory[:size] = np.resize(np.arange(251, dtype=np.uint8), size).data

    def connect(self, peer: dict[str, Any]) -> None:
        self._target = super().connect(peer, initiator=True)

    def move(self, op: str, size: int) -> float:
        """Seconds."""
        work = Work(Verb(op), size, batch=1, inflight=1, ops=1, warmup=0)
        return Mover(self, self._target, work).move(1).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", type=int, required=True)
    args = parser.parse_args()
    end = End(args.device, args.size)
    say(end.offer)
    for line in sys.stdin:
        command = json.loads(line)
        if "connect" in command:
            end.connect(command["connect"])
            say({})
        else:
            op, size = command["op"], command["size"]
            say({"seconds": [end.move(op, size) for _ in range(command["rounds"])]})


if __name__ == "__main__":
    main()
