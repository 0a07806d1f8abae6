"""What could not be proven quiet is kept alive and listed."""

from __future__ import annotations

import gc
import weakref

import pytest

from orbit.errors import Unquiesced
from orbit.runtime import retained


class Holder:
    pass


def test_the_holder_lives_on_and_the_entry_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[retained.Retained] = []
    monkeypatch.setattr(retained, "_kept", kept)
    holder = Holder()
    alive = weakref.ref(holder)
    retained.retain(Unquiesced("window 7", 4096, "drain timed out"), holder)
    del holder
    gc.collect()
    assert alive() is not None
    (entry,) = retained.retained()
    assert (entry.what, entry.nbytes, entry.cause) == ("window 7", 4096, "drain timed out")
    assert entry.age_s >= 0
    assert "drain timed out" in caplog.text


def test_a_late_proof_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "_kept", [])
    holder = Holder()
    alive = weakref.ref(holder)
    entry = retained.retain(Unquiesced("a region", 4096, "refused"), holder)
    other = retained.retain(Unquiesced("another", 1, "refused"), Holder())
    del holder
    retained.proven(entry)
    assert retained.retained() == (other,)
    del entry
    gc.collect()
    assert alive() is None
