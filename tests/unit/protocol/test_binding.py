"""The binding is 141 bytes that match one grant of one epoch, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.model import Address, Incarnation, PeerIdentity, RemoteKey, WorkerId
from orbit.protocol.binding import (
    BINDING_BYTES,
    Binding,
    BindingError,
    Direction,
    GrantRecord,
    process_id,
    verify_binding,
)
from orbit.protocol.codec import encode
from orbit.protocol.descriptor import Descriptor, DescriptorError

_KEY = bytes(range(32))
_u32 = st.integers(0, (1 << 32) - 1)
_u64 = st.integers(0, (1 << 64) - 1)
_id16 = st.binary(min_size=16, max_size=16)


def record(**changes: object) -> GrantRecord:
    values: dict[str, object] = {
        "source_process": process_id(PeerIdentity(WorkerId(1), Incarnation(2))),
        "requester_process": process_id(PeerIdentity(WorkerId(3), Incarnation(4))),
        "source_connection": b"s" * 16,
        "requester_connection": b"r" * 16,
        "request_id": b"q" * 16,
        "array": 5,
        "index": 1,
        "source_qpn": 17,
        "requester_qpn": 18,
        "generation": 9,
        "address": 0x7F00_0000_1000,
        "length": 4096,
        "key": 0xABCD_EF01,
    }
    return GrantRecord(**(values | changes))  # type: ignore[arg-type]


@st.composite
def records(draw: st.DrawFn) -> GrantRecord:
    length = draw(st.integers(1, (1 << 64) - 1))
    count = draw(st.integers(1, (1 << 32) - 1))
    return record(
        source_process=draw(_id16),
        requester_process=draw(_id16),
        source_connection=draw(_id16),
        requester_connection=draw(_id16),
        request_id=draw(_id16),
        array=draw(_u64),
        index=draw(_u64),
        source_qpn=draw(_u32),
        requester_qpn=draw(_u32),
        generation=draw(_u64),
        address=draw(st.integers(0, (1 << 64) - length)),
        length=length,
        key=draw(_u32),
        direction=draw(st.sampled_from(list(Direction))).value,
        slice_count=count,
        slice_index=draw(st.integers(0, count - 1)),
    )


@given(records(), st.binary(min_size=16, max_size=64))
def test_round_trip(grant: GrantRecord, key: bytes) -> None:
    packed = grant.binding().encode(key)
    assert len(packed) == BINDING_BYTES == 141
    assert Binding.decode(memoryview(packed), key) == grant.binding()
    verify_binding(packed, grant.binding(), key)
    assert GrantRecord.decode(grant.encode()) == grant


@given(records(), st.integers(0, BINDING_BYTES - 1), st.integers(1, 255))
def test_no_changed_byte_passes(grant: GrantRecord, at: int, flip: int) -> None:
    packed = bytearray(grant.binding().encode(_KEY))
    packed[at] ^= flip
    with pytest.raises(BindingError):
        verify_binding(packed, grant.binding(), _KEY)


@pytest.mark.parametrize("size", [0, 133, 140, 142])
def test_only_141_bytes(size: int) -> None:
    data = (record().binding().encode(_KEY) + bytes(8))[:size]
    with pytest.raises(BindingError, match="141"):
        Binding.decode(data, _KEY)


def test_a_receipt_of_another_epoch_does_not_match() -> None:
    packed = record().binding().encode(_KEY)
    with pytest.raises(BindingError, match="keyed check"):
        Binding.decode(packed, _KEY[::-1])


@pytest.mark.parametrize("field", [f.name for f in fields(Binding)])
def test_a_receipt_of_another_grant_names_the_field(field: str) -> None:
    value = getattr(record(), field)
    other = record().binding()
    changed = value[::-1] + b"" if isinstance(value, bytes) else value + 1
    if changed == value:
        changed = b"x" * 16
    other = replace(other, **{field: changed})
    with pytest.raises(BindingError, match=field) as caught:
        verify_binding(other.encode(_KEY), record().binding(), _KEY)
    assert caught.value.fields == (field,)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source_process": b"short"}, "source_process"),
        ({"request_id": bytes(17)}, "request_id"),
        ({"key": 1 << 32}, "key"),
        ({"requester_qpn": 1 << 32}, "requester_qpn"),
        ({"slice_index": 1}, "slice 1 of 1"),
        ({"slice_count": 0}, "slice 0 of 0"),
        ({"length": 0}, "length"),
        ({"address": (1 << 64) - 4095}, "memory"),
        ({"direction": 0}, "direction"),
        ({"direction": 3}, "direction"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        record(**changes)
    wire = record().to_wire() | changes
    with pytest.raises(DescriptorError, match=problem):
        GrantRecord.decode(encode(wire))


@given(st.binary(max_size=200))
def test_garbage_is_no_record(data: bytes) -> None:
    with pytest.raises(DescriptorError):
        GrantRecord.decode(data)


def test_a_record_has_bounded_size() -> None:
    with pytest.raises(DescriptorError, match="1024"):
        GrantRecord.decode(encode(record().to_wire() | {"later": bytes(1024)}))


def test_fields_added_later_are_ignored() -> None:
    assert GrantRecord.decode(encode(record().to_wire() | {"later": 1})) == record()


def test_differences_and_the_descriptor_beside() -> None:
    grant = record()
    assert grant.differences(grant) == ()
    assert record(array=6, key=1).differences(grant) == ("array", "key")
    fitting = Descriptor(
        grant.generation, Address(grant.address), grant.length, RemoteKey(grant.key)
    )
    grant.check_descriptor(fitting)
    for name in ("generation", "address", "length", "key"):
        with pytest.raises(DescriptorError, match=name):
            grant.check_descriptor(replace(fitting, **{name: getattr(fitting, name) + 1}))


def test_a_key_never_shows_in_a_log() -> None:
    for text in (repr(record()), repr(record().binding())):
        assert str(0xABCD_EF01) not in text
