"""Proofs and tokens: what the secret and the two hellos of an epoch are turned into.

HMAC-SHA256 throughout. Pure functions, plus the two ends of the single-use rule for bulk
connections. It does not know frames, sockets or where the secret comes from.
"""

from __future__ import annotations

import hmac
from typing import Final

from ..errors import PeerRefused
from .messages import BulkHello

_LISTENER = b"orbit listener"
_DIALER = b"orbit dialer"
_SESSION = b"orbit session"
_BULK = b"orbit bulk"
_BULK_BACK = b"orbit bulk back"

BULK_NONCE_BYTES: Final = 8
# How far bulk connections of one epoch may overtake each other. A consumer opens two at a time, so
# this is ample, and 1024 bits of memory an epoch.
BULK_WINDOW: Final = 1024

SECRET_HINT: Final = "give both sides the same secret (--secret-file)"


def listener_proof(secret: bytes, dialer_hello: bytes, listener_hello: bytes) -> bytes:
    """32 bytes that only a listener with the secret can answer to these hello bytes."""
    return _mac(secret, _LISTENER, dialer_hello, listener_hello)


def dialer_proof(secret: bytes, dialer_hello: bytes, listener_hello: bytes) -> bytes:
    """As `listener_proof`; the role in it keeps one side's proof from serving as the other's."""
    return _mac(secret, _DIALER, dialer_hello, listener_hello)


def session_key(secret: bytes, dialer_hello: bytes, listener_hello: bytes) -> bytes:
    """32 bytes for the keyed checks of this epoch. Never sent. With an empty secret whoever saw the
    hellos can compute it: then it tells epochs apart, and no more."""
    return _mac(secret, _SESSION, dialer_hello, listener_hello)


def proofs_equal(one: bytes, other: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(one, other)


def make_bulk_token(key: bytes, attempt: bytes, nonce: bytes, *, from_dialer: bool = True) -> bytes:
    """What opens one bulk connection of the epoch `attempt`. Both ends may open some; a token of
    the one is none of the other, or an eavesdropper could hand it back to its sender.
    """
    return _mac(key, _BULK if from_dialer else _BULK_BACK, attempt, nonce)


def check_bulk_token(key: bytes, hello: BulkHello, *, from_dialer: bool = True) -> bool:
    """Whether the sender holds the session key. Says nothing about replay: `BulkGate` does."""
    token = make_bulk_token(key, hello.attempt, hello.nonce, from_dialer=from_dialer)
    return hmac.compare_digest(token, hello.token)


class BulkTickets:
    """Consumer's end: one hello for each bulk connection of an epoch, never the same twice.
    `from_dialer`: the consumer dialed the epoch.
    """

    __slots__ = ("_attempt", "_count", "_from_dialer", "_key")

    def __init__(self, key: bytes, attempt: bytes, *, from_dialer: bool = True) -> None:
        self._key = key
        self._attempt = attempt
        self._from_dialer = from_dialer
        self._count = 0

    def next_hello(self) -> BulkHello:
        """A fresh hello. The nonce is a counter, so that the owner can remember all of them."""
        self._count += 1
        nonce = self._count.to_bytes(BULK_NONCE_BYTES, "big")
        token = make_bulk_token(self._key, self._attempt, nonce, from_dialer=self._from_dialer)
        return BulkHello(self._attempt, nonce, token)


class BulkGate:
    """Owner's end: admits each hello of an epoch at most once, for as long as the epoch lives.

    A set of seen nonces would either grow or forget; a rising counter with a window of recent ones
    does neither (as IPsec's replay window does).
    """

    __slots__ = ("_attempt", "_from_dialer", "_highest", "_key", "_seen")

    def __init__(self, key: bytes, attempt: bytes, *, from_dialer: bool = True) -> None:
        self._key = key
        self._attempt = attempt
        self._from_dialer = from_dialer
        self._highest = 0
        self._seen = 0  # bit i: nonce _highest - i was admitted

    def admit(self, hello: BulkHello) -> None:
        """Raises PeerRefused("auth"). A refused hello changes nothing."""
        if hello.attempt != self._attempt or len(hello.nonce) != BULK_NONCE_BYTES:
            raise PeerRefused("auth", "not a bulk connection of this epoch")
        if not check_bulk_token(self._key, hello, from_dialer=self._from_dialer):
            raise PeerRefused("auth", "wrong bulk token", hint=SECRET_HINT)
        number = int.from_bytes(hello.nonce, "big")
        behind = self._highest - number
        if number == 0 or behind >= BULK_WINDOW or (behind >= 0 and self._seen >> behind & 1):
            raise PeerRefused("auth", "a bulk token is good for one connection")
        if behind < 0:
            # A jump beyond the window leaves nothing of the old one; shifting by it would be huge.
            self._seen = self._seen << -behind if -behind < BULK_WINDOW else 0
            self._seen = (self._seen & ((1 << BULK_WINDOW) - 1)) | 1
            self._highest = number
        else:
            self._seen |= 1 << behind


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
