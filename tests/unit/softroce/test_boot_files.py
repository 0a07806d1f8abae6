"""Kernels that are found, images that are unpacked, and the initramfs that is built from them."""

from __future__ import annotations

import gzip
import lzma
import os
import shutil
import struct
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from orbit.errors import LabError
from orbit.softroce.boot_image import boot_image, has_pvh_entry, unpacked_kernel
from orbit.softroce.initramfs import REQUIRED_MODULES, build_initramfs, loading_order
from orbit.softroce.kernel import (
    RXE_MODULE,
    GuestKernel,
    find_cached_kernel,
    find_kernel,
    locate_kernel,
)
from orbit.softroce.packages import is_static_program

DEPENDENCIES = {
    "virtio_pci": ["virtio_ring", "virtio"],
    "virtio_ring": ["virtio"],
    "rdma_rxe": ["ib_core", "ib_uverbs", "udp-tunnel"],
    "ib_uverbs": ["ib_core"],
}


def make_kernel(root: Path, version: str, *, suffix: str = "", leave_out: str = "") -> Path:
    """A tree as a kernel package has it, with modules that hold nothing but their name."""
    modules = root / "lib/modules" / version
    names = {
        *REQUIRED_MODULES,
        "veth",
        *DEPENDENCIES,
        *chain(*DEPENDENCIES.values()),
    }
    paths = {name: f"kernel/x/{name}.ko" for name in names}
    paths["rdma_rxe"] = RXE_MODULE
    paths.pop(leave_out, None)
    lines = []
    for name, path in paths.items():
        file = modules / (path + suffix)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = name.encode()
        file.write_bytes(lzma.compress(content) if suffix == ".xz" else content)
        needed = [paths[d] + suffix for d in DEPENDENCIES.get(name, []) if d in paths]
        lines.append(f"{path}{suffix}: {' '.join(needed)}")
    (modules / "modules.dep").write_text("\n".join(lines) + "\n")
    (root / "boot").mkdir(exist_ok=True)
    (root / "boot" / f"vmlinuz-{version}").write_bytes(b"kernel")
    return modules


def test_the_newest_usable_kernel_is_found(tmp_path: Path) -> None:
    make_kernel(tmp_path, "6.1.0-9-amd64")
    make_kernel(tmp_path, "6.1.0-57-amd64", suffix=".xz")
    make_kernel(tmp_path, "6.9.0-1-cloud-amd64", leave_out="rdma_rxe")
    (make_kernel(tmp_path, "6.12.0-1-amd64") / "modules.dep").unlink()
    kernel = find_kernel(tmp_path)
    assert kernel is not None
    assert kernel.version == "6.1.0-57-amd64"


def test_a_host_without_kernels_has_none(tmp_path: Path) -> None:
    assert find_kernel(tmp_path) is None
    assert find_cached_kernel(tmp_path) is None


def test_a_cached_kernel_is_used_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_kernel(tmp_path / "kernels/linux-image-1_amd64", "6.1.0-57-amd64")
    monkeypatch.setattr("orbit.softroce.kernel.find_kernel", _find_outside_of_host)
    monkeypatch.setattr("orbit.softroce.kernel.fetch_kernel", pytest.fail)
    notes: list[str] = []
    assert locate_kernel(tmp_path, notes.append).version == "6.1.0-57-amd64"
    assert notes == []


def _find_outside_of_host(root: Path) -> GuestKernel | None:
    return None if root == Path("/") else find_kernel(root)


def test_modules_are_loaded_after_those_they_need(tmp_path: Path) -> None:
    make_kernel(tmp_path, "6.1.0")
    kernel = find_kernel(tmp_path)
    assert kernel is not None
    order = [Path(path).stem for path in loading_order(kernel, REQUIRED_MODULES)]
    assert len(order) == len(set(order))
    for name, needed in DEPENDENCIES.items():
        for other in needed:
            assert order.index(other) < order.index(name)


