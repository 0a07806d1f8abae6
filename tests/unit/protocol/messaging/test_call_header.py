"""The header of calls: golden bytes, limits at and above their edge, and refusals of strangers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import PeerProtocolError, UsageError
from orbit.protocol.codec import encode
from orbit.protocol.messaging.call_header import (
    MAP_BYTES_MAX,
    NAME_BYTES_MAX,
    VALUE_BYTES_MAX,
    EventCode,
    Outcome,
    Wants,
    pack_budget,
    pack_call,
    pack_headers,
    pack_name,
    parse_budget,
    parse_event,
    parse_outcome,
    parse_request,
)
from orbit.protocol.messaging.packets import HEADER_BYTES_MAX

REQUEST = "01020102030405060708" + "0473756d7e".replace("7e", "21") + "0005" + "81a16ba176"


def test_golden_bytes() -> None:
    packed = pack_call(
        Wants.RESPONSE, 0x0102030405060708, pack_name("sum!"), pack_headers({"k": "v"})
    )
    assert packed.hex() == REQUEST
    parsed = parse_request(packed)
    assert parsed == (Wants.RESPONSE, 0x0102030405060708, "sum!", {"k": "v"})
    assert pack_call(Wants.NOTHING, 0, b"f").hex() == "0100" + "00" * 8 + "0166" + "0000"
    assert pack_call(Outcome.OK, 7).hex() == "0100" + "00" * 7 + "07" + "00" + "0000"
    assert parse_event(pack_call(EventCode.STAGED_DONE, 9)).id == 9


def test_golden_bytes_of_a_staged_call() -> None:
    headers = {"_rv": "0000000000000001-2", "_rv_budget_ms": pack_budget(1.5)}
    packed = pack_call(Wants.ACK, 3, pack_name("f"), pack_headers(headers))
    expected = (
        *("01", "01", "0000000000000003", "0166", "002b", "82"),
        *("a3", b"_rv".hex(), "b2", b"0000000000000001-2".hex()),
        *("ad", b"_rv_budget_ms".hex(), "a4", b"1500".hex()),
    )
    assert packed.hex() == "".join(expected)
    assert parse_request(packed).headers == headers


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1e-12, "1"), (0.001, "1"), (0.001_000_001, "2"), (0.3, "300"), (30.0, "30000")],
)
def test_a_budget_is_rounded_up_to_milliseconds(seconds: float, text: str) -> None:
    assert pack_budget(seconds) == text


@given(st.floats(1e-9, 1e9))
def test_a_budget_is_never_shorter_than_what_is_left(seconds: float) -> None:
    assert 0 <= parse_budget(pack_budget(seconds)) - seconds + 1e-6 < 0.0011


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e3", " 1", "x", "²", "9" * 21])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(PeerProtocolError):
        parse_budget(text)


@given(
    st.sampled_from(list(Wants)),
    st.integers(1, (1 << 64) - 1),
    st.text(min_size=1, max_size=60),
    st.dictionaries(st.text(max_size=20), st.text(max_size=100), max_size=8),
)
def test_requests_come_back(wants: Wants, call_id: int, name: str, headers: dict[str, str]) -> None:
    call_id = call_id if wants else 0
    packed = pack_call(wants, call_id, pack_name(name), pack_headers(headers))
    assert parse_request(packed) == (wants, call_id, name, headers)


def test_names_at_and_over_the_limit() -> None:
    assert len(pack_name("n" * NAME_BYTES_MAX)) == NAME_BYTES_MAX
    for name in ("", "n" * (NAME_BYTES_MAX + 1), "é" * 128, "\ud800"):
        with pytest.raises(UsageError):
            pack_name(name)
    with pytest.raises(UsageError):
        pack_name(b"bytes")  # type: ignore[arg-type]


def test_values_at_and_over_the_limit() -> None:
    pack_headers({"k": "v" * VALUE_BYTES_MAX})
    for headers in ({"k": "v" * (VALUE_BYTES_MAX + 1)}, {"k": 1}, {1: "v"}, {"k": "\ud800"}):
        with pytest.raises(UsageError):
            pack_headers(headers)  # type: ignore[arg-type]


def test_a_map_at_and_over_the_limit() -> None:
    def of_size(nbytes: int) -> dict[str, str]:
        headers = {f"{n:02}": "v" * 1000 for n in range(16)}
        spare = nbytes - len(encode(headers))
        headers["tail"] = "v" * (spare - len(encode("tail")) - 3)
        return headers

    largest = of_size(MAP_BYTES_MAX)
    packed = pack_headers(largest)
    assert len(packed) == 2 + MAP_BYTES_MAX
    whole = pack_call(Wants.NOTHING, 0, pack_name("n" * NAME_BYTES_MAX), packed)
    assert len(whole) <= HEADER_BYTES_MAX
    assert parse_request(whole).headers == largest
    with pytest.raises(UsageError, match="limit is 16384"):
        pack_headers(of_size(MAP_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("packed", "what"),
    [
        (b"", "cut short"),
        (pack_call(0, 0, b"f")[:-1], "cut short"),
        (pack_call(0, 0, b"f") + b"x", "announces"),
        (b"\x02" + pack_call(0, 0, b"f")[1:], "schema 2"),
        (pack_call(3, 1, b"f"), "wants 3"),
        (pack_call(1, 1), "without a handler name"),
        (pack_call(0, 1, b"f"), "does not fit"),
        (pack_call(2, 0, b"f"), "does not fit"),
        (pack_call(0, 0, b"\xff"), "not UTF-8"),
        (pack_call(0, 0, b"f", b"\x00\x01\x90"), "expected a map"),
        (pack_call(0, 0, b"f", b"\x00\x04" + encode({"k": 1})), "not text"),
        (pack_call(0, 0, b"f", b"\x00\x02\x81\xc1"), "undecodable"),
    ],
)
def test_refusals(packed: bytes, what: str) -> None:
    with pytest.raises(PeerProtocolError, match=what):
        parse_request(packed)


def test_oversize_values_of_strangers_are_refused() -> None:
    body = encode({"k": "v" * (VALUE_BYTES_MAX + 1)})
    with pytest.raises(PeerProtocolError, match="over 1024"):
        parse_request(pack_call(0, 0, b"f", len(body).to_bytes(2, "big") + body))
    body = encode({f"{n:03}": "v" * 1000 for n in range(20)})
    with pytest.raises(PeerProtocolError, match="limit is 16384"):
        parse_request(pack_call(0, 0, b"f", len(body).to_bytes(2, "big") + body))


def test_unknown_outcomes_and_events_are_refused() -> None:
    with pytest.raises(PeerProtocolError, match="outcome 2"):
        parse_outcome(pack_call(2, 1))
    with pytest.raises(PeerProtocolError, match="event 1"):
        parse_event(pack_call(1, 1))


@given(st.binary(max_size=80))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    for parse in (parse_request, parse_outcome, parse_event):
        try:
            parsed = parse(data)
        except PeerProtocolError:
            continue
        again = pack_call(
            parsed.code, parsed.id, parsed.text.encode(), pack_headers(parsed.headers)
        )
        assert parse(again) == parsed
