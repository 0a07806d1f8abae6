"""Answers to acquires, and feeding them, for the machines of gets, puts and engine requests."""

from __future__ import annotations

from dataclasses import replace

from orbit.protocol.messages import AcquireReply, GrantPiece, RdmaAnswer
from orbit.protocol.transfer import AcquireAnswered, Transfer, TransferEffect, TransferInput


def rdma(total: int = 100, lease: int = 7, direction: int = 1, more: int = 0) -> AcquireAnswered:
    """Granted by RDMA, in one piece and `more`."""
    rest = (GrantPiece(b"descriptor", b"grant"),) * more
    answer = RdmaAnswer(lease, b"descriptor", b"grant", 30_000, total, rest, direction)
    return AcquireAnswered(AcquireReply(rdma=answer))


def feed(machine: Transfer, *events: TransferInput) -> list[TransferEffect]:
    """Effects of the last one."""
    effects: list[TransferEffect] = []
    for event in events:
        effects = machine.step(event, 0.0)
    return effects


def with_lease(reply: AcquireReply, lease: int) -> AcquireReply:
    if reply.rdma is not None:
        return AcquireReply(rdma=replace(reply.rdma, lease_id=lease))
    assert reply.ready is not None
    return AcquireReply(ready=replace(reply.ready, lease_id=lease))
