"""Two nodes in namespaces of their own (`unshare -rmn`), with an /etc/hosts that says what a test
wants: HOSTS GAI LISTEN ADVERTISE... in, what became of it in one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
from typing import Any

import orbit
from orbit.testing.pattern import pattern

PORT = 7000
NBYTES = 300_000


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def looked_up(host: str) -> list[str]:
    found = socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


async def main(listen: str, advertise: list[str]) -> dict[str, Any]:
    warnings = Warnings()
    logging.getLogger("orbit").addHandler(warnings)
    config = orbit.NodeConfig(listen=listen, advertise=tuple(advertise), transport="tcp")
    async with orbit.Node(config) as owner, orbit.Node(orbit.NodeConfig(transport="tcp")) as node:
        told = [str(endpoint) for endpoint in owner.address.endpoints]
        found = await node.find(told[0])
        node.add_peer(found)
        handle = await owner.register_data(pattern(NBYTES))
        data, lease = await node.get(handle)
        await node.release(handle, lease)
        return {
            "told": told,
            "same": found.identity == owner.identity and data == pattern(NBYTES),
            "order": looked_up(advertise[0] if advertise else "localhost"),
            "warnings": warnings.texts,
        }


if __name__ == "__main__":
    hosts, order, *rest = sys.argv[1:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    subprocess.run(["mount", "--bind", order, "/etc/gai.conf"], check=True)
    print(json.dumps(asyncio.run(main(rest[0], rest[1:]))))