def test_a_missing_required_module_is_named(tmp_path: Path) -> None:
    make_kernel(tmp_path, "6.1.0", leave_out="overlay")
    kernel = find_kernel(tmp_path)
    assert kernel is not None
    with pytest.raises(LabError, match="has no module overlay"):
        loading_order(kernel, REQUIRED_MODULES)
    (kernel.modules / "modules.builtin").write_text("kernel/fs/overlayfs/overlay.ko\n")
    loading_order(kernel, REQUIRED_MODULES)


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_the_initramfs_holds_plain_modules_and_is_built_once(tmp_path: Path, suffix: str) -> None:
    make_kernel(tmp_path, "6.1.0", suffix=suffix)
    kernel = find_kernel(tmp_path)
    assert kernel is not None
    busybox = tmp_path / "busybox"
    busybox.write_bytes(b"busybox")
    cache = tmp_path / "cache"
    first = build_initramfs(kernel, busybox, cache)
    stamp = first.stat().st_mtime_ns
    assert build_initramfs(kernel, busybox, cache) == first
    assert first.stat().st_mtime_ns == stamp
    without = build_initramfs(kernel, busybox, cache, omit=["rdma_rxe"])
    assert without != first
    names = unpack_cpio(gzip.decompress(first.read_bytes()))
    assert names["init"].startswith(b"#!/bin/busybox")
    assert names["bin/busybox"] == b"busybox"
    rxe = [name for name in names if "rdma_rxe" in name]
    assert [names[name] for name in rxe] == [b"rdma_rxe"]
    assert not [n for n in unpack_cpio(gzip.decompress(without.read_bytes())) if "rdma_rxe" in n]
    assert sorted(path.name for path in (cache / "initramfs").iterdir()) == sorted(
        [first.name, without.name]
    )


def unpack_cpio(archive: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    position = 0
    while True:
        assert archive[position : position + 6] == b"070701"
        fields = [int(archive[position + 6 + 8 * n : position + 14 + 8 * n], 16) for n in range(13)]
        size, name_bytes = fields[6], fields[11]
        start = position + 110
        name = archive[start : start + name_bytes - 1].decode()
        start = (start + name_bytes + 3) & ~3
        if name == "TRAILER!!!":
            return files
        files[name] = archive[start : start + size]
        position = (start + size + 3) & ~3


@pytest.mark.skipif(shutil.which("cpio") is None, reason="the cpio program is not installed")
def test_cpio_itself_reads_the_archive(tmp_path: Path) -> None:
    make_kernel(tmp_path, "6.1.0")
    kernel = find_kernel(tmp_path)
    assert kernel is not None
    (tmp_path / "busybox").write_bytes(b"busybox")
    image = build_initramfs(kernel, tmp_path / "busybox", tmp_path / "cache")
    listing = subprocess.run(
        ["cpio", "-it"], input=gzip.decompress(image.read_bytes()), capture_output=True, check=True
    ).stdout.decode()
    assert {"init", "bin/busybox"} <= set(listing.split())


def elf_kernel(note_name: bytes = b"Xen\0", note_type: int = 18) -> bytes:
    note = struct.pack("<III", len(note_name), 8, note_type) + note_name.ljust(4, b"\0") + bytes(8)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    program = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), len(note), 4)
    return header + program + note


def bz_image(payload: bytes) -> bytes:
    image = bytearray(3 * 512)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, 0x20F)
    struct.pack_into("<II", image, 0x248, 512, len(payload))
    return bytes(image) + payload


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_compressed_kernel_is_unpacked(pack: object) -> None:
    kernel = elf_kernel()
    payload = pack(kernel) + struct.pack("<I", len(kernel))  # type: ignore[operator]
    assert unpacked_kernel(bz_image(payload)) == kernel


@pytest.mark.parametrize("image", [b"", b"kernel", bz_image(b"\x28\xb5\x2f\xfd"), bytes(4096)])
def test_other_images_are_left_alone(image: bytes) -> None:
    assert unpacked_kernel(image) is None


def test_a_broken_payload_is_left_alone() -> None:
    assert unpacked_kernel(bz_image(b"\xfd7zXZ\x00" + bytes(100))) is None


def test_the_pvh_note_is_looked_for() -> None:
    assert has_pvh_entry(elf_kernel())
    assert not has_pvh_entry(elf_kernel(note_name=b"GNU\0"))
    assert not has_pvh_entry(elf_kernel(note_type=1))
    assert not has_pvh_entry(b"MZ")


def test_the_unpacked_image_is_kept(tmp_path: Path) -> None:
    modules = make_kernel(tmp_path, "6.1.0")
    image = tmp_path / "boot/vmlinuz-6.1.0"
    image.write_bytes(bz_image(lzma.compress(elf_kernel())))
    kernel = GuestKernel("6.1.0", image, modules)
    first = boot_image(kernel, tmp_path / "cache")
    assert first.read_bytes() == elf_kernel()
    stamp = first.stat().st_mtime_ns
    assert boot_image(kernel, tmp_path / "cache").stat().st_mtime_ns == stamp
    image.write_bytes(b"a new kernel of unknown format")
    os.utime(image, ns=(1, 1))
    assert boot_image(kernel, tmp_path / "cache") == image


