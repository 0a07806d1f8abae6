"""Round trips by bare pyverbs, without any layer of orbit: what a link over it is compared with.

`serve` and `run` exchange their queue pair numbers over a TCP socket and then bounce one SEND. The
progress mode is `spin` (poll in a Python loop) or `event` (arm, asyncio reader, drain).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time

import pyverbs.enums as e
from figures import report
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

RECEIVES = 32
SLAB = 8192


class End:
    def __init__(self, device: str, size: int) -> None:
        self.size = size
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.channel = CompChannel(self.context)
        self.cq = CQ(self.context, 4 * RECEIVES, None, self.channel, 0)
        cap = QPCap(RECEIVES, RECEIVES, 1, 1, 256)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = QP(self.pd, init)
        self.mr = MR(self.pd, SLAB * (RECEIVES + 1), e.IBV_ACCESS_LOCAL_WRITE)
        inline = e.IBV_SEND_INLINE if size <= 256 else 0
        self.send_wr = SendWR(
            wr_id=1 << 32,
            opcode=e.IBV_WR_SEND,
            num_sge=1,
            sg=[SGE(self.mr.buf, size, self.mr.lkey)],
            send_flags=e.IBV_SEND_SIGNALED | inline,
        )
        self.receives = [
            RecvWR(wr_id=n, num_sge=1, sg=[SGE(self.mr.buf + SLAB * (n + 1), SLAB, self.mr.lkey)])
            for n in range(RECEIVES)
        ]

    def gid(self) -> tuple[int, str]:
        for index in range(16):
            text = str(self.context.query_gid(1, index))
            if text.startswith("0000:0000:0000:0000:0000:ffff"):
                return index, text
        raise SystemExit("no RoCE v2 IPv4 GID")

    def connect(self, peer: socket.socket) -> None:
        index, gid = self.gid()
        mine = json.dumps({"qpn": self.qp.qp_num, "gid": gid}).encode() + b"\n"
        peer.sendall(mine)
        theirs = json.loads(peer.makefile().readline())
        attributes = QPAttr(port_num=1)
        attributes.path_mtu = e.IBV_MTU_4096
        attributes.dest_qp_num = theirs["qpn"]
        attributes.rq_psn = attributes.sq_psn = 7
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 1
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 6, 7
        route = GlobalRoute(dgid=GID(theirs["gid"]), sgid_index=index)
        route.hop_limit = 64
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        self.qp.to_rts(attributes)
        for receive in self.receives:
            self.qp.post_recv(receive)
        peer.sendall(b"\n")
        peer.recv(1)  # both ends have posted

    def take(self) -> int:
        """Poll once, give every receive back; how many messages came."""
        _, completions = self.cq.poll(16)
        count = 0
        for completion in completions:
            if completion.status != e.IBV_WC_SUCCESS:
                raise SystemExit(f"completion status {completion.status}")
            if completion.wr_id < RECEIVES:
                self.qp.post_recv(self.receives[completion.wr_id])
                count += 1
        return count

    def spin(self) -> None:
        while not self.take():
            pass

    def send(self) -> None:
        self.qp.post_send(self.send_wr)

    def watch(self, arrived: asyncio.Queue[None]) -> None:
        """Event mode: arm, take what is there, and again at each event."""
        fd = self.channel.comp_channel_fd if hasattr(self.channel, "comp_channel_fd") else None
        if fd is None:
            fd = _channel_fd()
        os.set_blocking(fd, False)

        def on_event() -> None:
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
            self.cq.req_notify()
            for _ in range(self.take()):
                arrived.put_nowait(None)

        self.cq.req_notify()
        asyncio.get_running_loop().add_reader(fd, on_event)


def _channel_fd() -> int:
    """pyverbs 44 hides the channel's descriptor; it is the newest infinibandevent file."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(int(name))
    return max(found)


def accept(address: str) -> socket.socket:
    listener = socket.create_server((address, 0))
    print(listener.getsockname()[1], flush=True)
    return listener.accept()[0]


async def echo_events(end: End) -> None:
    arrived: asyncio.Queue[None] = asyncio.Queue()
    end.watch(arrived)
    while True:
        await arrived.get()
        end.send()


async def bounce_events(end: End, rounds: int) -> list[float]:
    arrived: asyncio.Queue[None] = asyncio.Queue()
    end.watch(arrived)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        end.send()
        await arrived.get()
        times.append(time.perf_counter() - begin)
    return times


def bounce_spinning(end: End, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        end.send()
        end.spin()
        times.append(time.perf_counter() - begin)
    return times


def serve(device: str, address: str, size: int, mode: str) -> None:
    end = End(device, size)
    end.connect(accept(address))
    if mode == "event":
        asyncio.run(echo_events(end))
    while True:
        end.spin()
        end.send()


def run(device: str, address: str, size: int, mode: str, port: int, rounds: int) -> None:
    end = End(device, size)
    end.connect(socket.create_connection((address, port)))
    if mode == "event":
        times = asyncio.run(bounce_events(end, rounds))
    else:
        times = bounce_spinning(end, rounds)
    report(times[rounds // 10 :], 0.0)


def main() -> None:
    role, device, address, size, mode, *more = sys.argv[1:]
    if role == "serve":
        serve(device, address, int(size), mode)
    else:
        run(device, address, int(size), mode, int(more[0]), int(more[1]))


if __name__ == "__main__":
    main()
