"""What a bulk connection carries once it is admitted: requests for ranges, answers, raw bytes.

One request at a time: magic, transfer id, offset and length. To a pull the answer is a status and,
when that is OK, exactly as many bytes as were asked for. To a push it is a status; when that is OK
the bytes follow from the one who asked, and a second answer says that all of them have arrived.
BulkConsumer and BulkOwner are the two ends.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = 0x6F726274  # of answers, and of requests to pull
MAGIC_PUSH = 0x6F726270  # an owner from before it ends the connection
REQUEST = struct.Struct(">IQQQ")  # magic, transfer id, offset, length
ANSWER = struct.Struct(">IIQ")  # magic, status, length of the bytes that follow

# A callback moves at most this much, so that a fast peer cannot keep the event loop from its timers
# for more than about a millisecond.
CALLBACK_BYTES = 4 << 20


class BulkStatus(IntEnum):
    """How an owner answers a request. All but OK are followed by no bytes."""

    OK = 0
    UNKNOWN_TRANSFER = 1
    RANGE = 2
    SOURCE_FAILED = 3
    DIRECTION = 4
    WRITTEN = 5


class ConnectionDied(Exception):
    """Inside the transport only: the connection ended before a transfer was complete. `answered`:
    some byte of an answer had arrived, so the request is not repeated.
    """

    def __init__(self, cause: str, answered: bool) -> None:
        super().__init__(cause)
        self.answered = answered
