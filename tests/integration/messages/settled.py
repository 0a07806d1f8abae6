"""What a node must hold nothing of, once its users are done with it."""

from __future__ import annotations

import os
from typing import Any

import orbit
from orbit.testing.waiting import until

SOAK = os.environ.get("ORBIT_SOAK") == "1"
TCP = orbit.NodeConfig(transport="tcp")  # the same on a host with devices


def held(node: orbit.Node) -> dict[str, Any]:
    """What of it is not zero."""
    found = node.statistics()
    messaging, dispatch = found.messaging, found.dispatch
    counts = {
        "pending calls": messaging.pending_calls,
        "queued frames": messaging.queued_frames,
        "queued bytes": messaging.queued_bytes,
        "waiting sends": messaging.waiting_sends,
        "staged payloads": messaging.staged_payloads,
        "calls on links": sum(link.calls for link in messaging.links),
        "served on links": sum(link.serving for link in messaging.links),
        "charged bytes": sum(link.counts.unconsumed_bytes for link in messaging.links),
        "guards": dispatch.guards,
        "in flight": sum(handler.in_flight for handler in dispatch.handlers),
        "slots": found.slots.slots,
        "leases": found.leases_held + found.slots.leases_held,
    }
    return {name: count for name, count in counts.items() if count}


async def settle(*nodes: orbit.Node) -> None:
    """Until the nodes hold nothing: no call, charge, guard, slot or lease."""
    try:
        await until(lambda: not any(held(node) for node in nodes))
    except TimeoutError:
        raise AssertionError([held(node) for node in nodes]) from None


def counter(node: orbit.Node, series: str) -> int:
    """The sum of a series over its labels."""
    counters = node.statistics().counters
    return sum(n for name, n in counters.items() if name.partition("{")[0] == series)
