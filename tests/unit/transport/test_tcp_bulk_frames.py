"""The bytes of the bulk protocol, which must never change: they have no version of their own."""

from __future__ import annotations

import pytest

from orbit.transport.tcp_bulk import ANSWER, MAGIC, MAGIC_PUSH, REQUEST, BulkStatus

_TRANSFER, _OFFSET, _LENGTH = 0x0102030405060708, 0x1112131415161718, 0x2122232425262728


@pytest.mark.parametrize(
    ("magic", "frame"),
    [
        (MAGIC, "6f726274 0102030405060708 1112131415161718 2122232425262728"),
        (MAGIC_PUSH, "6f726270 0102030405060708 1112131415161718 2122232425262728"),
    ],
)
def test_requests(magic: int, frame: str) -> None:
    packed = REQUEST.pack(magic, _TRANSFER, _OFFSET, _LENGTH)
    assert packed == bytes.fromhex(frame)
    assert REQUEST.unpack(packed) == (magic, _TRANSFER, _OFFSET, _LENGTH)


@pytest.mark.parametrize(
    ("status", "frame"),
    [
        (BulkStatus.OK, "6f726274 00000000 2122232425262728"),
        (BulkStatus.UNKNOWN_TRANSFER, "6f726274 00000001 2122232425262728"),
        (BulkStatus.RANGE, "6f726274 00000002 2122232425262728"),
        (BulkStatus.SOURCE_FAILED, "6f726274 00000003 2122232425262728"),
        (BulkStatus.DIRECTION, "6f726274 00000004 2122232425262728"),
        (BulkStatus.WRITTEN, "6f726274 00000005 2122232425262728"),
    ],
)
def test_answers(status: BulkStatus, frame: str) -> None:
    assert ANSWER.pack(MAGIC, status, _LENGTH) == bytes.fromhex(frame)


def test_every_status_is_pinned() -> None:
    assert [status.value for status in BulkStatus] == [0, 1, 2, 3, 4, 5]


def test_lengths_have_64_bits() -> None:
    packed = REQUEST.pack(MAGIC, 1, (1 << 64) - 1, 1 << 40)
    assert REQUEST.unpack(packed)[2:] == ((1 << 64) - 1, 1 << 40)
