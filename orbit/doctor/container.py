"""Containers and network namespaces: what was not handed in."""

from __future__ import annotations

from .finding import Area, Finding
from .host import Host
from .seen import Seen, wants_rdma

_AREA = Area("container")
_DOCKER_FIX = (
    "docker run --device=/dev/infiniband --ulimit memlock=-1 --cap-add=IPC_LOCK ...;"
    " in Kubernetes: an RDMA device plugin's resource (rdma/hca: 1), and"
    " securityContext.capabilities.add: [IPC_LOCK]"
)


def container_findings(seen: Seen) -> list[Finding]:
    host = seen.host
    kind = kind_of_container(host)
    found = [_where(host, kind)]
    devices = seen.discovery.devices
    if not devices or not wants_rdma(seen.config):
        return found
    if host.nodes and not host.names(host.nodes) and any(device.node for device in devices):
        text = f"{devices[0].name} is listed, and this container has no {host.nodes}"
        if not kind:
            text = f"{devices[0].name} is listed, and {host.nodes} is not here"
        found.append(_AREA.at(seen.missing, "nodes_not_passed", text, _DOCKER_FIX))
    found.append(_namespace_mode(host))
    return found


def _where(host: Host, kind: str) -> Finding:
    if kind:
        return _AREA.ok("container", f"in a container ({kind})", kind=kind)
    if not host.read(host.proc / "1/cgroup"):
        return _AREA.skip("container_unknown", "whether this is a container cannot be read")
    return _AREA.ok("no_container", "nothing says that this is a container")


def kind_of_container(host: Host) -> str:
    """Empty where nothing says that this is one."""
    root = host.proc / "self/root"
    if (root / "run/secrets/kubernetes.io").is_dir() or (
        "KUBERNETES_SERVICE_HOST" in host.environment
    ):
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = host.read(host.proc / "1/cgroup")
    return next((k for k in ("kubepods", "docker", "containerd", "lxc") if k in groups), "")


def _namespace_mode(host: Host) -> Finding:
    mode = host.read(host.sysfs / "module/ib_core/parameters/netns_mode")
    if mode in ("N", "0"):
        text = "RDMA devices belong to one network namespace each (rdma system: netns exclusive)"
        return _AREA.ok("netns_exclusive", text)
    if mode:
        text = "every network namespace sees all RDMA devices (rdma system: netns shared)"
        return _AREA.ok("netns_shared", text)
    return _AREA.skip("netns_unknown", "whether namespaces share RDMA devices cannot be read")
