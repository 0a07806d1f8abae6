"""Proofs differ by role, secret and hello; bulk tokens open one connection each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import PeerRefused
from orbit.protocol.messages import BulkHello
from orbit.protocol.security import (
    BULK_WINDOW,
    BulkGate,
    BulkTickets,
    check_bulk_token,
    dialer_proof,
    listener_proof,
    make_bulk_token,
    session_key,
)

_KEY = bytes(range(32))
_ATTEMPT = b"a" * 16


def _hello(number: int, key: bytes = _KEY) -> BulkHello:
    nonce = number.to_bytes(8, "big")
    return BulkHello(_ATTEMPT, nonce, make_bulk_token(key, _ATTEMPT, nonce))


def test_role_secret_and_either_hello_change_the_proof() -> None:
    values = {
        f(secret, one, other)
        for f in (listener_proof, dialer_proof, session_key)
        for secret in (b"", b"secret")
        for one, other in ((b"D", b"L"), (b"L", b"D"), (b"D", b"M"))
    }
    assert len(values) == 18
    assert {len(v) for v in values} == {32}


def test_each_ticket_opens_one_connection() -> None:
    tickets, gate = BulkTickets(_KEY, _ATTEMPT), BulkGate(_KEY, _ATTEMPT)
    hellos = [tickets.next_hello() for _ in range(5)]
    for hello in reversed(hellos):  # connections may overtake each other
        gate.admit(hello)
    for hello in hellos:
        with pytest.raises(PeerRefused, match="one connection"):
            gate.admit(hello)


@pytest.mark.parametrize(
    "hello",
    [
        replace(_hello(1), attempt=b"b" * 16),
        replace(_hello(1), token=bytes(32)),
        replace(_hello(1), token=b""),
        replace(_hello(1), nonce=bytes(7) + b"\x02"),
        replace(_hello(1), nonce=b""),
        _hello(0),
        _hello(1, key=_KEY[::-1]),
    ],
)
def test_a_refused_hello_says_auth_and_changes_nothing(hello: BulkHello) -> None:
    gate = BulkGate(_KEY, _ATTEMPT)
    with pytest.raises(PeerRefused) as caught:
        gate.admit(hello)
    assert caught.value.reason == "auth"
    gate.admit(_hello(1))


def test_the_window_forgets_nothing_that_it_would_admit() -> None:
    gate = BulkGate(_KEY, _ATTEMPT)
    gate.admit(_hello(BULK_WINDOW + 5))
    gate.admit(_hello(6))  # the oldest of the window
    for number in (5, 6, BULK_WINDOW + 5):
        with pytest.raises(PeerRefused):
            gate.admit(_hello(number))
    gate.admit(_hello((1 << 64) - 1))  # a jump costs nothing
    with pytest.raises(PeerRefused):
        gate.admit(_hello(BULK_WINDOW + 6))


@given(st.integers(0, 1 << 32), st.lists(st.integers(1, 3000), max_size=80))
def test_never_twice_in_any_order(seed: int, numbers: list[int]) -> None:
    order = numbers + numbers
    random.Random(seed).shuffle(order)
    gate, admitted = BulkGate(_KEY, _ATTEMPT), []
    for number in order:
        fits = number not in admitted and number > max(admitted, default=0) - BULK_WINDOW
        if fits:
            gate.admit(_hello(number))
            admitted.append(number)
        else:
            with pytest.raises(PeerRefused):
                gate.admit(_hello(number))


def test_a_token_belongs_to_its_epoch() -> None:
    assert check_bulk_token(_KEY, _hello(1))
    assert not check_bulk_token(_KEY, replace(_hello(1), attempt=b"b" * 16))


def test_a_token_of_one_end_is_not_taken_by_itself() -> None:
    tickets = BulkTickets(_KEY, _ATTEMPT), BulkTickets(_KEY, _ATTEMPT, from_dialer=False)
    gates = BulkGate(_KEY, _ATTEMPT), BulkGate(_KEY, _ATTEMPT, from_dialer=False)
    for n, series in enumerate(tickets):
        hello = series.next_hello()
        gates[n].admit(hello)
        with pytest.raises(PeerRefused):
            gates[1 - n].admit(hello)
