"""The address of a buffer, for peers that are given memory as a number."""

from __future__ import annotations

import ctypes


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
