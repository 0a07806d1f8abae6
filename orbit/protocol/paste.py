"""Bytes as text that survives pasting: a prefix, base32 and a checksum.

It knows no addresses and no tickets. Text from a person is parsed strictly, except for white space
and capitals, and the error says what is wrong with it.
"""

from __future__ import annotations

import base64
import binascii
import string
import zlib
from typing import Final

from ..errors import UsageError

TEXT_CHARS_MAX: Final = 16_384  # far above any address; keeps a pasted file out of the decoder

_CHECKSUM_BYTES = 4
_BASE32 = frozenset(string.ascii_lowercase + "234567")


def to_text(prefix: str, data: bytes) -> str:
    """`from_text` gives the data back."""
    # Base32 in lower case: a double click takes all of it, and no shell or mail program changes it.
    checked = data + zlib.crc32(data, len(prefix)).to_bytes(_CHECKSUM_BYTES, "big")
    return prefix + base64.b32encode(checked).decode("ascii").rstrip("=").lower()


def from_text(what: str, prefix: str, text: str) -> bytes:
    """Raises UsageError; `what` names the thing in it."""
    hint = f"copy the whole text; it begins with {prefix}"
    packed = "".join(text.split())
    if len(packed) > TEXT_CHARS_MAX:
        raise UsageError(f"not a {what}: {len(packed)} characters", hint=hint)
    if not packed.lower().startswith(prefix):
        raise UsageError(f"not a {what}: {packed[:40]!r} does not begin with {prefix!r}", hint=hint)
    body = packed[len(prefix) :].lower()
    strange = next((c for c in body if c not in _BASE32), None)
    if strange is not None:
        raise UsageError(f"not a {what}: the character {strange!r} cannot be in it", hint=hint)
    try:
        checked = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
    except binascii.Error as error:
        raise UsageError(f"not a {what}: it was cut short", hint=hint) from error
    data, checksum = checked[:-_CHECKSUM_BYTES], checked[-_CHECKSUM_BYTES:]
    right = zlib.crc32(data, len(prefix)).to_bytes(_CHECKSUM_BYTES, "big")
    # The second test refuses other spellings of the same bytes (unused bits of the last character).
    if checksum != right or to_text(prefix, data)[len(prefix) :] != body:
        raise UsageError(f"not a {what}: its checksum does not match", hint=hint)
    return data
