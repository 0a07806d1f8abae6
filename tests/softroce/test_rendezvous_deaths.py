"""Peers that die or stand still in the middle of a transfer between two hosts: what is left at the
other side, and when. The counts and sizes are CI's; ORBIT_SOAK (`make soak`) makes them larger.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.soak import SOAK
from tests.softroce.node_hosts import Host, Hosts, wait_until

MIB = 1 << 20
PAYLOAD = (64 if SOAK else 24) * MIB
FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9) if SOAK else (0.2,)
LEASE_S = 2.0
WIDTH = 2  # queue pairs of one consumer at its owner
# What an emulated processor may add to a deadline: it is late, never early.
STALL_S = 3.0
DRAIN_S = 0.7
BOUND_S = 30.0
ENDS = (
    "PeerLost",
    "PeerUnreachable",
    "TransferFailed",
    "PathFailed",
    "UnknownHandle",
    "LeaseError",
)
LEASES = {"lease_timeout": LEASE_S}
OWNER = {"rdma": {"device_timeout_s": 20.0}, "rendezvous": LEASES}
# Each consumer has a rail of its own: on one, two slow transfers are silent for too long.
CONSUMER = {"rdma": {"device_timeout_s": 20.0, "device": "rxb1"}, "rendezvous": LEASES}
BYSTANDER = {"rdma": {"device_timeout_s": 20.0, "device": "rxb2"}, "rendezvous": LEASES}


@pytest.fixture(scope="module")
def hosts(node_hosts: Hosts) -> Iterator[Hosts]:
    """The owner, and a consumer that nothing happens to."""
    node_hosts.other.do("open", **BYSTANDER)
    yield node_hosts
    node_hosts.close()


@pytest.fixture(scope="module")
def address(hosts: Hosts) -> str:
    return str(hosts.owner.do("open", **OWNER)["address"])


class Transfers:
    """One that is seen at a fraction, and one of a bystander that has begun."""

    def __init__(self, hosts: Hosts, address: str, fraction: float) -> None:
        self.hosts = hosts
        self.handle = str(hosts.owner.do("serve_in_place", nbytes=PAYLOAD)["handle"])
        bystanders = hosts.owner.do("register", nbytes=PAYLOAD)["handle"]
        self._ends_before = len(self._ends())
        self._aborts_before = hosts.owner.do("statistics")["aborts"]
        hosts.consumer.do("open", **CONSUMER)
        begin(hosts.other, address, bystanders, 1)
        # Last, and nothing is asked after it: the transfer goes on meanwhile.
        begin(hosts.consumer, address, self.handle, int(fraction * PAYLOAD))

    def end_of_lease(self) -> dict[str, Any]:
        """The first one to end since the beginning: it is of the transfer that was seen."""
        wait_until(lambda: len(self._ends()) > self._ends_before)
        end = self._ends()[self._ends_before]
        assert end["handle"] == self.handle
        return end

    def nothing_is_left(self, queue_pairs: int) -> None:
        """Its authority is gone, its memory is the owner's, and the bystander has its bytes. The
        owner has so many queue pairs left.
        """
        owner = self.hosts.owner
        taken_back = owner.do("overwrite", handle=self.handle)
        assert taken_back["seconds"] < BOUND_S
        after = owner.do("statistics")
        assert after["grants"] <= 1
        assert after["aborts"] > self._aborts_before
        got = self.hosts.other.heard()
        assert (got["path"], got["same"]) == ("rdma", True), got
        self.hosts.wait_for_no_lease()
        wait_for_queue_pairs(owner, queue_pairs)
        after = owner.do("statistics")
        assert (after["grants"], after["retained"]) == (0, 0)

    def _ends(self) -> list[dict[str, Any]]:
        return lease_ends(self.hosts.owner)


def wait_for_queue_pairs(owner: Host, count: int) -> None:
    """Destroying one comes after the proof that it reaches nothing."""
    wait_until(lambda: owner.do("statistics")["queue_pairs"] == count)


def begin(host: Host, address: str, handle: str, announce_at: int) -> None:
    host.tell("get", address=address, handle=handle, nbytes=PAYLOAD, announce_at=announce_at)
    found = host.heard()
    assert found.get("begun", 0) >= announce_at, found


# --- consumers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_killed_consumer_is_forgotten_with_its_connection(
    hosts: Hosts, address: str, fraction: float
) -> None:
    with hosts.slow("A"):
        transfers = Transfers(hosts, address, fraction)
        killed_at = time.monotonic()
        hosts.consumer.kill()
        end = transfers.end_of_lease()
        print(f"{end['how']} after {end['at'] - killed_at:.2f} s")
        assert end["how"] == "peer_lost"
        assert end["at"] - killed_at < 1.5 * LEASE_S
        transfers.nothing_is_left(queue_pairs=WIDTH)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_consumer_that_stands_still_loses_its_lease(
    hosts: Hosts, address: str, fraction: float
) -> None:
    """And learns of it when it goes on: it never takes what came later for the payload."""
    with hosts.slow("A"):
        transfers = Transfers(hosts, address, fraction)
        with hosts.consumer.stopped():
            reaped_in_time(transfers.end_of_lease())
            transfers.nothing_is_left(queue_pairs=2 * WIDTH - 1)
        assert hosts.consumer.heard()["error"] in ENDS
        assert not hosts.consumer.do("saw_overwritten")["saw"]
    assert hosts.consumer.do("statistics")["retained"] == 0


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_consumer_that_dies_in_silence_loses_its_lease(
    hosts: Hosts, address: str, fraction: float
) -> None:
    """No bystander here: it would be silent as well, and lose its lease."""
    with hosts.slow("A"):
        handle = hosts.owner.do("serve_in_place", nbytes=PAYLOAD)["handle"]
        aborts, ends = hosts.owner.do("statistics")["aborts"], lease_ends(hosts.owner)
        hosts.consumer.do("open", **CONSUMER)
        begin(hosts.consumer, address, handle, int(fraction * PAYLOAD))
        with hosts.tcp_silent():
            hosts.consumer.kill()
            wait_until(lambda: len(lease_ends(hosts.owner)) > len(ends))
            reaped_in_time(lease_ends(hosts.owner)[len(ends)])
            assert hosts.owner.do("overwrite", handle=handle)["seconds"] < BOUND_S
            after = hosts.owner.do("statistics")
            assert (after["grants"], after["retained"]) == (0, 0)
            assert after["aborts"] > aborts


def lease_ends(owner: Host) -> list[dict[str, Any]]:
    return list(owner.do("lease_ends")["ends"])


def reaped_in_time(end: dict[str, Any]) -> None:
    print(f"{end['how']} {end['silent_s']:.2f} s after it was last heard of")
    assert end["how"] == "reaped"
    assert LEASE_S <= end["silent_s"] < 1.5 * LEASE_S + STALL_S


# --- owners ---------------------------------------------------------------------------------------


def test_a_source_that_was_dropped_arrives_whole_though_its_peer_stood_still(
    hosts: Hosts, address: str
) -> None:
    """C07: the put's own export keeps the bytes."""
    hosts.consumer.do("open", **CONSUMER)
    handle = hosts.owner.do("offer", nbytes=8 * MIB)["handle"]
    with hosts.slow("B"):
        hosts.consumer.tell("put_dropped", address=address, handle=handle, nbytes=8 * MIB, fill=7)
        assert hosts.consumer.heard()["begun"] > 0
        with hosts.owner.stopped():
            time.sleep(1.0)
        put = hosts.consumer.heard()
    # A peer that stood still for longer than a receipt may take costs the one fallback.
    assert (put.get("path") in ("rdma", "tcp"), put.get("dead")) == (True, True), put
    assert hosts.owner.do("landed", handle=handle, fill=7)["same"]


