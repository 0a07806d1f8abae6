"""Trouble that others have met with messages over RDMA, each as its recipe, between nodes on two
hosts over SoftRoCE. The counts are CI's; ORBIT_SOAK (`make soak`) makes them the cases' own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.softroce.message_hosts import SOAK, Host, Hosts, wait_until

KIB = 1 << 10
TURNS = {"poll many": 160_000, "poll one": 40_000} if SOAK else {"poll many": 300, "poll one": 100}
ROUNDS = 500 if SOAK else 6
ROUND_S = 2.0
KILLS = 500 if SOAK else 4
PUSHES = 100_000 if SOAK else 150
USERS = 8
# 64 receives for two peers: 25 each.
TIGHT = {
    "receive_slabs": 64,
    "credits": 16,
    "reply_credits": 4,
    "eager_max_bytes": 16 * KIB,
    "inbound_max_bytes": 64 * KIB,
    "queue_frames": 16,
}


@pytest.fixture(scope="module")
def hosts(message_hosts: Hosts) -> Iterator[Hosts]:
    yield message_hosts
    message_hosts.close()


@pytest.fixture(autouse=True)
def no_receive_was_missing(hosts: Hosts) -> Iterator[None]:
    """Credits keep every device's receive queue filled, whatever the peers do."""
    before = hosts.receiver_not_ready()
    yield
    assert hosts.receiver_not_ready() == before


def greet(sender: Host, *receivers: Host) -> None:
    for receiver in receivers:
        found = sender.do("call", to=receiver.name)
        assert (found["by"], found["same"]) == ("rdma", True)


# --- C17: slow consumer: where does the memory go -------------------------------------------------


def test_a_consumer_that_stands_still_holds_its_senders_back(hosts: Hosts) -> None:
    hosts.open(hosts.a, hosts.b, hosts.c, messaging=TIGHT)
    greet(hosts.a, hosts.b)
    greet(hosts.c, hosts.a)
    hosts.b.do("shut", shut=True)
    hosts.a.begin("push", "push", to="b", nbytes=4096, count=PUSHES, timeout=0.5)
    wait_until(lambda: min(hosts.a.statistics()["credits"]) == 0)
    time.sleep(1)  # some deadlines pass
    # The bound, and what was on its way when it was reached.
    (waiting,) = hosts.b.statistics()["unconsumed_bytes"]
    assert 64 * KIB <= waiting <= (64 + 16 * 8) * KIB
    hosts.c.do("ping_pong", to="a", turns=50, seed=17)  # the sender serves others meanwhile
    assert hosts.b.do("sink", sender=hosts.a.worker_id)["count"] == 0
    hosts.b.do("slow", delay_s=0.001)
    hosts.b.do("shut", shut=False)
    push = hosts.a.finish("push")
    assert push["sent"] == PUSHES, push
    assert push["late"] > 0  # a typed end for each deadline, and nothing of it had left
    found = hosts.b.do("await_sink", count=PUSHES, sender=hosts.a.worker_id)
    assert (found["count"], found["faults"]) == (PUSHES, [])


def test_a_slow_consumer_does_not_take_the_receives_of_others(hosts: Hosts) -> None:
    """Both senders share the 64 receives of one device."""
    hosts.open(hosts.a, hosts.b, hosts.c, messaging=TIGHT)
    greet(hosts.a, hosts.c)
    greet(hosts.b, hosts.a)
    hosts.a.do("shut", shut=True)
    hosts.b.begin("flood", "flood", to="a", sizes=[4096], count=PUSHES)
    hosts.c.do("ping_pong", to="a", turns=50, seed=17)
    hosts.a.do("shut", shut=False)
    assert hosts.b.finish("flood")["failures"] == {}
    found = hosts.a.do("await_sink", count=PUSHES, sender=hosts.b.worker_id)
    assert (found["count"], found["faults"]) == (PUSHES, [])


def test_both_sides_only_send(hosts: Hosts) -> None:
    """No handler finishes on either side: every send ends by its deadline, none by a hang."""
    hosts.open(hosts.a, hosts.b, messaging=TIGHT)
    greet(hosts.a, hosts.b)
    for host in (hosts.a, hosts.b):
        host.do("shut", shut=True)
    for sender, to in ((hosts.a, "b"), (hosts.b, "a")):
        sender.begin("push", "push", to=to, nbytes=4096, count=100, timeout=0.3)
    for host in (hosts.a, hosts.b):
        wait_until(lambda host=host: host.statistics()["queued_frames"] > 0)  # type: ignore[misc]
    time.sleep(1)  # some deadlines pass
    for host in (hosts.a, hosts.b):
        host.do("shut", shut=False)
    for sender, receiver in ((hosts.a, hosts.b), (hosts.b, hosts.a)):
        push = sender.finish("push")
        assert (push["sent"], push["late"] > 0) == (100, True), push
        found = receiver.do("await_sink", count=100, sender=sender.worker_id)
        assert (found["count"], found["faults"]) == (100, [])


