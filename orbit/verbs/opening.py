"""From nothing to an open RDMA path, or the reason why there is none.

Loads the provider, takes the rails that discovery and pins allow, opens and probes each, and hands
the good ones to the path. A missing device is an answer here, never an exception.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from ..errors import DeviceError, OrbitError, PathUnavailable
from ..model import PathReason
from ..protocol.messages import RailHint
from .device import DeviceContext
from .discovery import discover
from .messaging.rdma_messages import RdmaMessages
from .messaging.settings import RdmaMessagesConfig
from .offload import Offload
from .probe import probe
from .provider import Provider
from .rail_choice import Pins, choose_rails
from .rdma_path import RdmaPath
from .settings import RdmaPathConfig

Opened = tuple[RdmaPath | None, PathReason, str]

# Which of several devices' reasons is told: the one that got furthest.
_FURTHEST = (
    PathReason.RANGE_NOT_ENFORCED,
    PathReason.NO_WINDOWS,
    PathReason.DEVICE_FAILED,
    PathReason.PORT_DOWN,
    PathReason.PERMISSION,
)


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
        provider, reason, detail = _system_provider()
        if provider is None:
            return None, reason, detail
    if rails is None:
        choice = choose_rails(discover(), _pins(config))
        chosen = [(rail.rail, rail.pkey_index) for rail in choice.rails]
        if not chosen:
            return None, choice.reason, choice.detail
    else:
        chosen = [(rail, 0) for rail in rails]
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


async def _open(
    provider: Provider, config: RdmaPathConfig, rails: Sequence[tuple[RailHint, int]]
) -> Opened:
    offload = Offload()
    devices: list[DeviceContext] = []
    refused: dict[PathReason, str] = {}
    for rail, pkey_index in rails:
        device, reason, detail = await _open_device(provider, config, rail, pkey_index, offload)
        if device is None:
            refused.setdefault(reason, detail)
        else:
            devices.append(device)
    if devices:
        return RdmaPath(devices, config, offload), PathReason.OK, "; ".join(refused.values())
    offload.close()
    reason = next((r for r in _FURTHEST if r in refused), PathReason.DEVICE_FAILED)
    return None, reason, "; ".join(refused.values())


async def _open_device(
    provider: Provider, config: RdmaPathConfig, rail: RailHint, pkey_index: int, offload: Offload
) -> tuple[DeviceContext | None, PathReason, str]:
    try:
        device = await DeviceContext.open(provider, rail, config, offload, pkey_index)
    except PathUnavailable as error:
        return None, PathReason(error.reason), error.detail
    except DeviceError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM)
        reason = PathReason.PERMISSION if denied else PathReason.DEVICE_FAILED
        return None, reason, str(error)
    except TimeoutError as error:
        return None, PathReason.DEVICE_FAILED, f"{rail.device}: {error}"
    result = await probe(device)
    reason, detail = result.reason, result.detail
    if reason is PathReason.OK and config.require_range and not result.range_enforced:
        reason = PathReason.RANGE_NOT_ENFORCED
        detail = f"{rail.device} ignores the range of a window, and require_range is set"
    if reason is PathReason.OK:
        device.rail = replace(device.rail, range_enforced=result.range_enforced)
        return device, PathReason.OK, ""
    try:
        await device.close()
    except (OrbitError, TimeoutError) as error:
        detail += f"; and it could not be closed: {error}"
    return None, reason, detail


def _system_provider() -> tuple[Provider | None, PathReason, str]:
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
    )
