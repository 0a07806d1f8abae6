"""The one door to msgpack: plain values to bytes and back, with strict limits.

Decoding is for bytes of strangers: exactly one value, no extension types or timestamps, text that
is valid UTF-8, maps with unique text keys, bounded nesting and lengths. Whatever is wrong raises
PeerProtocolError; nothing is allocated beyond what the input's own size justifies. This module
knows no messages and no frames.
"""

from __future__ import annotations

from typing import NoReturn

import msgpack  # type: ignore[import-untyped]

from ..errors import InternalError, PeerProtocolError

DEPTH_MAX = 16  # the deepest message nests 5 levels; the rest is room for fields added later
LIST_LENGTH_MAX = 65_536  # a one-byte claim may not make us allocate more than 512 KiB of pointers
MAP_LENGTH_MAX = 4_096

Readable = bytes | bytearray | memoryview


def encode(value: object) -> bytes:
    """One value as msgpack. Raises InternalError: a caller let through what has no encoding."""
    try:
        packed = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:  # ValueError: too deep, or not UTF-8
        raise InternalError(f"cannot be encoded: {error}") from error
    assert isinstance(packed, bytes)
    return packed


def decode(data: Readable) -> object:
    """Exactly one value, made of None, bool, int, float, str, bytes, list and dict (with str keys).

    Raises PeerProtocolError. The result never refers to `data`.
    """
    try:
        value: object = msgpack.unpackb(
            data,
            raw=False,
            unicode_errors="strict",
            strict_map_key=False,  # _unique_map checks the keys, and is stricter
            object_pairs_hook=_unique_map,
            ext_hook=_refuse_extension,
            max_array_len=min(LIST_LENGTH_MAX, len(data)),
            max_map_len=min(MAP_LENGTH_MAX, len(data)),
            max_ext_len=0,  # timestamps never reach ext_hook, but this
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerProtocolError(f"undecodable bytes: {_reason(error)}") from error
    _check_depth(value, DEPTH_MAX)
    return value


def _unique_map(pairs: list[tuple[object, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if type(key) is not str:
            raise ValueError(f"a map key is {type(key).__name__}, not text")
        if key in result:
            raise ValueError(f"map key {key[:40]!r} stands twice")
        result[key] = value
    return result


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _check_depth(value: object, levels_left: int) -> None:
    # msgpack's own stack stops at 1024 levels, so the recursion here is what needs the bound.
    if not isinstance(value, dict | list):
        return
    if levels_left == 0:
        raise PeerProtocolError(f"undecodable bytes: nested deeper than {DEPTH_MAX} levels")
    for child in value.values() if type(value) is dict else value:
        if type(child) in _NESTED:
            _check_depth(child, levels_left - 1)


_NESTED = (dict, list)  # msgpack makes no subclasses of them


def _reason(error: BaseException) -> str:
    return str(error)[:120] or type(error).__name__
