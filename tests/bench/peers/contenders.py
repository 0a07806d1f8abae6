"""Who is compared, how each is started, and what its figures mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from child import END

OURS = "orbit"
SYSTEM_VERBS = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"

# Address, RDMA device, and what a command begins with, of one end.
Place = tuple[str, str, Sequence[str]]
LAB: tuple[Place, Place] = (
    ("10.9.0.1", "rxa1", ("orbit-host", "A")),
    ("10.9.0.2", "rxb1", ("orbit-host", "B")),
)


def here(cpus: tuple[str, str]) -> tuple[Place, Place]:
    """On this host, each end on its processor."""
    first, second = (("127.0.0.1", "", ("taskset", "-c", cpu)) for cpu in cpus)
    return first, second


@dataclass(frozen=True)
class Contender:
    """`adapter` is a module of adapters/; `round_trip` says what its 64 B figure is of."""

    name: str
    adapter: str
    variant: str = ""
    round_trip: str = "READ"
    environment: Sequence[str] = ()
    largest: int = 1 << 40  # sizes above are left out

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    def command(
        self, python: Path, role: str, network: str, place: Place, sizes: Sequence[int]
    ) -> list[str]:
        """`python` is of the peers; orbit and what is built on it run under this one."""
        own = self.ours or self.adapter == "bare"
        host, device, prefix = place
        command = [*prefix, "env", *self.environment, sys.executable if own else str(python)]
        command += [str(END), self.adapter, role, "--network", network, "--host", host]
        command += ["--variant", self.variant, "--device", device]
        return [*command, "--sizes", *map(str, sizes)]


ORBIT = (
    Contender("orbit get_into", "orbit", "uvloop-get", "call"),
    Contender("orbit engine READ", "orbit", "uvloop-engine"),
    Contender("orbit call", "orbit", "uvloop-message", "call", largest=1 << 20),
)
BOTH = (
    Contender("Mooncake TE", "mooncake"),
    Contender("DLSlime", "dlslime"),
)
TCP = (
    Contender("Python recv_into", "plain", round_trip="echo"),
    Contender("asyncio streams", "streams", "asyncio", "echo"),
    Contender("uvloop streams", "streams", "uvloop", "echo"),
    Contender("pyzmq", "zmq", round_trip="echo"),
    Contender("gRPC", "grpc", round_trip="call"),
    *BOTH,
    Contender("NIXL (UCX tcp)", "nixl"),
    Contender("ucxx tcp, polling", "ucxx", "polling", "echo"),
    *ORBIT,
)
RDMA = (
    Contender("bare READ chain", "bare"),
    *BOTH,
    Contender("Mooncake TE, one worker", "mooncake", "one-worker"),
    Contender("NIXL (UCX verbs)", "nixl", environment=(f"LD_PRELOAD={SYSTEM_VERBS}",)),
    Contender("ucxx", "ucxx", "polling", "echo"),
    *ORBIT,
)
# Asked for RDMA on a machine that has none.
WITHOUT_DEVICE = (
    *BOTH,
    Contender("NIXL (UCX verbs)", "nixl"),
    Contender("ucxx", "ucxx", "polling"),
    ORBIT[0],
)
