"""Finds a guest kernel that has rdma_rxe: one installed on this host, one unpacked earlier, or one
fetched as a package.

A fetched kernel is unpacked into the lab's cache and never installed. Owns the cache's `kernels`
folder; knows nothing of how a kernel is booted.
"""

from __future__ import annotations

import fcntl
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orbit.errors import LabError
from orbit.softroce.packages import (
    FETCH_TOOLS,
    KERNEL_META_PACKAGES,
    Tool,
    distribution,
    install_hint,
    require_tools,
)

RXE_MODULE = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko"
_MODULE_SUFFIXES = ("", ".xz", ".zst", ".gz")
# Most of a distribution kernel is drivers that no guest of this lab has: leaving them out makes 90
# MB of 400 MB.
_NOT_UNPACKED = (
    "sound",
    *(f"drivers/{name}" for name in ("gpu", "media", "staging", "iio", "usb", "hid", "scsi")),
    *(f"drivers/net/{name}" for name in ("wireless", "ethernet", "usb", "can", "wan")),
)


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A bootable kernel. `modules` is its /lib/modules folder, with modules.dep in it."""

    version: str
    image: Path
    modules: Path

    def module_file(self, relative: str) -> Path | None:
        """The file of a module named as in modules.dep without compression suffix, or None."""
        for suffix in _MODULE_SUFFIXES:
            path = self.modules / (relative + suffix)
            if path.exists():
                return path
        return None


def locate_kernel(cache: Path, note: Callable[[str], None]) -> GuestKernel:
    """The kernel to boot. Fetches a package only when neither the host nor the cache has one.
    Raises LabError."""
    kernel = find_kernel(Path("/")) or find_cached_kernel(cache)
    if kernel is not None:
        return kernel
    (cache / "kernels").mkdir(parents=True, exist_ok=True)
    with _locked(cache / "kernels" / ".lock"):
        # Another run may have fetched it while this one waited for the lock.
        return find_cached_kernel(cache) or fetch_kernel(cache, note)


def find_kernel(root: Path) -> GuestKernel | None:
    """The newest kernel under `root` with a readable image, an index of its modules, and
    rdma_rxe."""
    found: list[GuestKernel] = []
    for base in (root / "lib/modules", root / "usr/lib/modules"):
        for modules in sorted(base.glob("*")) if base.is_dir() else []:
            kernel = GuestKernel(modules.name, root / f"boot/vmlinuz-{modules.name}", modules)
            usable = (
                kernel.module_file(RXE_MODULE) is not None
                and (modules / "modules.dep").exists()
                and _readable(kernel.image)
            )
            if usable:
                found.append(kernel)
    return max(found, key=lambda kernel: _version_key(kernel.version), default=None)


def find_cached_kernel(cache: Path) -> GuestKernel | None:
    """The newest kernel that an earlier run unpacked into the cache."""
    trees = sorted(cache.glob("kernels/*/"), key=lambda tree: _version_key(tree.name))
    for tree in reversed(trees):
        kernel = find_kernel(tree)
        if kernel is not None:
            return kernel
    return None


def module_exists(root: Path, release: str) -> bool:
    """Whether the modules of kernel `release` that are installed under `root` include rdma_rxe."""
    modules = root / "lib/modules" / release
    return GuestKernel(release, root, modules).module_file(RXE_MODULE) is not None


def fetch_kernel(cache: Path, note: Callable[[str], None]) -> GuestKernel:
    """Download the distribution's newest kernel package and unpack it into the cache. Raises
    LabError."""
    tools = require_tools(*FETCH_TOOLS)
    host = distribution()
    family, machine = host.partition("-")[0], platform.machine()
    meta = KERNEL_META_PACKAGES.get(family, {}).get(machine)
    if meta is None:
        raise LabError(
            "kernel",
            f"no kernel with rdma_rxe on this host, and no known package for {host} on {machine}",
            hint="install a distribution kernel that has the rdma_rxe module",
        )
    image_package = _dependency(tools["apt-cache"], meta)
    packages = [image_package]
    if family == "ubuntu":  # rdma_rxe sits in modules-extra there
        release = image_package.removeprefix("linux-image-")
        packages += [f"linux-modules-{release}", f"linux-modules-extra-{release}"]
    with tempfile.TemporaryDirectory(dir=cache / "kernels", prefix=".fetch-") as scratch_name:
        scratch = Path(scratch_name)
        note(f"fetching {' '.join(packages)} (once, unpacked into {cache / 'kernels'})")
        archives = _download(tools["apt-get"], packages, scratch)
        tree = scratch / "tree"
        for archive in archives:
            _unpack(tools["dpkg-deb"], archive, tree)
        release = image_package.removeprefix("linux-image-")
        # A merged-/usr package holds usr/lib/modules; depmod wants lib/modules.
        if not (tree / "lib").exists() and (tree / "usr/lib").exists():
            (tree / "lib").symlink_to("usr/lib")
        _call([str(tools["depmod"]), "-b", str(tree), release], "depmod")
        if find_kernel(tree) is None:
            raise LabError(
                "kernel",
                f"{image_package} has no rdma_rxe module",
                hint="Debian's cloud flavour lacks it: the lab needs the plain flavour",
            )
        target = cache / "kernels" / archives[0].name.removesuffix(".deb").replace("%3a", ":")
        shutil.rmtree(target, ignore_errors=True)
        tree.rename(target)
    kernel = find_kernel(target)
    assert kernel is not None, "a tree that was whole before its rename is whole after it"
    return kernel


def _dependency(apt_cache: Path, meta: str) -> str:
    listing = _call([str(apt_cache), "depends", "--no-recommends", "--no-suggests", meta], "kernel")
    for line in listing.splitlines():
        match = re.fullmatch(r"\s*Depends:\s+(linux-image-\d\S*)", line)
        if match:
            return match.group(1)
    raise LabError(
        "kernel",
        f"apt knows no kernel image behind {meta}",
        hint="run apt-get update as root, then try again",
    )


def _download(apt_get: Path, packages: list[str], folder: Path) -> list[Path]:
    try:
        _call([str(apt_get), "-q", "download", *packages], "kernel", folder)
    except LabError as error:
        raise LabError(
            "kernel",
            f"cannot download {' '.join(packages)}: {error.detail}",
            hint=f"check the network and run apt-get update, or {install_hint(packages)}",
        ) from error
    archives = [path for name in packages for path in sorted(folder.glob(f"{name}_*.deb"))]
    if len(archives) != len(packages):
        raise LabError("kernel", f"apt-get download left {len(archives)} of {len(packages)} files")
    return archives


def _unpack(dpkg_deb: Path, archive: Path, tree: Path) -> None:
    tree.mkdir(exist_ok=True)
    tar = require_tools(Tool("tar", "tar"))["tar"]
    excludes = [f"--exclude=*/kernel/{folder}" for folder in _NOT_UNPACKED]
    with subprocess.Popen(
        [str(dpkg_deb), "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
    ) as reader:
        unpacker = subprocess.run(
            [str(tar), "-x", "--no-same-owner", "-C", str(tree), *excludes],
            stdin=reader.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if reader.returncode != 0 or unpacker.returncode != 0:
        lines = unpacker.stderr.strip().splitlines() or ["dpkg-deb cannot read it"]
        raise LabError("kernel", f"cannot unpack {archive.name}: {lines[-1]}")


def _call(argv: list[str], stage: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LabError(stage, f"{argv[0]}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LabError(stage, f"{Path(argv[0]).name}: {lines[-1]}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _readable(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _version_key(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
