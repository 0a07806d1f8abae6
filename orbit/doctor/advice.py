"""What to do about a reason, as doctor's real transfers meet it. It looks at nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import KILL_SWITCH, NodeConfig
from ..errors import OrbitError, PathFailed, PathUnavailable, TransferFailed
from ..model import PathReason, Transport
from .finding import Level

# "; " parts what stands alone: a page gives each a line, to be pasted.
INSTALL_DRIVERS = "apt-get install ibverbs-providers; RHEL, Fedora: dnf install libibverbs"
_FIXES: Mapping[PathReason, str] = {
    PathReason.NO_DEVICE: (
        "load the card's driver (modprobe mlx5_ib, ...); `rdma link` lists what is there;"
        " in a container: docker run --device=/dev/infiniband ...;"
        " to try RDMA without a card: orbit softroce -- COMMAND"
    ),
    PathReason.NO_PYVERBS: (
        "apt-get install python3-pyverbs ibverbs-providers;"
        " RHEL, Fedora: dnf install python3-pyverbs;"
        " a virtual environment: python3 -m venv --system-site-packages, by the system's python3"
    ),
    PathReason.NO_HELPER: (
        "apt-get install libibverbs-dev;"
        " RHEL, Fedora: dnf install rdma-core-devel;"
        " then build orbit again: pip install --force-reinstall --no-deps ORBIT_FOLDER"
    ),
    PathReason.PERMISSION: (
        "chmod a+rw /dev/infiniband/uverbs*;"
        ' for good, in /etc/udev/rules.d/: SUBSYSTEM=="infiniband_verbs", MODE="0666"'
    ),
    PathReason.PORT_DOWN: "`rdma link` shows the port; ip link set dev INTERFACE up",
    PathReason.NO_GID: "give the port's interface one: ip address add ADDRESS/PREFIX dev INTERFACE",
    PathReason.NO_WINDOWS: "this device has no type-2B memory windows: use another, or TCP",
    PathReason.RANGE_NOT_ENFORCED: "unset rdma.require_range, or use another device",
    PathReason.KILL_SWITCH: f"unset {KILL_SWITCH}, or set rendezvous.enabled",
    PathReason.CONNECT_FAILED: (
        "let UDP port 4791 (RoCE) pass both ways, and see that the two GIDs reach each other"
    ),
    PathReason.PEER_WITHOUT: "run `orbit doctor` on the other host: it offers no rail",
    PathReason.NOT_PINNED: "raise the memlock limit of the owner (ulimit -l) and its budget",
    PathReason.BUDGET: "raise rdma.pool.registered_bytes_budget",
    PathReason.POOL_EXHAUSTED: "raise rdma.pool.registered_bytes_budget",
    PathReason.NOT_READY: "let UDP port 4791 (RoCE) pass both ways",
    PathReason.GET_FAILED: "look at the port's errors: rdma statistic; dmesg",
    PathReason.DEVICE_FAILED: "`dmesg` and `ibv_devinfo -v` may say more",
}


def fix_for(reason: PathReason | None, otherwise: str = "") -> str:
    """What to do, or `otherwise` where the reason alone does not tell."""
    return _FIXES.get(reason, otherwise) if reason is not None else otherwise


def reason_of(error: BaseException) -> PathReason | None:
    """The reason that an error carries, or that its last attempt does."""
    if isinstance(error, TransferFailed) and error.attempts:
        return reason_of(error.attempts[-1])
    if isinstance(error, PathUnavailable | PathFailed):
        try:
            return PathReason(error.reason)
        except ValueError:
            return None
    return None


def hint_of(error: BaseException) -> str:
    """The fix for its reason, else its own hint."""
    own = error.hint if isinstance(error, OrbitError) else ""
    return fix_for(reason_of(error)) or own


def rdma_level(config: NodeConfig) -> Level:
    """How bad it is not to have RDMA: a demand or a pin makes it a failure."""
    demanded = config.transport == Transport.RDMA or config.rdma.pinned
    return Level.FAIL if demanded else Level.WARN
