"""Builds the guest's initramfs: a static busybox, the init script, and the kernel modules in the
order of loading.

The archive is written here (newc cpio, gzip), kept in the cache under the hash of its content, and
never changed. Knows which modules the lab needs; does not know how a machine is started.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from orbit.errors import LabError
from orbit.softroce.kernel import GuestKernel
from orbit.softroce.packages import Tool, require_tools

REQUIRED_MODULES = (
    "virtio_pci",
    "virtio_console",
    "9p",
    "9pnet_virtio",
    "overlay",
    "rdma_rxe",
    "ib_uverbs",
)
# Without crc32_generic a 6.1 kernel's `rdma link add` fails with "No such file or directory"; later
# kernels do not have it, so that its absence is judged in the guest, where the device is made.
OPTIONAL_MODULES = (
    "crc32_generic",
    "virtio_net",
    "virtio_rng",
    "veth",
    "dummy",
    "rdma_ucm",
    "sch_netem",
    "sch_tbf",
    "sch_ingress",
    "cls_u32",
    "act_gact",
)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    mode: int
    content: bytes = b""


def build_initramfs(
    kernel: GuestKernel, busybox: Path, cache: Path, omit: Iterable[str] = ()
) -> Path:
    """The path of the initramfs for `kernel`, built only when the cache has none of this content.
    `omit` leaves modules out: the lab's own tests prove with it that a missing module is named.
    Raises LabError."""
    left_out = frozenset(omit)
    wanted = [name for name in (*REQUIRED_MODULES, *OPTIONAL_MODULES) if name not in left_out]
    order = [path for path in loading_order(kernel, wanted) if module_name(path) not in left_out]
    init = files("orbit.softroce").joinpath("guest/init").read_bytes()
    digest = hashlib.sha256()
    for part in (
        init,
        busybox.read_bytes(),
        kernel.version.encode(),
        *(_identity(kernel, path) for path in order),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    target = cache / "initramfs" / f"{kernel.version}-{digest.hexdigest()[:24]}.cpio.gz"
    if not target.exists():
        entries = [
            _Entry("bin", 0o40755),
            _Entry("bin/busybox", 0o100755, busybox.read_bytes()),
            _Entry("init", 0o100755, init),
            _Entry("modules", 0o40755),
            *(
                _Entry(f"modules/{n:03}-{module_name(path)}.ko", 0o100644, _module(kernel, path))
                for n, path in enumerate(order)
            ),
        ]
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(gzip.compress(cpio_archive(entries), 1, mtime=0))
        scratch.rename(target)
    return target


def loading_order(kernel: GuestKernel, wanted: Sequence[str]) -> list[str]:
    """Paths below the kernel's module folder, dependencies first. Modules that are built in are
    left out; a missing required one raises LabError."""
    dependencies: dict[str, list[str]] = {}
    paths: dict[str, str] = {}
    for line in (kernel.modules / "modules.dep").read_text(encoding="utf-8").splitlines():
        path, _, rest = line.partition(":")
        paths[module_name(path)] = path
        dependencies[path] = rest.split()
    builtin_file = kernel.modules / "modules.builtin"
    builtin = {
        module_name(line)
        for line in (builtin_file.read_text("utf-8").splitlines() if builtin_file.exists() else [])
    }
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for dependency in dependencies.get(path, []):
            if dependency not in order:
                add(dependency)
        order.setdefault(path)

    for name in wanted:
        if name in paths:
            add(paths[name])
        elif name in REQUIRED_MODULES and name not in builtin:
            raise LabError("kernel", f"kernel {kernel.version} has no module {name}")
    return list(order)


def module_name(path: str) -> str:
    """The name of a module by its file's path; modules.dep mixes `-` and `_`."""
    return path.rsplit("/", 1)[-1].split(".ko", 1)[0].replace("-", "_")


def cpio_archive(entries: Iterable[_Entry]) -> bytes:
    """A cpio archive in the `newc` format that the kernel unpacks (Documentation:
    early-userspace/buffer-format)."""
    archive = bytearray()
    for number, entry in enumerate((*entries, _Entry("TRAILER!!!", 0)), start=1):
        name = entry.name.encode() + b"\0"
        fields = (number, entry.mode, 0, 0, 1, 0, len(entry.content), 0, 0, 0, 0, len(name), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields) + name
        archive += bytes(-len(archive) % 4)
        archive += entry.content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def _identity(kernel: GuestKernel, path: str) -> bytes:
    # Size and time stand for the content of a module: hashing megabytes would cost more than the
    # check is worth.
    status = (kernel.modules / path).stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}".encode()


def _module(kernel: GuestKernel, path: str) -> bytes:
    file = kernel.modules / path
    # busybox insmod reads plain modules only, so that compressed ones are opened here.
    match file.suffix:
        case ".xz":
            return lzma.decompress(file.read_bytes())
        case ".gz":
            return gzip.decompress(file.read_bytes())
        case ".zst":
            zstd = require_tools(Tool("zstd", "zstd"))["zstd"]
            return subprocess.run(
                [str(zstd), "-dcq", str(file)], check=True, capture_output=True
            ).stdout
        case _:
            return file.read_bytes()