# --- C28, C41: a peer that follows no rule --------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["too_long", "runt", "unknown_kind", "reserved_flag", "unknown_version"]
)
def test_a_rogue_packet_costs_one_disconnect_with_a_reason(hosts: Hosts, how: str) -> None:
    hosts.open(hosts.a, hosts.b)
    greet(hosts.a, hosts.b)
    hosts.b.do("shut", shut=True)
    hosts.b.begin("calls", "calls", to="a", count=5, name="echo")
    assert hosts.b.finish("calls")["outcomes"] == {"ok": 5}
    hosts.a.do("misbehave", to="b", how=how)
    for host in (hosts.a, hosts.b):
        wait_until(lambda host=host: host.events("MessageLinkClosed"))  # type: ignore[misc]
    hosts.b.do("shut", shut=False)
    for _ in range(3):
        greet(hosts.a, hosts.b)
        greet(hosts.b, hosts.a)
    for host in (hosts.a, hosts.b):
        (closed,) = host.events("MessageLinkClosed")
        assert closed["cause"], closed
        assert len(host.events("MessageLinkOpened")) == 2
        assert host.events("SessionClosed") == []
        print(how, host.name, closed["cause"])


# --- C33: both sides connect at once --------------------------------------------------------------


def test_simultaneous_opens_end_in_one_link_each_time(hosts: Hosts) -> None:
    hosts.open(hosts.a, hosts.b)
    start, worst_s = None, 0.0
    pair = ((hosts.a, "b"), (hosts.b, "a"))
    for turn in range(ROUNDS):
        at = time.monotonic() + 0.1
        for host, to in pair:
            host.begin("meet", "meet_at", to=to, at=at, users=USERS)
        for host, _ in pair:
            found = host.finish("meet")
            assert found["outcomes"] == {"ok": USERS}, (turn, found)
            if turn:  # the first registers the memory of its links as well
                worst_s = max(worst_s, found["seconds"])
        for host, _ in pair:
            host.do("await_links", count=1)
            assert host.statistics()["links"] == ["rdma"]
        pair[turn % 2][0].do("drop_session", to=pair[turn % 2][1])
        for host, _ in pair:
            host.do("await_links", count=0, sessions=0)
        start = start or hosts.resources()  # what a device holds for links stays
    assert hosts.resources() == start
    for host, _ in pair:
        assert host.statistics()["frames_sent"].keys() <= {"rdma"}
    assert worst_s < ROUND_S
    print(f"{ROUNDS} rounds, the longest {worst_s:.2f} s")


# --- C46: a completion event that is missed or never acknowledged ---------------------------------


@pytest.mark.parametrize("how", list(TURNS))
def test_ping_pong_with_pauses_misses_no_event(hosts: Hosts, how: str) -> None:
    turns, one_by_one = TURNS[how], how == "poll one"
    hosts.open(hosts.a, hosts.b)
    greet(hosts.a, hosts.b)
    greet(hosts.b, hosts.a)
    if one_by_one:
        for host, to in ((hosts.a, "b"), (hosts.b, "a")):
            host.do("misbehave", to=to, how="poll_one_by_one")
    found = hosts.a.do("ping_pong", to="b", turns=turns, seed=46)
    for host in (hosts.a, hosts.b):
        assert host.statistics()["devices"]["woken_by_backstop"] == 0
    print(f"{turns} turns, the longest {found['worst_s'] * 1e3:.1f} ms")
    if one_by_one:
        for host in (hosts.a, hosts.b):
            host.kill()


def test_an_event_that_was_read_by_somebody_who_died_does_not_hold_up_the_end(hosts: Hosts) -> None:
    hosts.open(hosts.a, hosts.b)
    greet(hosts.a, hosts.b)
    hosts.a.do("misbehave", to="b", how="die_with_an_event")
    hosts.a.begin("call", "call", to="b", timeout=5)
    hosts.a.finish("call")  # answered, or not: the backstop may have found it
    assert hosts.a.do("close")["seconds"] < 1


# --- C47: queue pairs pile up when peers keep failing ---------------------------------------------


def test_peers_that_die_while_they_connect_leave_nothing(hosts: Hosts) -> None:
    survivor, victim = hosts.b, hosts.a
    rng = random.Random(47)
    hosts.open(survivor, victim)
    greet(survivor, victim)
    victim.kill()
    survivor.do("await_links", count=0, sessions=0)
    start, descriptors = hosts.resources(), survivor.do("descriptors")
    for turn in range(KILLS):
        victim.address = victim.do("open")["address"]
        survivor.do("meet", name="a", address=victim.address)
        victim.do("meet", name="b", address=survivor.address)
        dialer, to = ((survivor, "a"), (victim, "b"))[turn % 2]
        dialer.begin("calls", "calls", to=to, count=4, name="echo", timeout=60)
        time.sleep(rng.uniform(0, 0.3))
        victim.kill()
        if dialer is survivor:
            calls = survivor.finish("calls")
            assert sum(calls["outcomes"].values()) == 4
            assert "wrong" not in calls["outcomes"]
        survivor.do("await_links", count=0, sessions=0)
    assert survivor.do("descriptors") == descriptors
    wait_until(lambda: hosts.resources() == start)
    victim.address = victim.do("open")["address"]
    survivor.do("meet", name="a", address=victim.address)
    greet(survivor, victim)