def test_static_programs_are_told_from_dynamic_ones() -> None:
    assert is_static_program(elf_kernel())
    interpreter = bytearray(elf_kernel())
    struct.pack_into("<I", interpreter, 64, 3)
    assert not is_static_program(bytes(interpreter))
    assert not is_static_program(b"#!/bin/sh")


class FakePackages:
    """apt and dpkg as scripts: a package is a tar of a tree, its index one line."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.repository = folder / "repository"
        self.repository.mkdir(parents=True)
        self.script("apt-cache", 'echo "linux-image-amd64"; echo "  Depends: linux-image-6.1.0"')
        self.script("apt-get", f'shift 2; for p; do cp {self.repository}/"$p"_* .; done')
        self.script("dpkg-deb", 'exec cat "$2"')
        self.script("depmod", "exit 0")
        monkeypatch.setattr("orbit.softroce.kernel.find_kernel", _find_outside_of_host)
        monkeypatch.setattr("orbit.softroce.kernel.distribution", lambda: "debian-12")
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / name).chmod(0o755)

    def add(self, package: str, tree: Path) -> None:
        archive = self.repository / f"{package}_6.1.192-3_amd64.deb"
        subprocess.run(["tar", "-cf", str(archive), "-C", str(tree), "."], check=True)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackages:
    return FakePackages(tmp_path / "apt", monkeypatch)


def test_a_kernel_is_fetched_once_and_unpacked_into_the_cache(
    tmp_path: Path, packages: FakePackages
) -> None:
    tree = tmp_path / "package"
    unused = make_kernel(tree, "6.1.0") / "kernel/drivers/gpu/large.ko"
    unused.parent.mkdir(parents=True)
    unused.touch()
    packages.add("linux-image-6.1.0", tree)
    cache = tmp_path / "cache"
    notes: list[str] = []
    kernel = locate_kernel(cache, notes.append)
    assert kernel.version == "6.1.0"
    assert kernel.image.read_bytes() == b"kernel"
    assert kernel.module_file(RXE_MODULE) is not None
    assert not (kernel.modules / "kernel/drivers/gpu").exists()
    assert "fetching linux-image-6.1.0" in notes[0]
    kept = [path.name for path in (cache / "kernels").iterdir() if path.is_dir()]
    assert kept == ["linux-image-6.1.0_6.1.192-3_amd64"]
    packages.script("apt-get", "exit 1")
    assert locate_kernel(cache, notes.append) == kernel
    assert len(notes) == 1


def test_a_failed_download_says_what_to_do(tmp_path: Path, packages: FakePackages) -> None:
    packages.script("apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    with pytest.raises(LabError, match="Unable to locate package") as caught:
        locate_kernel(tmp_path / "cache", lambda _text: None)
    assert "apt-get update" in caught.value.hint
    assert list((tmp_path / "cache/kernels").glob("*/")) == []


def test_apt_without_an_index_says_what_to_do(tmp_path: Path, packages: FakePackages) -> None:
    packages.script("apt-cache", "echo linux-image-amd64")
    with pytest.raises(LabError, match="apt knows no kernel image behind linux-image-amd64"):
        locate_kernel(tmp_path / "cache", lambda _text: None)


def test_a_flavour_without_rxe_is_refused(tmp_path: Path, packages: FakePackages) -> None:
    tree = tmp_path / "package"
    make_kernel(tree, "6.1.0", leave_out="rdma_rxe")
    packages.add("linux-image-6.1.0", tree)
    with pytest.raises(LabError, match=r"linux-image-6\.1\.0 has no rdma_rxe") as caught:
        locate_kernel(tmp_path / "cache", lambda _text: None)
    assert "cloud flavour" in caught.value.hint


def test_a_foreign_distribution_is_told_what_is_needed(
    tmp_path: Path, packages: FakePackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orbit.softroce.kernel.distribution", lambda: "fedora-40")
    with pytest.raises(LabError, match="no known package for fedora-40") as caught:
        locate_kernel(tmp_path / "cache", lambda _text: None)
    assert "rdma_rxe" in caught.value.hint
