"""Answers the baselines of one client at a time, one after the other: what a request opens, the
next one that opens, or `close`, ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...errors import PeerProtocolError
from ...protocol.address import NodeAddress
from ...protocol.endpoint import Endpoint
from ...verbs.provider import Provider
from .asking import Request
from .chain_end import open_provider
from .perftest import PerftestServer, installed
from .read_chain import ReadChainServer
from .socket_server import SocketLoopServer

if TYPE_CHECKING:
    from ..ends import NodeSettings


_OPENING: Final = ("socket.open", "chain.open", "perftest.start")


class BaselineServer:
    """On the host and the rails of a node's `address`, with `settings.buffer_bytes` of memory for
    each run. It lives on the node's event loop and uses nothing of the node.
    """

    def __init__(
        self,
        settings: NodeSettings,
        address: NodeAddress,
        provider: Callable[[], Provider] = open_provider,
    ) -> None:
        host, room = Endpoint.parse(settings.listen).host, settings.buffer_bytes
        self._hosts = list(dict.fromkeys(endpoint.host for endpoint in address.endpoints))
        self._rails = bool(address.rails)
        self._sockets = SocketLoopServer(host, room)
        self._chain = ReadChainServer(address.rails, room, provider)
        self._perftest = PerftestServer(host, address.rails)

    async def answer(self, kind: str, request: Request) -> dict[str, Any]:
        """Raises OrbitError: the request is refused, or could not be done."""
        if kind in _OPENING:
            await self.close()
        match kind:
            case "about":
                return {"hosts": self._hosts, "rdma": self._rails, "perftest": installed()}
            case "socket.open":
                return await self._sockets.open(request)
            case "socket.finish":
                return await self._sockets.finish()
            case "chain.open":
                return await self._chain.open(request)
            case "chain.connect":
                return await self._chain.connect(request)
            case "chain.close":
                await self._chain.close()
            case "perftest.start":
                return await self._perftest.start(request)
            case "perftest.stop":
                await self._perftest.close()
            case _:
                raise PeerProtocolError(f"baseline: {kind!r} is no request")
        return {}

    async def close(self) -> None:
        """Raises DeviceError: then something of the chain is left on the device."""
        await self._sockets.close()
        await self._perftest.close()
        await self._chain.close()
