"""The public face: what a user imports, and the shape of the calls that the documents promise."""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

import orbit

ROOT = Path(__file__).parents[2]
SEND_OPTIONS = ("headers", "timeout", "transport", "wait", "on_error")
# Sends are issued within the call: a coroutine would begin when somebody awaits it. What gives back
# does so without an await too.
PLAIN = {
    *("detach", "release", "withdraw"),
    *("add_peer", "statistics", "send", "sync", "unary", "typed_unary", "handler"),
    *("typed_handler", "remove_handler", "open_stream", "begin_drain"),
}


def test_the_calls_of_a_node() -> None:
    expected = {
        "add_peer": ["address"],
        "register_data": ["buffer", "options"],
        "register_data_pinned": ["buffer", "options"],
        "register_data_in_region": ["guard", "byte_range", "options"],
        "register_data_in_place": ["buffer", "options"],
        "register_destination": ["where", "options"],
        "register_owned": ["buffer"],
        "register_external_memory": ["address", "nbytes", "keep"],
        "alloc_pinned_writer": ["nbytes"],
        "wait_put": ["handle", "timeout"],
        "get_many": ["handles", "into", "transport", "timeout", "concurrency"],
        "put": ["handle", "source", "offset", "transport", "timeout", "progress"],
        "metadata": ["handle"],
        "get": ["handle", "transport", "timeout"],
        "get_into": ["handle", "dest", "transport", "timeout", "progress"],
        "get_pinned": ["handle", "transport", "timeout"],
        "ref_handle": ["handle"],
        "detach": ["handle", "lease"],
        "release": ["handle", "lease"],
        "withdraw": ["handle"],
        "statistics": [],
        "open": [],
        "close": [],
        "send": ["peer", "name", "payload", *SEND_OPTIONS],
        "sync": ["peer", "name", "payload", *SEND_OPTIONS],
        "unary": ["peer", "name", "payload", *SEND_OPTIONS],
        "typed_unary": ["peer", "name", "value", *SEND_OPTIONS],
        "capacity": ["peer", "timeout"],
        "handler": ["name", "function", "mode"],
        "typed_handler": ["name", "function", "mode"],
        "remove_handler": ["name"],
        "list_handlers": ["peer", "timeout"],
        "wait_for_handler": ["peer", "name", "timeout"],
        "open_stream": ["item_type", "capacity"],
        "attach_stream": ["handle", "timeout"],
        "check_health": ["peer", "timeout"],
        "begin_drain": [],
        "graceful_shutdown": ["policy"],
    }
    for name, parameters in expected.items():
        method = getattr(orbit.Node, name)
        assert list(inspect.signature(method).parameters)[1:] == parameters, name
        assert inspect.iscoroutinefunction(method) == (name not in PLAIN), name
        assert method.__doc__


def test_every_public_name_resolves_and_is_documented() -> None:
    for name in orbit.__all__:
        value = getattr(orbit, name)
        if inspect.isclass(value):
            assert value.__doc__, name
    assert set(orbit.__all__) <= set(dir(orbit))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = orbit.no_such_name


def test_handles_travel_as_text_and_by_pickle() -> None:
    handle = orbit.Handle.parse("00000000000000ff-1c")
    assert str(handle) == "00000000000000ff-1c"
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert handle in {handle}
    for text in ("", "ff-1", "00000000000000ff-", "00000000000000ff-0", "x" * 100, "0" * 16 + "-1"):
        with pytest.raises(orbit.UsageError):
            orbit.Handle.parse(text)


def test_every_error_has_a_code_and_one_root() -> None:
    errors = [
        value
        for name in orbit.__all__
        if inspect.isclass(value := getattr(orbit, name)) and issubclass(value, BaseException)
    ]
    assert len(errors) > 20
    assert all(issubclass(error, orbit.OrbitError) for error in errors)
    codes = [error.code for error in errors]
    assert len(codes) == len(set(codes))
    assert issubclass(orbit.DeadlineExceeded, TimeoutError)


def test_availability_never_raises_and_says_what_is_missing() -> None:
    found = orbit.available()
    assert isinstance(found, orbit.Availability)
    assert bool(found) == (found.rdma is orbit.PathReason.OK) == (not found.missing)
    assert str(found).startswith("tcp")


def test_availability_off_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    found = orbit.available()
    assert not found
    assert found.rdma is orbit.PathReason.NO_DEVICE
    assert "Linux" in str(found)


def test_availability_without_pyverbs_and_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    from orbit import availability
    from orbit.verbs import turn

    def missing(kind: str) -> Path:
        raise orbit.DeviceError("helper", "load", 2)

    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    monkeypatch.setattr(turn, "library_path", missing)
    found = orbit.available()
    assert found.rdma is orbit.PathReason.NO_PYVERBS
    assert "python3-pyverbs" in found.missing[0]
    assert "helper" in found.missing[1]


def test_demanded_rdma_is_refused_quickly_and_named() -> None:
    """A pin to a device that no host has stands in for a host without one."""
    program = (
        "import asyncio, orbit\n"
        "async def main():\n"
        "    try:\n"
        "        await orbit.Node(orbit.NodeConfig(transport='rdma')).open()\n"
        "    except (orbit.PathUnavailable, orbit.ConfigError) as error:\n"
        "        print(error.code, error)\n"
        "asyncio.run(main())\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={**os.environ, "ORBIT_DEVICE": "no_such_device"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - started < 30  # far above the 2 s it may take: the machine may be busy
    assert done.stdout.split()[0] in ("path_unavailable", "config"), done
    assert done.stderr == ""


def test_a_first_transfer_reads_as_documented() -> None:
    import asyncio

    async def main() -> None:
        async with orbit.Node() as owner, orbit.Node() as consumer:
            handle = await owner.register_data_pinned(b"a large payload")
            consumer.add_peer(bytes(owner.address))
            data, lease = await consumer.get(handle)
            assert bytes(data) == b"a large payload"
            assert lease.path in (orbit.PathName.TCP, orbit.PathName.RDMA)
            await consumer.release(handle, lease)

    asyncio.run(main())
