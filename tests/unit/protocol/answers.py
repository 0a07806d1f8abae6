"""Answers to acquires, for the machines of gets and puts."""

from __future__ import annotations

from dataclasses import replace

from orbit.protocol.messages import AcquireReply


def with_lease(reply: AcquireReply, lease: int) -> AcquireReply:
    if reply.rdma is not None:
        return AcquireReply(rdma=replace(reply.rdma, lease_id=lease))
    assert reply.ready is not None
    return AcquireReply(ready=replace(reply.ready, lease_id=lease))
