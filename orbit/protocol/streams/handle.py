"""Names of streams: who receives, and which of its streams. Plain data, to be sent to a producer by
any road.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ...errors import UsageError
from ...model import WorkerId

_U64_MAX = (1 << 64) - 1
_TEXT = re.compile(r"stream-([0-9a-f]{16})-([0-9a-f]{16})\Z")
_BYTES = struct.Struct(">QQ")
HANDLE_BYTES = _BYTES.size


@dataclass(frozen=True, slots=True, order=True)
class StreamHandle:
    """The receiving end of one stream: the receiver's worker id, and the stream's own id (random,
    so that a handle of an earlier life names nothing). `str`, `bytes` and pickle carry it.
    """

    worker_id: WorkerId
    stream_id: int

    def __post_init__(self) -> None:
        if not (0 < self.worker_id <= _U64_MAX and 0 < self.stream_id <= _U64_MAX):
            raise UsageError(f"not a stream handle: ({self.worker_id}, {self.stream_id})")

    def __str__(self) -> str:
        return f"stream-{self.worker_id:016x}-{self.stream_id:016x}"

    def __bytes__(self) -> bytes:
        return _BYTES.pack(self.worker_id, self.stream_id)

    @classmethod
    def parse(cls, text: str) -> StreamHandle:
        """Inverse of `str`. Raises UsageError."""
        match = _TEXT.match(text)
        if match is None:
            raise UsageError(f"not a stream handle: {text[:64]!r}")
        return cls(WorkerId(int(match[1], 16)), int(match[2], 16))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> StreamHandle:
        """Inverse of `bytes`. Raises UsageError."""
        if len(data) != HANDLE_BYTES:
            raise UsageError(f"not a stream handle: {len(data)} bytes")
        worker_id, stream_id = _BYTES.unpack(data)
        return cls(WorkerId(worker_id), stream_id)
