"""What a bulk connection carries once it is admitted: requests for ranges, answers, raw bytes.

One request at a time: magic, transfer id, offset and length; the answer is a status and, when that
is OK, exactly as many bytes as were asked for. BulkReader and BulkWriter are its two ends.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = 0x6F726274
REQUEST = struct.Struct(">IQQQ")  # magic, transfer id, offset, length
ANSWER = struct.Struct(">IIQ")  # magic, status, length of the bytes that follow

# A callback moves at most this much, so that a fast peer cannot keep the event loop from its timers
# for more than about a millisecond.
CALLBACK_BYTES = 4 << 20

NO_BYTES = memoryview(b"")


class BulkStatus(IntEnum):
    """How an owner answers a request. All but OK are followed by no bytes."""

    OK = 0
    UNKNOWN_TRANSFER = 1
    RANGE = 2
    SOURCE_FAILED = 3


class ConnectionDied(Exception):
    """Inside the transport only: the connection ended before a pull was complete. `answered`: some
    byte of the answer had arrived, so the request is not repeated."""

    def __init__(self, cause: str, answered: bool) -> None:
        super().__init__(cause)
        self.answered = answered
