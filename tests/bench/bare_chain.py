"""READs and WRITEs on one plain RC queue pair, without windows, grants or an event loop: what the
grant protocol is compared with. Each end is a process that answers one JSON line with another.

The source's memory is registered for remote access as a whole. Pieces and bytes in flight are those
of the engine, and so is how completions are waited for: asleep on the channel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
from owner import say

from orbit.memory.buffer import address_of
from orbit.verbs import records
from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.provider import QueuePairCaps
from orbit.verbs.queue_pair import LocalEnd, RemoteEnd, connect_steps
from orbit.verbs.settings import INFLIGHT_BYTES, PIECE_BYTES, RdmaPathConfig

PORT, PSN, DEPTH = 1, 7, 64
WAIT_US = 20_000_000
ACCESS = records.ACCESS_LOCAL_WRITE | records.ACCESS_REMOTE_READ | records.ACCESS_REMOTE_WRITE


class End:
    """One queue pair and one registered buffer."""

    def __init__(self, device: str, size: int) -> None:
        provider = PyverbsProvider()
        self.turn = provider.turn
        self.memory = np.resize(np.arange(251, dtype=np.uint8), size)
        self.address = address_of(self.memory.data)
        self.context = provider.open(device)
        domain = self.context.allocate_domain()
        self.channel = self.context.create_channel()
        self.cq = self.context.create_cq(2 * DEPTH, self.channel)
        self.region = domain.register(self.address, size, ACCESS)
        self.pair = domain.create_queue_pair(self.cq, self.cq, QueuePairCaps(DEPTH, 1))
        rows = self.context.gid_entries(PORT)
        self.gid = next(row for row in rows if row.gid.startswith("::ffff:"))

    @property
    def offer(self) -> dict[str, Any]:
        return {
            "gid": self.gid.gid,
            "qpn": self.pair.qp_num,
            "address": self.address,
            "rkey": self.region.rkey,
        }

    def connect(self, peer: dict[str, Any]) -> None:
        mtu, lid = self.context.port(PORT).mtu, 0
        local = LocalEnd(PORT, self.gid.index, 0, PSN, remote_read=True, remote_write=True)
        remote = RemoteEnd(peer["gid"], lid, peer["qpn"], PSN, mtu, RdmaPathConfig().rd_atomic)
        for step in connect_steps(local, remote, RdmaPathConfig()):
            self.pair.modify(step)

    def move(self, op: str, size: int, peer: dict[str, Any]) -> float:
        """Seconds."""
        pack = records.pack_read if op == "read" else records.pack_write
        begin = time.perf_counter()
        posted = done = 0
        sizes: list[int] = []
        while done < size:
            chain = []
            while posted < size and posted - done < INFLIGHT_BYTES:
                nbytes = min(PIECE_BYTES, size - posted)
                where = (self.address + posted, self.region.lkey, nbytes)
                chain.append(pack(len(sizes), *where, peer["address"] + posted, peer["rkey"]))
                sizes.append(nbytes)
                posted += nbytes
            if chain:
                self.turn.post_send(self.pair.native, chain)
            found = self.turn.wait(self.cq.native, self.channel.native, 0, WAIT_US)
            if not found or any(completion.status for completion in found):
                raise SystemExit(f"bare {op}: {found or 'nothing completes'}")
            done += sum(sizes[completion.wr_id] for completion in found)
            self.turn.drain_events(self.channel.native, self.cq.native)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", type=int, required=True)
    args = parser.parse_args()
    end = End(args.device, args.size)
    peer: dict[str, Any] = {}
    say(end.offer)
    for line in sys.stdin:
        command = json.loads(line)
        if "connect" in command:
            peer = command["connect"]
            end.connect(peer)
            say({})
        else:
            op, size = command["op"], command["size"]
            say({"seconds": [end.move(op, size, peer) for _ in range(command["rounds"])]})


if __name__ == "__main__":
    main()