def test_a_killed_owner_leaves_the_destination_held_until_the_drain(
    hosts: Hosts, address: str
) -> None:
    hosts.consumer.do("open", **CONSUMER)
    handle = hosts.owner.do("register", nbytes=PAYLOAD)["handle"]
    with hosts.slow("A"):
        hosts.consumer.tell(
            "get_from_the_dying", address=address, handle=handle, nbytes=PAYLOAD, drain_s=DRAIN_S
        )
        assert hosts.consumer.heard()["begun"] > 0
        killed_at = time.monotonic()
        hosts.owner.kill()
        found = hosts.consumer.heard()
        seconds = time.monotonic() - killed_at
    print(f"{found['ended_by']} after {seconds:.2f} s")
    assert found["ended_by"] in ENDS
    assert DRAIN_S <= seconds < BOUND_S
    assert (found["early"], found["held"] > 0) == (0, True), found
    assert found["drained_first"]
    assert found["resizable"]
    after = hosts.consumer.do("statistics")
    assert (after["retained"], after["leases"]) == (0, 0)
    address = hosts.owner.do("open", **OWNER)["address"]
    handle = hosts.owner.do("register", nbytes=MIB)["handle"]
    got = hosts.consumer.do("get", address=address, handle=handle, nbytes=MIB)
    assert (got["path"], got["same"]) == ("rdma", True)
