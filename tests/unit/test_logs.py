"""Logging that a program asks for: one handler, text or JSON, and nothing by itself."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

import orbit
from orbit.logs import JsonFormatter

LOGGER = logging.getLogger("orbit")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])


def test_json_lines_have_the_fields_of_a_record() -> None:
    out = io.StringIO()
    orbit.configure_logging("debug", json=True, stream=out)
    fields = {"event": "transfer_by_tcp", "peer": "ab-1", "path": orbit.PathName.TCP}
    reason = orbit.PathReason.NO_DEVICE
    logging.getLogger("orbit.verbs").info("by %s", "tcp", extra={**fields, "reason": reason})
    line = json.loads(out.getvalue())
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "orbit.verbs",
        "message": "by tcp",
        "event": "transfer_by_tcp",
        "peer": "ab-1",
        "path": "tcp",
        "reason": "no_device",
    }


def test_an_exception_is_told_with_its_code() -> None:
    out = io.StringIO()
    orbit.configure_logging(json=True, stream=out)
    try:
        raise orbit.ClosedError("the node")
    except orbit.OrbitError:
        LOGGER.exception("two\nlines")
    (line,) = out.getvalue().splitlines()
    found = json.loads(line)
    assert (found["code"], found["error"]) == ("closed", "the node is closed")
    assert found["message"] == "two\nlines"
    assert "Traceback" in found["traceback"]


def test_configuring_again_replaces_the_handler_and_leaves_others() -> None:
    other = logging.NullHandler()
    LOGGER.addHandler(other)
    first, second = io.StringIO(), io.StringIO()
    orbit.configure_logging("info", stream=first)
    handler = orbit.configure_logging("warning", stream=second)
    LOGGER.info("not this")
    LOGGER.warning("but this")
    assert first.getvalue() == ""
    assert second.getvalue().endswith("WARNING orbit: but this\n")
    assert [h for h in LOGGER.handlers if h in (other, handler)] == [other, handler]


def test_a_level_that_is_none() -> None:
    with pytest.raises(orbit.UsageError, match="loud"):
        orbit.configure_logging("loud")


def test_the_time_of_a_line_is_utc() -> None:
    record = logging.LogRecord("orbit", logging.INFO, "", 0, "m", (), None)
    record.created, record.msecs = 86_400.25, 250.0
    assert json.loads(JsonFormatter().format(record))["ts"] == "1970-01-02T00:00:00.250Z"
