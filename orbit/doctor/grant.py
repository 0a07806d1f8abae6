"""Real transfers inside this process: over loopback TCP, and on each usable device under a real
grant. What a capability flag promises proves nothing; these do.

Each device is opened, probed and used alone, every step has a deadline, and nothing is left open.
Nothing here raises for what is wrong with the host.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..config import NodeConfig
from ..errors import OrbitError, PathUnavailable
from ..model import PathName, PathReason, Transport
from ..verbs import opening
from ..verbs.device import DeviceContext
from ..verbs.offload import Offload
from ..verbs.probe import ProbeResult, probe
from ..verbs.provider import Provider
from ..verbs.rail_choice import RailChoice
from ..verbs.settings import RdmaPathConfig
from .advice import fix_for, hint_of, rdma_level, reason_of
from .finding import Area, Finding
from .host import Host
from .proof import OPEN_S, PAYLOAD_BYTES, RXE_COUNTER, Counter, Steps, moved, transfer, trial_config
from .seen import look

_TCP = Area("transfer over tcp")
_RDMA = Area("grants")


async def grant_findings(host: Host, config: NodeConfig) -> list[Finding]:
    """One finding for TCP, and one or two for each usable device (`config` is resolved). `data`
    has the steps with their seconds, and of a failure its `step` and `reason`.
    """
    found = [await _tcp_finding(config)]
    if config.transport == Transport.TCP or not config.rdma.enabled:
        return [*found, _RDMA.skip("grant_skipped", "RDMA was not asked for", reason="asked")]
    if not config.rendezvous.enabled:
        return [*found, _skipped(PathReason.KILL_SWITCH, "payloads by RDMA are switched off")]
    provider, reason, detail = await asyncio.to_thread(opening.system_provider)
    if provider is None:
        return [*found, _skipped(reason, detail)]
    seen = await asyncio.to_thread(look, host, config)
    if seen.refused is not None:
        return [*found, _skipped(PathReason.NO_DEVICE, str(seen.refused))]
    tried: dict[str, RailChoice] = {}
    for rail in seen.rails:
        if rail.active:
            tried.setdefault(rail.rail.device, rail)
    if not tried:
        return [*found, _skipped(seen.discovery.reason, seen.discovery.detail)]
    for rail in tried.values():
        found += await _device_findings(provider, rail, host, config)
    return found


def _skipped(reason: PathReason, detail: str) -> Finding:
    text = f"no grant was tried: {detail or reason}"
    return _RDMA.skip("grant_skipped", text, reason=str(reason), detail=detail)


async def _tcp_finding(config: NodeConfig) -> Finding:
    steps = Steps()
    try:
        await transfer(trial_config(config, Transport.TCP), steps)
    except (OrbitError, OSError) as error:
        text = f"{PAYLOAD_BYTES} bytes over loopback TCP failed at {steps.current}: {error}"
        fix = hint_of(error) or "see that this user may open sockets on 127.0.0.1"
        return _TCP.fail("tcp_failed", text, fix, step=steps.current)
    text = f"{PAYLOAD_BYTES} bytes between two nodes over loopback ({steps})"
    return _TCP.ok("tcp_works", text, seconds=steps.seconds)


async def _device_findings(
    provider: Provider, choice: RailChoice, host: Host, config: NodeConfig
) -> list[Finding]:
    """Of one device: does it enforce the range of a window, and does a grant work on it?"""
    rail, steps = choice.rail, Steps()
    found: list[Finding] = []
    try:
        probed = await _probe(provider, choice, config, steps)
        found.append(_range_finding(rail.device, probed))
        before = Counter.of(host, rail.device, rail.port)
        trial = trial_config(config, Transport.RDMA, rail.device)
        lease = await transfer(trial, steps)
    except (OrbitError, OSError) as error:
        return [*found, _failed(rail.device, error, steps, config)]
    delta = await moved(before, host, rail.device, rail.port)
    path = f"{lease.path}/{rail.device}:{rail.port} gid {rail.gid_index}"
    counter = before.name.rpartition("/")[2] if before else ""
    said = f"{counter} +{delta}" if counter else "its counters are not shown here"
    text = f"{PAYLOAD_BYTES} bytes by {path} under one grant ({steps}); {said}"
    data = {"counter": counter, "counted": delta, "mtu": rail.mtu, "seconds": steps.seconds}
    found.append(_RDMA.ok("grant_works", text, device=rail.device, path=path, **data))
    if delta == 0 and before is not None and before.name == RXE_COUNTER:
        # On hardware a transfer inside one port need not pass what the port counts.
        still = f"{rail.device}: sent_pkts stood still while the bytes arrived"
        fix = "`rdma link` shows whether another device has that name; look into dmesg"
        found.append(_RDMA.warn("grant_not_counted", still, fix, device=rail.device))
    return found


async def _probe(
    provider: Provider, choice: RailChoice, config: NodeConfig, steps: Steps
) -> ProbeResult:
    """Open the device and bind a type-2B window on it. Raises OrbitError, OSError."""
    rdma = config.rdma
    settings = RdmaPathConfig(
        service_level=rdma.service_level,
        traffic_class=rdma.traffic_class,
        connect_timeout_s=rdma.device_timeout_s,
        drain_timeout_s=rdma.device_timeout_s,
    )
    offload = Offload()
    try:
        async with steps.step("open", OPEN_S):
            device = await DeviceContext.open(
                provider, choice.rail, settings, offload, choice.pkey_index
            )
        try:
            async with steps.step("probe", OPEN_S):
                result = await probe(device)
        finally:
            await device.close()
    finally:
        offload.close()
    if result.reason is not PathReason.OK:
        steps.current = "bind" if result.reason is PathReason.NO_WINDOWS else "probe"
        raise PathUnavailable(PathName.RDMA, result.reason, result.detail)
    return replace(result, detail=device.quirks.name)


def _range_finding(device: str, probed: ProbeResult) -> Finding:
    if probed.range_enforced:
        text = f"{device} binds type-2B windows and refuses what lies outside of one"
        return _RDMA.ok("range_enforced", text, device=device)
    text = f"{device} ({probed.detail}) ignores a window's range: a grant opens its whole parent"
    fix = "use it for tests and among trusted peers; rdma.require_range refuses such a device"
    return _RDMA.warn("range_not_enforced", text, fix, device=device)


def _failed(device: str, error: BaseException, steps: Steps, config: NodeConfig) -> Finding:
    reason = reason_of(error)
    denied = getattr(error, "errno", 0) in (1, 13)  # EPERM, EACCES
    if reason is None:
        reason = PathReason.PERMISSION if denied else PathReason.DEVICE_FAILED
    fix = hint_of(error) or fix_for(reason, fix_for(PathReason.DEVICE_FAILED))
    return _RDMA.at(
        rdma_level(config),
        "grant_failed",
        f"{device}: the grant failed at {steps.current}: {error}",
        fix,
        device=device,
        step=steps.current,
        reason=str(reason),
        seconds=steps.seconds,
    )
