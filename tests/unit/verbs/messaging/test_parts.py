"""The small parts: settings, ids, slabs; and who closes messages before their devices."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.config import RdmaConfig
from orbit.errors import ConfigError
from orbit.verbs.messaging.settings import RdmaMessagesConfig
from orbit.verbs.messaging.slabs import stride_of
from orbit.verbs.messaging.wr_ids import (
    MARKER,
    RECEIVE,
    SEQUENCE_MASK,
    SERIAL_MAX,
    marker_id,
    receive_id,
    send_id,
    serial_of,
    slab_of,
)
from orbit.verbs.opening import open_rdma_messages
from orbit.verbs.scripted import ScriptedFabric
from tests.contract.message_pairs import QUICK, Received
from tests.contract.rdma_pairs import QUICK as PATH
from tests.contract.rdma_pairs import join, open_scripted


@pytest.mark.parametrize("serial", [1, 77, SERIAL_MAX])
@pytest.mark.parametrize("sequence", [0, 1, SEQUENCE_MASK, SEQUENCE_MASK + 5])
def test_ids_say_whose_they_are(serial: int, sequence: int) -> None:
    made = send_id(serial, sequence)
    assert 0 < made < 1 << 64
    assert serial_of(made) == serial
    assert made & SEQUENCE_MASK == sequence & SEQUENCE_MASK
    assert not made & (RECEIVE | MARKER)
    assert serial_of(marker_id(serial)) == serial
    assert marker_id(serial) & MARKER


def test_ids_of_receives_differ_by_their_posting() -> None:
    ids = [receive_id(9, generation) for generation in range(1, 50)]
    assert len(set(ids)) == len(ids)
    assert all(i & RECEIVE and slab_of(i) == 9 and i < 1 << 64 for i in ids)
    assert receive_id(9, (1 << 31) + 1) < 1 << 64


def test_slabs_share_no_cache_line() -> None:
    assert [stride_of(n) for n in (1, 64, 65, 8192)] == [64, 64, 128, 8192]


@pytest.mark.parametrize(
    ("name", "value"),
    [("progress", "hope"), ("spin_us", -1), ("retry_cnt", 7), ("receive_slabs", 0)],
)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError):
        replace(RdmaMessagesConfig(), **{name: value})  # type: ignore[arg-type]


def test_how_long_to_spin_depends_on_mode_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert RdmaMessagesConfig().effective_spin_us == 0
    assert RdmaMessagesConfig(progress="spin").effective_spin_us > 0
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert RdmaMessagesConfig().effective_spin_us > 0
    assert RdmaMessagesConfig(spin_us=0).effective_spin_us == 0
    assert RdmaMessagesConfig(progress="polling", spin_us=9).effective_spin_us == 0


def test_a_dead_peer_is_noticed_within_half_a_second() -> None:
    assert 0.4 < RdmaMessagesConfig().detection_s < 0.5


def test_the_configuration_names_the_modes() -> None:
    with pytest.raises(ConfigError, match="event, spin, polling"):
        RdmaConfig(progress="hope")


def test_a_path_closes_its_messages_before_its_devices() -> None:
    async def scenario() -> None:
        fabric = ScriptedFabric()
        for name in ("fake_a", "fake_b"):
            fabric.add_device(name)
        paths = [await open_scripted(fabric, name, config=PATH) for name in ("fake_a", "fake_b")]
        sessions = join(paths[1], paths[0])  # the second one dialed
        ends = [open_rdma_messages(path, QUICK) for path in paths]
        received = [Received(), Received()]
        for messages, client in zip(ends, received, strict=True):
            messages.watch(client, client.on_opened)
        by_side = list(zip(ends, (sessions[1], sessions[0]), strict=True))
        for messages, session in by_side:
            limits = replace(session.peer_hello.limits, message_credits=64, reserve_credits=16)
            session.peer_hello = replace(session.peer_hello, limits=limits)
            session.handlers = messages.handlers()
        dialing, session = next((m, s) for m, s in by_side if s.dialed)
        await dialing.open(session, received[ends.index(dialing)])
        for path in paths:
            await path.close()
        assert all(device.counters().live_objects == 0 for device in fabric.devices.values())
        assert [messages.statistics().registered_bytes for messages in ends] == [0, 0]

    asyncio.run(scenario())
