"""All checks that only look, in the order of the page. Nothing is opened or changed on a device."""

from __future__ import annotations

from collections.abc import Callable

from ..config import NodeConfig
from .addresses import address_findings
from .build import build_findings
from .container import container_findings
from .devices import device_findings
from .environment import environment_findings, with_environment
from .finding import Area, Finding
from .gids import gid_findings
from .gpu import gpu_findings
from .host import Host
from .limits import limit_findings
from .memory import memory_findings
from .numa import numa_findings
from .ports import port_findings
from .seen import Seen, look, wants_rdma
from .softroce import softroce_findings
from .tcp import tcp_findings

_Check = Callable[[Seen], list[Finding]]

_OF_RDMA: tuple[_Check, ...] = (build_findings, device_findings, softroce_findings)
_OF_DEVICES: tuple[_Check, ...] = (
    port_findings,
    gid_findings,
    limit_findings,
    memory_findings,
    numa_findings,
    gpu_findings,
)
_OF_ALL: tuple[_Check, ...] = (container_findings, tcp_findings, address_findings)


def host_findings(host: Host, config: NodeConfig) -> list[Finding]:
    """What a node with that configuration would meet here. Never raises for what the host is like:
    a file that makes no sense is a finding of its area.
    """
    findings = environment_findings(host, config)
    config = with_environment(host, config)
    seen = look(host, config)
    areas: list[_Check] = []
    if not wants_rdma(config):
        text = "RDMA was not looked at: the configuration leaves only TCP"
        findings.append(Area("devices").skip("rdma_not_wanted", text))
    else:
        areas += _OF_RDMA
        if seen.discovery.devices:
            areas += _OF_DEVICES
    for area in (*areas, *_OF_ALL):
        try:
            findings += area(seen)
        except (OSError, ValueError, IndexError) as error:
            name = area.__name__.removesuffix("_findings")
            findings.append(Area(name).skip("unreadable", f"{name}: not understood: {error}"))
    return findings
