"""Which host tools the lab needs, and which distribution package brings each of them.

Owns the checks that name everything that is missing at once, with its package. Knows nothing of
kernels or virtual machines. Only Debian 12 is tested.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orbit.errors import LabError

PYVERBS_PYTHON = Path("/usr/bin/python3")
"""The distribution's interpreter: its pyverbs matches the distribution's libibverbs, a PyPI build
does not."""

KERNEL_META_PACKAGES: dict[str, dict[str, str]] = {
    "debian": {"x86_64": "linux-image-amd64", "aarch64": "linux-image-arm64"},
    "ubuntu": {"x86_64": "linux-image-generic", "aarch64": "linux-image-generic"},
}
"""The package whose dependency is the newest kernel that has rdma_rxe. Debian's cloud flavour and
Ubuntu's virtual flavour do not."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A program that a run calls on the host, with the package that brings it."""

    command: str
    package: str


# What set-up installs is listed in scripts/packages; a test keeps these names in step with it.
RUN_TOOLS = (Tool("ip", "iproute2"), Tool("rdma", "iproute2"), Tool("tc", "iproute2"))
FETCH_TOOLS = (
    Tool("apt-get", "apt"),
    Tool("apt-cache", "apt"),
    Tool("dpkg-deb", "dpkg"),
    Tool("depmod", "kmod"),
)
QEMU_PACKAGES = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"}


def find_tool(command: str) -> Path | None:
    """Where `command` is; looks into the sbin folders too, which a plain user's PATH often
    lacks."""
    found = shutil.which(command) or shutil.which(
        command, path="/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    )
    return Path(found) if found else None


def require_tools(*tools: Tool) -> dict[str, Path]:
    """Every tool's path by its command. Raises LabError that names all that are missing and their
    packages."""
    found: dict[str, Path] = {}
    missing: list[Tool] = []
    for tool in tools:
        path = find_tool(tool.command)
        if path is None:
            missing.append(tool)
        else:
            found[tool.command] = path
    if missing:
        raise LabError(
            "tools",
            "not found: " + ", ".join(tool.command for tool in missing),
            hint=install_hint(tool.package for tool in missing),
        )
    return found


def require_busybox() -> Path:
    """A statically linked busybox, which is all that the initramfs has. Raises LabError when there
    is none."""
    for candidate in (find_tool("busybox"), find_tool("busybox-static")):
        if candidate is not None and is_static_program(candidate.read_bytes()):
            return candidate
    raise LabError("tools", "no statically linked busybox", hint=install_hint(["busybox-static"]))


def require_pyverbs() -> None:
    """The self-proof runs the distribution's pyverbs in the guest; raises LabError when it is not
    installed."""
    if not PYVERBS_PYTHON.exists():
        raise LabError("tools", f"{PYVERBS_PYTHON} is missing", hint=install_hint(["python3"]))
    folders = [
        Path("/usr/lib/python3/dist-packages"),
        *Path("/usr/lib").glob("python3*/site-packages"),
        *Path("/usr/lib64").glob("python3*/site-packages"),
    ]
    if not any((folder / "pyverbs").is_dir() for folder in folders):
        raise LabError(
            "tools",
            f"{PYVERBS_PYTHON} has no pyverbs",
            hint=install_hint(["python3-pyverbs", "ibverbs-providers"]),
        )


def is_static_program(image: bytes) -> bool:
    """Whether an ELF64 program asks for no interpreter (no PT_INTERP header), so that it runs
    without libraries."""
    if image[:5] != b"\x7fELF\x02":
        return False
    table_offset, entry_bytes, entries = (
        *struct.unpack_from("<Q", image, 32),
        *struct.unpack_from("<HH", image, 54),
    )
    program_interpreter = 3
    kinds = (
        struct.unpack_from("<I", image, table_offset + index * entry_bytes)[0]
        for index in range(entries)
    )
    return program_interpreter not in kinds


def distribution(os_release: Path = Path("/etc/os-release")) -> str:
    """`ID-VERSION_ID` of this host, for example debian-12; `unknown` where the file is missing."""
    fields: dict[str, str] = {}
    try:
        lines = os_release.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        name, _, value = line.partition("=")
        fields[name] = value.strip().strip('"')
    return f"{fields.get('ID', 'unknown')}-{fields.get('VERSION_ID', '')}".rstrip("-")


def install_hint(packages: Iterable[str]) -> str:
    """One line that says what to install, in this distribution's words where they are known."""
    names = " ".join(dict.fromkeys(packages))
    host = distribution()
    if host.partition("-")[0] in KERNEL_META_PACKAGES:
        return f"apt-get install {names}"
    return f"install what Debian 12 calls: {names}"
