"""Routes: one open message link, whom it leads to, and what still depends on it.

A route lives as long as its link. It knows neither calls nor handlers, it counts them.
"""

from __future__ import annotations

from ...model import PathName, PeerIdentity
from ...transport.interface import Session
from ...transport.messages import MessageLink


class Route:
    """`session` None: the way of a node to itself. `calls`: outstanding requests that went by it.
    `serving`: received requests that are not settled. `holds`: streams that use it. `staged`:
    payloads that the peer has not fetched yet. `parting`: a goodbye is on its way.
    """

    __slots__ = (
        "calls",
        "holds",
        "link",
        "parting",
        "peer",
        "serving",
        "session",
        "staged",
        "transport",
    )

    def __init__(self, peer: PeerIdentity, session: Session | None, link: MessageLink) -> None:
        self.peer = peer
        self.session = session
        self.link = link
        self.transport: PathName = link.transport
        self.calls = 0
        self.serving = 0
        self.holds = 0
        self.staged = 0
        self.parting = False

    @property
    def usable(self) -> bool:
        """Whether a frame may be handed to it now."""
        return not self.parting and not self.link.closed

    @property
    def quiet(self) -> bool:
        """Nothing on this side needs the route: what an idle close asks, beside the link's own
        idleness.
        """
        return not (self.calls or self.serving or self.holds or self.staged)

    def __repr__(self) -> str:
        return f"<route to {self.peer} by {self.transport}>"
