"""From nothing to an open RDMA path, or the reason why there is none.

Loads the provider, takes the rails that discovery and pins allow, opens and probes each, and hands
the good ones to the path. One whose port is down waits there. A missing device is an answer here,
never an exception.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DeviceError, OrbitError, PathUnavailable
from ..model import PathReason
from ..protocol.messages import RailHint
from .device import DeviceContext
from .discovery import discover, judged_by
from .messaging.rdma_messages import RdmaMessages
from .messaging.settings import RdmaMessagesConfig
from .offload import Offload
from .probe import prove
from .provider import Provider
from .rail_choice import Pins, RailChoice, choose_rails
from .rail_state import RailPlace
from .rdma_path import RdmaPath
from .settings import RdmaPathConfig
from .topology import numa_distances

Opened = tuple[RdmaPath | None, PathReason, str]

# Which of several devices' reasons is told: the one that got furthest.
_FURTHEST = (
    PathReason.RANGE_NOT_ENFORCED,
    PathReason.NO_WINDOWS,
    PathReason.DEVICE_FAILED,
    PathReason.PORT_DOWN,
    PathReason.PERMISSION,
)


@dataclass(frozen=True, slots=True)
class _Chosen:
    rail: RailHint
    place: RailPlace
    pkey_index: int = 0

    @classmethod
    def of(cls, choice: RailChoice) -> _Chosen:
        distances = tuple(numa_distances(choice.numa_node).items())
        place = RailPlace(choice.nic, choice.numa_node, distances, choice.pci_bridges)
        return cls(choice.rail, place, choice.pkey_index)


async def open_rdma_path(
    provider: Provider | None,
    config: RdmaPathConfig,
    *,
    rails: Sequence[RailHint] | None = None,
) -> Opened:
    """The path with reason OK, or None with the reason and one line for people.

    `provider` None: the system's pyverbs. `rails` None: what discovery finds under the pins. Raises
    ConfigError for a pin that names what is not there.
    """
    if provider is None:
        provider, reason, detail = system_provider()
        if provider is None:
            return None, reason, detail
    if rails is None:
        found = judged_by(discover(), provider.devices())
        choice = choose_rails(found, _pins(config))
        chosen = [_Chosen.of(found) for found in choice.rails]
        if not chosen:
            return None, choice.reason, choice.detail
    else:
        chosen = [_Chosen(rail, RailPlace(nic)) for nic, rail in enumerate(rails)]
        if not chosen:
            return None, PathReason.NO_DEVICE, "no rail was given"
    return await _open(provider, config, chosen)


def open_rdma_messages(path: RdmaPath, config: RdmaMessagesConfig) -> RdmaMessages:
    """The message transport on the devices of an open path, which closes it before them. Nothing is
    made on a device before the first link.
    """
    messages = RdmaMessages(path.devices, config, path.budget)
    path.close_before(messages.close)
    return messages


async def _open(provider: Provider, config: RdmaPathConfig, rails: Sequence[_Chosen]) -> Opened:
    offload = Offload()
    devices: list[DeviceContext] = []
    refused: dict[PathReason, str] = {}
    for chosen in rails:
        device, reason, detail = await _open_device(provider, config, chosen, offload)
        if device is None:
            refused.setdefault(reason, detail)
        else:
            devices.append(device)
    if devices:
        paused = [f"{device.state} waits: {device.paused}" for device in devices if device.paused]
        details = "; ".join([*refused.values(), *paused])
        return RdmaPath(devices, config, offload), PathReason.OK, details
    offload.close()
    reason = next((r for r in _FURTHEST if r in refused), PathReason.DEVICE_FAILED)
    return None, reason, "; ".join(refused.values())


async def _open_device(
    provider: Provider, config: RdmaPathConfig, chosen: _Chosen, offload: Offload
) -> tuple[DeviceContext | None, PathReason, str]:
    rail = chosen.rail
    try:
        device = await DeviceContext.open(
            provider, rail, config, offload, chosen.pkey_index, chosen.place
        )
    except PathUnavailable as error:
        return None, PathReason(error.reason), error.detail
    except DeviceError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM)
        reason = PathReason.PERMISSION if denied else PathReason.DEVICE_FAILED
        return None, reason, str(error)
    except TimeoutError as error:
        return None, PathReason.DEVICE_FAILED, f"{rail.device}: {error}"
    if device.paused and device.limits.window_type_2b:
        return device, PathReason.OK, ""  # the rest is proven when it can be tried
    reason, detail = await prove(device)
    if reason is PathReason.OK:
        return device, PathReason.OK, ""
    try:
        await device.close()
    except (OrbitError, TimeoutError) as error:
        detail += f"; and it could not be closed: {error}"
    return None, reason, detail


def system_provider() -> tuple[Provider | None, PathReason, str]:
    """The system's pyverbs, or None, why, and one line for people."""
    from ._pyverbs import PyverbsProvider  # pyverbs is loaded here and nowhere else

    try:
        return PyverbsProvider(), PathReason.OK, ""
    except DeviceError as error:
        helper = error.device == "helper"
        return None, PathReason.NO_HELPER if helper else PathReason.NO_PYVERBS, str(error)


def _pins(config: RdmaPathConfig) -> Pins:
    return Pins(
        device=config.device or None,
        port=config.port or None,
        gid_index=config.gid_index,
        gid=config.gid or None,
        pkey=config.pkey,
        whitelist=config.whitelist,
        blacklist=config.blacklist,
    )
