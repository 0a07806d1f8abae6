"""One local rail while it is open: its address, whether it may carry anything now, and why not.

Owns the pause: while it lasts no queue pair is made or connected here, and registrations stay. It
reads the port when it is asked to, and chooses a new address under the pins; when to look, and what
must have ended before a rail serves again, is the monitor's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import DeviceError, OrbitError, PathUnavailable
from ..model import PathName, PathReason
from ..protocol.messages import RailHint
from .gid_ranking import GidEntry, Netdev, gid_bytes, gid_text, rank_gids
from .netdevs import read_netdevs
from .provider import NativeContext, PortFacts
from .queue_pair import LocalEnd
from .settings import RdmaPathConfig
from .topology import UNKNOWN_NODE

FencedHandler = Callable[[OrbitError], None]
ResumedHandler = Callable[[], None]
NetdevReader = Callable[[], Mapping[str, Netdev]]

_PKEY_NUMBER_BITS = 0x7FFF  # the top bit only says full or limited member
_FORMER_MAX = 16


def _nothing() -> None:
    """Nobody waits for the rail to serve again."""


@dataclass(frozen=True, slots=True)
class RailPlace:
    """Where discovery found it. `nic` is never given to another one. `numa_distances` has each node
    with its distance from `numa_node`.
    """

    nic: int = 0
    numa_node: int = UNKNOWN_NODE
    numa_distances: tuple[tuple[int, int], ...] = ()
    pci_bridges: int = 0


@dataclass(frozen=True, slots=True)
class RailView:
    """One look at the port. `gid_index`: where the rail's address stands now, None: nowhere that
    the pins allow. The last two were read only where they may be needed.
    """

    port: PortFacts
    gid_index: int | None
    gids: tuple[GidEntry, ...] = ()
    netdevs: Mapping[str, Netdev] = field(default_factory=dict)


class RailState:
    """Belongs to one event loop, but for `look`."""

    def __init__(
        self,
        context: NativeContext,
        rail: RailHint,
        place: RailPlace,
        config: RdmaPathConfig,
        pkey_index: int = 0,
        netdevs: NetdevReader = read_netdevs,
    ) -> None:
        self.rail = rail
        self.place = place
        self.paused = ""  # why; empty: it is active
        self.dead = False  # paused for good
        self.proven = False  # the start probe went well
        self._context = context
        self._config = config
        self._pkey_index = pkey_index
        self._netdevs = netdevs
        self._former: list[str] = []  # GIDs that it had before
        self._watchers: list[tuple[FencedHandler, ResumedHandler]] = []

    def __str__(self) -> str:
        return f"{self.rail.device} port {self.rail.port}"

    @property
    def reason(self) -> PathReason:
        if self.dead:
            return PathReason.DEVICE_FAILED
        return PathReason.PORT_DOWN if self.paused else PathReason.OK

    def check_active(self) -> None:
        """Raises PathUnavailable (port_down, device_failed)."""
        if self.paused:
            raise PathUnavailable(PathName.RDMA, self.reason, f"{self}: {self.paused}")

    def answers_to(self, gid: str) -> bool:
        """Whether peers may know this rail by that GID: it is its address, or was."""
        return gid == self.rail.gid or gid in self._former

    # --- pause ------------------------------------------------------------------------------------

    def watch(self, fenced: FencedHandler, resumed: ResumedHandler = _nothing) -> None:
        """`fenced` ends what its owner has here, each time that the rail is fenced."""
        self._watchers.append((fenced, resumed))

    def unwatch(self, fenced: FencedHandler) -> None:
        self._watchers = [watcher for watcher in self._watchers if watcher[0] != fenced]

    def fence(self, why: str, *, for_good: bool = False) -> None:
        """Nothing new from now on, and what there is ends. Idempotent; the latest reason stays."""
        self.dead = self.dead or for_good
        self.paused = why
        cause = DeviceError(str(self), "fence", 0, why)
        for fenced, _ in tuple(self._watchers):
            fenced(cause)

    def resume(self, rail: RailHint) -> None:
        """It serves again, under that address."""
        self.readdress(rail)
        self.paused = ""
        for _, resumed in tuple(self._watchers):
            resumed()

    def readdress(self, rail: RailHint) -> None:
        if rail.gid != self.rail.gid:
            known = [gid for gid in self._former if gid not in (rail.gid, self.rail.gid)]
            self._former = [*known, self.rail.gid][-_FORMER_MAX:]
        self.rail = rail

    # --- the port ---------------------------------------------------------------------------------

    def look(self) -> RailView:
        """Ask the port. Blocks for some system calls, so in a thread. Raises DeviceError."""
        rail = self.rail
        port = self._context.port(rail.port)
        here = _same(self._selected(rail), rail.gid)
        if not port.active or (here and not self.paused):
            return RailView(port, rail.gid_index if here else None)
        gids = tuple(self._context.gid_entries(rail.port))
        index = rail.gid_index if here else self._find(rail, gids)
        try:
            netdevs = self._netdevs()
        except DeviceError:
            netdevs = {}  # a sandbox may forbid the question
        return RailView(port, index, gids, netdevs)

    def change(self, view: RailView) -> str:
        """What about the rail's address is not as it was, or why it cannot be used. Empty: it is
        good.
        """
        rail = self.rail
        if not view.port.active:
            return f"port {rail.port} is {view.port.state}"
        if rail.link_layer == "infiniband" and view.port.lid != rail.lid:
            return f"the LID was {rail.lid} and is {view.port.lid}"
        if view.gid_index is None:
            return f"GID {rail.gid} is not at index {rail.gid_index} any more"
        if view.gid_index != rail.gid_index:  # it was removed and added: queue pairs have no row
            return f"GID {rail.gid} has moved from index {rail.gid_index} to {view.gid_index}"
        return ""

    def follow(self, view: RailView) -> None:
        """What may change under a rail that serves: new connections use it."""
        self.rail = replace(self.rail, mtu=view.port.mtu)

    def choose(self, view: RailView) -> RailHint | None:
        """The address to serve under, by the pins and the ranking; None: the port has none."""
        config = self._config
        wanted = gid_text(gid_bytes(config.gid)) if config.gid else ""
        pinned = bool(wanted) or config.gid_index is not None
        kept = [
            ranked.entry
            for ranked in rank_gids(view.gids, view.netdevs)
            if (not wanted or ranked.entry.gid == wanted)
            and (config.gid_index is None or ranked.entry.index == config.gid_index)
            and (pinned or ranked.usable)
        ]
        if not kept:
            return None
        port = view.port
        return replace(
            self.rail,
            gid=kept[0].gid,
            gid_index=kept[0].index,
            mtu=port.mtu,
            lid=port.lid,
            link_layer=port.link_layer,
        )

    def local_end(self, psn: int, *, remote_read: bool, remote_write: bool = False) -> LocalEnd:
        """For a connection that is made now: GID and partition key are looked up by value, since
        their indexes are given to others when an interface or the subnet is reconfigured. Raises
        DeviceError.
        """
        rail = self.rail
        port = self._context.port(rail.port)
        return LocalEnd(
            rail.port,
            self._gid_index(rail, port.gid_count),
            self._find_pkey(rail, port.pkey_count),
            psn,
            remote_read,
            remote_write,
            gid=rail.gid,
            service_level=self._config.service_level,
            traffic_class=self._config.traffic_class,
        )

    def _selected(self, rail: RailHint) -> str:
        try:
            return self._context.gid(rail.port, rail.gid_index)
        except DeviceError:
            return "::"  # some drivers refuse an empty row

    def _find(self, rail: RailHint, gids: tuple[GidEntry, ...]) -> int | None:
        if self._config.gid_index is not None:
            return None  # that index was asked for, and nothing else will do
        return next((entry.index for entry in gids if _same(entry.gid, rail.gid)), None)

    def _gid_index(self, rail: RailHint, count: int) -> int:
        indexes: Iterable[int] = (rail.gid_index, *range(count))
        for index in indexes:
            if _same(self._context.gid(rail.port, index), rail.gid):
                return index
        detail = f"port {rail.port} has lost its GID {rail.gid}"
        raise DeviceError(rail.device, "query_gid", 0, detail)

    def _find_pkey(self, rail: RailHint, count: int) -> int:
        number = rail.pkey & _PKEY_NUMBER_BITS
        indexes: Iterable[int] = (self._pkey_index, *range(count))
        for index in indexes:
            if self._context.pkey(rail.port, index) & _PKEY_NUMBER_BITS == number:
                return index
        detail = f"port {rail.port} has lost its partition key {rail.pkey:#06x}"
        raise DeviceError(rail.device, "query_pkey", 0, detail)


def _same(a: str, b: str) -> bool:
    return a == b or gid_bytes(a) == gid_bytes(b)
