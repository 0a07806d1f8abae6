"""Messages between two nodes on two hosts over SoftRoCE: bounded memory under a flood, what a dead
peer and a broken road leave behind, and every way in which messages end up on TCP, with its reason.

The counts are CI's; ORBIT_SOAK (`make soak`) makes them the cases' own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.softroce.message_hosts import SOAK, Host, Hosts, wait_until

KIB, MIB = 1 << 10, 1 << 20
MIXED = (4, 64, 256, 257, 4096, 8100, 20_000)  # inline, by its slab, in segments
FLOOD_S = 60.0 if SOAK else 4.0
LOSSY_COUNT = 20_000 if SOAK else 300
# Outstanding calls of a peer that dies.
CALLS = {"idle": 1000, "sending": 1000 if SOAK else 200, "receiving": 1000 if SOAK else 200}
FAST_S = 5.0  # outstanding calls of a dead peer have failed by then
# What a node holds beside what it has promised: the interpreter's own freedom.
SLACK_BYTES = 16 * MIB


@pytest.fixture(scope="module")
def hosts(message_hosts: Hosts) -> Iterator[Hosts]:
    yield message_hosts
    message_hosts.close()


def by_rdma(sender: Host) -> None:
    """All that it ever sent went by RDMA."""
    frames = sender.statistics()["frames_sent"]
    assert frames.get("rdma", 0) > 0, frames
    assert not frames.get("tcp", 0), frames


def greet(sender: Host, *receivers: Host) -> None:
    """An RDMA link in place."""
    for receiver in receivers:
        assert sender.do("call", to=receiver.name)["by"] == "rdma"


def goes_by(sender: Host, receiver: Host, transport: str, **wanted: Any) -> None:
    """A call succeeds by that transport, without a second try."""
    found = sender.do("call", to=receiver.name, **wanted)
    assert (found["by"], found["same"]) == (transport, True)


# --- a flood --------------------------------------------------------------------------------------


def test_a_flood_to_a_slow_handler_is_bounded_and_gap_free(hosts: Hosts) -> None:
    inbound_bytes, slabs, slab_bytes = (8 * MIB if SOAK else MIB), 64, 8 * KIB
    eager_bytes = 256 * KIB if SOAK else 64 * KIB
    bounds = {"inbound_max_bytes": inbound_bytes, "eager_max_bytes": eager_bytes}
    hosts.open(hosts.a, hosts.b, messaging={**bounds, "credits": slabs, "slab_bytes": slab_bytes})
    hosts.b.do("slow", delay_s=0.01)
    greet(hosts.a, hosts.b)
    not_ready, packets = hosts.receiver_not_ready(), hosts.sent_pkts()
    start = hosts.b.do("memory", reset=True)
    hosts.a.begin("flood", "flood", to="b", sizes=[4096], seconds=FLOOD_S)
    flood = hosts.a.finish("flood")
    assert flood["failures"] == {}
    assert flood["refused"] > 0  # the bound was met
    peak = hosts.b.do("memory")["VmHWM"] - start["VmRSS"]
    assert peak <= inbound_bytes + slabs * slab_bytes + SLACK_BYTES
    hosts.b.do("slow", delay_s=0)
    found = hosts.b.do("await_sink", count=flood["sent"], sender=hosts.a.worker_id)
    assert (found["count"], found["faults"]) == (flood["sent"], [])
    assert hosts.receiver_not_ready() == not_ready
    assert hosts.sent_pkts() - packets >= flood["sent"]
    by_rdma(hosts.a)
    print(f"{flood['sent']} messages in {FLOOD_S:g} s, peak {peak / MIB:.1f} MiB over the start")


# --- the death of a peer --------------------------------------------------------------------------


@pytest.mark.parametrize("victim_is", list(CALLS))
def test_a_killed_peer_fails_its_calls_at_once_and_its_next_life_is_reached_at_the_first_try(
    hosts: Hosts, victim_is: str
) -> None:
    survivor, victim = hosts.a, hosts.b
    hosts.open(survivor, victim)
    greet(survivor, victim)
    victim.do("shut", shut=True)
    survivor.begin("calls", "calls", to="b", count=CALLS[victim_is], timeout=100)
    victim.do("await_held", count=CALLS[victim_is])
    if victim_is == "sending":
        victim.begin("flood", "flood", to="a", sizes=MIXED, seconds=60)
    elif victim_is == "receiving":
        survivor.begin("flood", "flood", to="b", sizes=MIXED, seconds=60)
    before = time.monotonic()
    victim.kill()
    calls = survivor.finish("calls")
    assert calls["outcomes"] == {"OutcomeUnknown": CALLS[victim_is]}, calls
    assert calls["end"] - before < FAST_S
    if victim_is == "receiving":
        assert "error" not in survivor.finish("flood")
    assert survivor.statistics()["pending_calls"] == 0
    survivor.do("await_links", count=0, sessions=0)
    if victim_is == "idle":
        assert survivor.do("idle_cpu", seconds=2)["share"] < 0.05
    victim.address = victim.do("open")["address"]
    survivor.do("meet", name="b", address=victim.address)
    goes_by(survivor, victim, "rdma")
    victim.do("meet", name="a", address=survivor.address)
    goes_by(victim, survivor, "rdma")
    by_rdma(victim)


@pytest.mark.parametrize("call_timeout_s", [3.0])
def test_a_stopped_peer_costs_its_own_calls_and_no_others(
    hosts: Hosts, call_timeout_s: float
) -> None:
    """Half of a call's time standing still is survived, three times of it is a typed timeout, and
    neither ends the link; whoever else lives on that host notices nothing.
    """
    hosts.open(hosts.a, hosts.b, hosts.c)
    greet(hosts.a, hosts.b, hosts.c)
    with hosts.b.stopped():
        hosts.a.begin("calls", "calls", to="b", count=8, name="echo", timeout=call_timeout_s)
        time.sleep(call_timeout_s / 2)
    assert hosts.a.finish("calls")["outcomes"] == {"ok": 8}
    with hosts.b.stopped():
        begin = time.monotonic()
        hosts.a.begin("calls", "calls", to="b", count=8, name="echo", timeout=call_timeout_s)
        hosts.a.begin("others", "ping_pong", to="c", turns=100, seed=10)
        assert "error" not in hosts.a.finish("others")
        calls = hosts.a.finish("calls")
        assert calls["outcomes"] == {"DeadlineExceeded": 8}
        assert calls["end"] - begin < 2 * call_timeout_s
        time.sleep(max(0.0, begin + 3 * call_timeout_s - time.monotonic()))
    goes_by(hosts.a, hosts.b, "rdma")
    found = hosts.a.statistics()
    assert found["late_replies"] == 8
    assert (found["sessions"], found["links"]) == (2, ["rdma", "rdma"])
    assert hosts.a.events("MessageLinkClosed") == []


# --- a bad road -----------------------------------------------------------------------------------


def test_one_percent_loss_loses_and_doubles_nothing(hosts: Hosts) -> None:
    hosts.open(hosts.a, hosts.b)
    greet(hosts.a, hosts.b)
    with hosts.netem("loss", "1%"):
        for sender, to in ((hosts.a, "b"), (hosts.b, "a")):
            sender.begin("flood", "flood", to=to, sizes=MIXED, count=LOSSY_COUNT)
            sender.begin("calls", "calls", to=to, count=50, name="echo", nbytes=9000)
        for sender, receiver in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
            flood = sender.finish("flood")
            assert (flood["sent"], flood["failures"]) == (LOSSY_COUNT, {})
            assert sender.finish("calls")["outcomes"] == {"ok": 50}
            found = receiver.do("await_sink", count=LOSSY_COUNT, sender=sender.worker_id)
            assert (found["count"], found["faults"]) == (LOSSY_COUNT, [])
        dropped = hosts.dropped_packets()
    assert dropped > 0
    print(f"{2 * LOSSY_COUNT} messages, {dropped} packets dropped")
    for host in (hosts.a, hosts.b):
        by_rdma(host)
        assert host.events("MessageLinkClosed") == []


def test_rdma_that_falls_silent_fails_what_is_on_its_way_and_tcp_goes_on(hosts: Hosts) -> None:
    """UDP 4791 alone is dropped. No link gets ready any more, and that epoch stays on TCP."""
    hosts.open(hosts.a, hosts.b, messaging={"ready_timeout_s": 1.5})
    greet(hosts.a, hosts.b)
    with hosts.netem("loss", "100%"):
        calls = hosts.a.do("calls", to="b", count=20, name="echo", timeout=30)
        assert calls["outcomes"] == {"OutcomeUnknown": 20}, calls
        goes_by(hosts.a, hosts.b, "tcp")
        goes_by(hosts.b, hosts.a, "tcp")
    goes_by(hosts.a, hosts.b, "tcp")
    for host in (hosts.a, hosts.b):
        assert len(host.events("MessageLinkClosed", transport="rdma")) == 1
        assert len(host.events("SessionOpened")) == 1
        assert host.events("SessionClosed") == []
    assert hosts.a.events("TransportRefused", transport="rdma", reason="not_ready")


def test_a_link_that_never_gets_ready_leaves_its_epoch_on_tcp(hosts: Hosts) -> None:
    for first, second in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
        hosts.open(hosts.a, hosts.b, messaging={"ready_timeout_s": 1.5})
        with hosts.netem("loss", "100%"):
            flood = first.do("flood", to=second.name, sizes=MIXED, count=100)
            assert (flood["sent"], flood["failures"]) == (100, {})
            found = second.do("await_sink", count=100, sender=first.worker_id)
            assert (found["count"], found["faults"]) == (100, [])
        goes_by(first, second, "tcp")
        demanded = first.ask("call", to=second.name, transport="rdma")
        assert (demanded["error"], "not_ready" in demanded["text"]) == ("PathUnavailable", True)
        chosen = first.events("TransportChosen")
        assert [(c["transport"], c["reason"]) for c in chosen] == [("tcp", "not_ready")]
        assert first.statistics()["frames_sent"].get("rdma", 0) == 0
        wait_until(lambda: hosts.rails_with_links() == [])


def test_tcp_that_falls_silent_leaves_messages_on_rdma_until_somebody_asks_by_it(
    hosts: Hosts,
) -> None:
    timeouts = {"call_s": 3.0, "no_progress_s": 1.0, "connect_s": 1.0, "handshake_s": 1.0}
    messaging = {"ping_timeout_s": 1.0}
    hosts.open(hosts.a, hosts.b, timeouts=timeouts, messaging=messaging)
    greet(hosts.a, hosts.b)
    handle = hosts.b.do("register")["handle"]
    with hosts.tcp_silent():
        goes_by(hosts.a, hosts.b, "rdma")
        goes_by(hosts.b, hosts.a, "rdma")
        assert hosts.a.do("health", to="b") == {"kind": "ok", "by": "rdma"}
        hosts.b.do("shut", shut=True)
        hosts.a.begin("calls", "calls", to="b", count=10, timeout=60)
        hosts.b.do("await_held", count=10)
        assert hosts.a.ask("get", to="b", handle=handle)["error"] == "PeerLost"
        # The connection is over, and with it its epoch: what was outstanding hears so now.
        assert hosts.a.finish("calls")["outcomes"] == {"OutcomeUnknown": 10}
        assert hosts.a.ask("call", to="b", timeout=10)["error"] == "NotAdmitted"
    hosts.b.do("shut", shut=False)
    goes_by(hosts.a, hosts.b, "rdma")
    goes_by(hosts.b, hosts.a, "rdma")
    assert hosts.a.do("get", to="b", handle=handle)["same"]


# --- ports that go down ---------------------------------------------------------------------------


def test_a_port_that_goes_down_fails_its_link_and_the_other_rail_takes_over(hosts: Hosts) -> None:
    hosts.open(hosts.a, hosts.b)
    for victim, other in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
        greet(hosts.a, hosts.b)
        other.do("shut", shut=True)
        victim.begin("calls", "calls", to=other.name, count=20, timeout=60)
        other.do("await_held", count=20)
        (rail,) = hosts.rails_with_links()
        with hosts.port_down(f"{victim.name}{rail}"):
            calls = victim.finish("calls")
            assert calls["outcomes"] == {"OutcomeUnknown": 20}, calls
            assert any("port" in text for text in calls["texts"]), calls
            goes_by(victim, other, "rdma")
            goes_by(other, victim, "rdma")
            assert hosts.rails_with_links() == [3 - rail]
        other.do("shut", shut=False)
        for host in (hosts.a, hosts.b):  # the next one needs both rails again
            host.do("await_rails")
    for host in (hosts.a, hosts.b):
        assert host.events("SessionClosed") == []


def test_all_ports_down_leave_messages_on_tcp_with_the_reason(hosts: Hosts) -> None:
    hosts.open(hosts.a, hosts.b)
    greet(hosts.a, hosts.b)
    with hosts.port_down(*hosts.lab.net_devices("A")):
        wait_until(lambda: hosts.a.statistics()["links"] == [])
        goes_by(hosts.a, hosts.b, "tcp")
        goes_by(hosts.b, hosts.a, "tcp")
        assert hosts.a.events("TransportRefused", transport="rdma", reason="port_down")
    assert hosts.a.events("SessionClosed") == []
    hosts.a.do("drop_session", to="b")  # the next epoch looks again
    hosts.a.do("await_links", count=0, sessions=0)
    goes_by(hosts.a, hosts.b, "rdma")


# --- no RDMA from the start -----------------------------------------------------------------------

NO_DEVICE = {"rdma": {"enabled": False}}
NO_BUDGET = {"rdma": {"pool": {"registered_bytes_budget": MIB}}}


@pytest.mark.parametrize(
    ("own", "theirs", "reason"),
    [
        pytest.param({}, NO_DEVICE, "peer_without", id="peer without RDMA"),
        pytest.param(NO_DEVICE, {}, "not_configured", id="own without RDMA"),
        pytest.param(NO_BUDGET, {}, "budget", id="own memory budget"),
        pytest.param({}, NO_BUDGET, "budget", id="the peer's memory budget"),
    ],
)
def test_without_rdma_messages_go_by_tcp_with_the_reason(
    hosts: Hosts, own: dict[str, Any], theirs: dict[str, Any], reason: str
) -> None:
    hosts.open_each({hosts.a: own, hosts.b: theirs})
    packets = hosts.sent_pkts()
    goes_by(hosts.a, hosts.b, "tcp")
    goes_by(hosts.b, hosts.a, "tcp")
    assert hosts.sent_pkts() == packets
    demanded = hosts.a.ask("call", to="b", transport="rdma")
    assert demanded["error"] == "PathUnavailable", demanded
    assert reason in demanded["text"]
    if reason != "not_configured":  # what the node lacks is no refusal of a peer's
        assert hosts.a.events("TransportChosen")[0]["reason"] == reason


def test_no_permission_for_the_device_is_tcp_with_the_reason(hosts: Hosts) -> None:
    hosts.close()
    with hosts.no_permission("A"):
        hosts.a.do("become_user")
        hosts.open(hosts.a, hosts.b)
        goes_by(hosts.a, hosts.b, "tcp")
        goes_by(hosts.b, hosts.a, "tcp")
        demanded = hosts.a.ask("call", to="b", transport="rdma")
        assert (demanded["error"], "permission" in demanded["text"]) == ("PathUnavailable", True)
    hosts.a.kill()


def test_no_lockable_memory_is_tcp_with_the_reason(hosts: Hosts) -> None:
    hosts.close()
    hosts.a.do("become_user", memlock_bytes=2 * MIB)
    hosts.open(hosts.a, hosts.b)
    goes_by(hosts.a, hosts.b, "tcp")
    goes_by(hosts.b, hosts.a, "tcp")
    assert hosts.a.events("TransportRefused", transport="rdma", reason="budget")
    hosts.a.kill()
