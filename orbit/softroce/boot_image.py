"""Unpacks a compressed x86 kernel once, so that no guest has to do it at every boot.

Under software emulation a kernel spends a third of its boot unpacking itself. QEMU starts the
uncompressed ELF image directly where it has the PVH entry note; any other kernel is booted as it
is. Knows image formats only.
"""

from __future__ import annotations

import lzma
import os
import struct
import zlib
from pathlib import Path

from orbit.softroce.kernel import GuestKernel

_SECTOR_BYTES = 512
_BOOT_MAGIC = b"HdrS"  # at 0x202 of a bzImage (Documentation/arch/x86/boot.rst)
_PAYLOAD_PROTOCOL = 0x208  # the first boot protocol version that says where the payload is
_PT_NOTE = 4
_XEN_PHYS32_ENTRY = 18  # the note by which an ELF kernel offers the PVH entry point


def boot_image(kernel: GuestKernel, cache: Path) -> Path:
    """The file to give to QEMU: the uncompressed image from the cache (made now if it is not
    there), or the kernel's own image where that cannot be had."""
    status = kernel.image.stat()
    name = f"{kernel.version}-{status.st_size:x}-{status.st_mtime_ns:x}"
    target = cache / "images" / name
    if target.exists():
        return target
    image = unpacked_kernel(kernel.image.read_bytes())
    if image is None or not has_pvh_entry(image):
        return kernel.image
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{name}.{os.getpid()}")
    scratch.write_bytes(image)
    scratch.rename(target)
    return target


def unpacked_kernel(image: bytes) -> bytes | None:
    """The ELF kernel inside a bzImage, or None for another format or a compression that Python
    lacks."""
    if image[0x202:0x206] != _BOOT_MAGIC:
        return None
    (protocol,) = struct.unpack_from("<H", image, 0x206)
    if protocol < _PAYLOAD_PROTOCOL:
        return None
    setup_sectors = image[0x1F1] or 4
    offset, nbytes = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * _SECTOR_BYTES + offset
    payload = image[start : start + nbytes]
    try:
        if payload.startswith(b"\xfd7zXZ\x00"):
            # The uncompressed size follows the stream: a decompressor object stops before it.
            return lzma.LZMADecompressor().decompress(payload)
        if payload.startswith(b"\x1f\x8b"):
            return zlib.decompressobj(wbits=31).decompress(payload)
    except (lzma.LZMAError, zlib.error):
        return None
    return None


def has_pvh_entry(image: bytes) -> bool:
    """Whether an ELF64 kernel has the note that QEMU needs to start it directly."""
    if image[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", image, 32)
    entry_bytes, entries = struct.unpack_from("<HH", image, 54)
    for index in range(entries):
        (kind,) = struct.unpack_from("<I", image, table + index * entry_bytes)
        offset, nbytes = struct.unpack_from("<Q16xQ", image, table + index * entry_bytes + 8)
        if kind == _PT_NOTE and _notes_have_entry(image[offset : offset + nbytes]):
            return True
    return False


def _notes_have_entry(notes: bytes) -> bool:
    position = 0
    while position + 12 <= len(notes):
        name_bytes, value_bytes, kind = struct.unpack_from("<III", notes, position)
        name = notes[position + 12 : position + 12 + name_bytes]
        if kind == _XEN_PHYS32_ENTRY and name == b"Xen\0":
            return True
        position += 12 + _aligned(name_bytes) + _aligned(value_bytes)
    return False


def _aligned(nbytes: int) -> int:
    return (nbytes + 3) & ~3
