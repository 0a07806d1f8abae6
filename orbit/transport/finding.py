"""Who listens at an endpoint: a handshake with whoever is there, and nothing else."""

from __future__ import annotations

import secrets
from dataclasses import replace

from ..errors import PeerProtocolError, UsageError
from ..model import Incarnation, WorkerId
from ..protocol.address import ENDPOINTS_MAX, NodeAddress
from ..protocol.endpoint import Endpoint
from ..protocol.messages import Hello
from .tcp_dial import DialOptions, dial


async def find(
    endpoint: Endpoint, hello: Hello, secret: bytes | None, options: DialOptions
) -> NodeAddress:
    """The address of the node that listens at `endpoint`, which stands first in it. `hello` is made
    anonymous: the peer keeps no session with this node for it. Raises as `dial`.
    """
    stranger = replace(
        hello,
        worker_id=secrets.randbelow((1 << 64) - 1) + 1,
        incarnation=secrets.randbits(64),
        target=0,
        rails=(),
        endpoints=(),
    )
    established = await dial([endpoint.pair], stranger, secret, options=options)
    established.link.abort()
    theirs = established.epoch.peer_hello
    try:
        others = [Endpoint.parse(text) for text in theirs.endpoints]
        endpoints = tuple(dict.fromkeys([endpoint, *others]))[:ENDPOINTS_MAX]
        return NodeAddress(
            WorkerId(theirs.worker_id), Incarnation(theirs.incarnation), endpoints, theirs.rails
        )
    except UsageError as error:
        raise PeerProtocolError(f"{endpoint}: {error}") from error
