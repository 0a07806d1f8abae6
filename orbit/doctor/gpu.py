"""What a device needs to reach GPU memory: peer memory or dma-buf, and mlx5's scatter to CQE.

orbit itself registers no memory of GPUs yet, so nothing here is an alarm; what other programs of
the host would miss is said, with the fix.
"""

from __future__ import annotations

from .finding import Area, Finding, Level
from .host import Host
from .seen import Seen

_AREA = Area("gpu")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_SCATTER = "MLX5_SCATTER_TO_CQE"


def gpu_findings(seen: Seen) -> list[Finding]:
    host = seen.host
    version = host.read(host.proc / "driver/nvidia/version")
    if not version:
        return [_AREA.skip("no_gpu", "no NVIDIA GPU driver is loaded")]
    if not seen.devices:
        return [_AREA.skip("gpu_alone", "a GPU, but no RDMA device that could reach its memory")]
    found = [_peer_memory(host, version)]
    mlx5 = [device.name for device in seen.devices if device.name.startswith("mlx5")]
    if mlx5 and host.environment.get(_SCATTER) != "0":
        text = f"{_SCATTER} is not 0: {mlx5[0]} may put the bytes of a small READ into the"
        text += " completion, from where the processor copies them: it cannot, into GPU memory"
        fix = f"export {_SCATTER}=0, before the process starts"
        found.append(_AREA.at(Level.SKIPPED, "scatter_to_cqe", text, fix))
    elif mlx5:
        found.append(_AREA.ok("scatter_to_cqe_off", f"{_SCATTER}=0"))
    return found


def _peer_memory(host: Host, version: str) -> Finding:
    loaded = [name for name in _PEER_MODULES if (host.sysfs / "module" / name).is_dir()]
    if loaded:
        return _AREA.ok("peer_memory", f"{loaded[0]} is loaded")
    if "Open Kernel Module" in version:
        text = "no peer memory module is loaded; the open driver offers dma-buf, which takes"
        text += " Linux 5.12 and was not tried"
        return _AREA.skip("dmabuf_untried", text)
    text = "GPU memory cannot be registered: no nvidia_peermem, and this driver has no dma-buf"
    return _AREA.at(Level.SKIPPED, "no_peer_memory", text, "modprobe nvidia_peermem")
