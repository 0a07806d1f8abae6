"""Which path a transfer takes: the owner's eight checks, the consumer's offer, and the three
fallback labels.

Pure decisions over facts that the caller gathers. Each yields a PathReason: OK, or why the bytes go
over TCP. A refused RDMA path is a routing decision and never an error here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import PathUnavailable, PeerProtocolError, PeerRefused
from ..model import PathName, PathReason, Transport
from .messages import AcquireReply, AcquireRequest, SliceRun
from .slices import BLOCK_BYTES

BACKEND_VERBS = "verbs"  # the name of descriptor backend 2 in an offer
RDMA_BYTES_MIN_DEFAULT = 64 * 1024  # below it the round trips cost more than the bytes
# Below it one rail is done before another one's grant and receipt have paid for themselves.
SPREAD_BYTES_MIN = 8 * 1024 * 1024

FALLBACK_REASONS = frozenset(
    {PathReason.DECODE_ERROR, PathReason.POOL_EXHAUSTED, PathReason.GET_FAILED}
)


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """What the owner knows when an acquire arrives. `rdma` is its own RDMA path: OK, or why
    there is none. `total_bytes` and `pieces` are of what would be exposed: the payload, or the
    ranges that were asked for; `pieces` have a grant each.
    """

    rdma: PathReason
    kill_switch: bool
    pinned: bool
    total_bytes: int
    draining: bool
    rdma_bytes_min: int = RDMA_BYTES_MIN_DEFAULT
    backend: str = BACKEND_VERBS
    pieces: int = 1


def decide_owner(request: AcquireRequest, facts: OwnerFacts) -> PathReason:
    """The first seven checks, in this order; the eighth is `expose` itself, whose refusal brings
    its own reason.

    Draining comes after the facts about configuration and slot, so that it counts only the acquires
    that the drain changed. A caller that demanded RDMA skips the size threshold and nothing else
    (D12); one that offers it for ranges has demanded it.
    """
    offer = request.rdma
    if offer is None:
        return PathReason.NO_OFFER
    if facts.rdma is not PathReason.OK:
        return facts.rdma
    if facts.kill_switch:
        return PathReason.KILL_SWITCH
    if not facts.pinned or facts.total_bytes == 0:
        return PathReason.NOT_PINNED
    demanded = request.skip_threshold or request.ranged
    if facts.total_bytes < facts.rdma_bytes_min and not demanded:
        return PathReason.BELOW_MIN
    if facts.backend not in offer.backends or facts.pieces > offer.pieces_max:
        return PathReason.NO_OFFER
    if facts.draining:
        return PathReason.DRAINING
    return PathReason.OK


def decide_offer(transport: Transport, *, kill_switch: bool, rdma: PathReason) -> PathReason:
    """Whether this consumer may offer RDMA. `rdma` is its own RDMA path towards that owner: OK, or
    why not.

    Ask it with what is known at hand first; only on OK is the path worth preparing, and what that
    says is final.
    """
    if transport is Transport.TCP:
        return PathReason.ASKED
    if rdma is PathReason.NOT_CONFIGURED:
        return rdma  # nothing to switch off
    if kill_switch:
        return PathReason.KILL_SWITCH
    return rdma


def fallback_reason(reason: PathReason) -> PathReason:
    """The label of a pull that failed after a descriptor: one of three."""
    return reason if reason in FALLBACK_REASONS else PathReason.GET_FAILED


def peer_reason(text: str) -> PathReason:
    """A reason as a peer wrote it. One that this version does not know says no more than that
    there was no offer.
    """
    try:
        return PathReason(text)
    except ValueError:
        return PathReason.NO_OFFER


def check_answer(reply: AcquireReply, *, offered: bool) -> None:
    """Raises PeerProtocolError when an acquire without an offer is answered with a descriptor.

    Retrying would turn one broken owner into a storm of round trips, so the fetch ends there.
    """
    if reply.rdma is not None and not offered:
        raise PeerProtocolError("the owner answered an acquire without an offer with a descriptor")


# --- a path that was demanded, and is refused by the owner --------------------------------------

_REFUSED = "rdma."


def refused_path(reason: PathReason) -> PeerRefused:
    """What an owner answers in place of another path; `refusal_of` reads it."""
    return PeerRefused(_REFUSED + reason.value)


def refusal_of(error: PeerRefused) -> PathUnavailable | None:
    """The owner's `refused_path`; None: it refused something else."""
    if not error.reason.startswith(_REFUSED):
        return None
    reason = peer_reason(error.reason.removeprefix(_REFUSED))
    return PathUnavailable(PathName.RDMA, reason, "says the owner")


# --- runs ---------------------------------------------------------------------------------------


def count_grants(piece_bytes: Iterable[int], runs: Sequence[SliceRun]) -> int:
    """How many grants the runs need over pieces of those sizes: one for each run, cut where a piece
    ends; without runs one for each piece. Raises PeerRefused unless each run has bytes and all
    cover the pieces exactly.
    """
    pieces = [nbytes for nbytes in piece_bytes if nbytes]
    if not runs:
        return len(pieces)
    total = sum(pieces)
    ends, at = set(_ends(pieces)), 0
    for run in runs:
        at += run.nbytes
        ends.add(at)
        if not run.nbytes or at > total:
            break
    if at != total or not all(run.nbytes for run in runs):
        said = sum(run.nbytes for run in runs)
        raise PeerRefused("bad_request", f"runs of {said} bytes do not cover {total}")
    return len(ends)


def _ends(sizes: Iterable[int]) -> Iterable[int]:
    at = 0
    for size in sizes:
        at += size
        yield at


def spread_runs(nbytes: int, arrays: Sequence[int]) -> tuple[SliceRun, ...]:
    """As equal shares of whole blocks as can be, one for each array, the last with what is over.
    None where one array does as well.
    """
    if nbytes < SPREAD_BYTES_MIN or len(set(arrays)) < 2:
        return ()
    several = list(dict.fromkeys(arrays))
    blocks, over = divmod(nbytes, BLOCK_BYTES)
    each, more = divmod(blocks, len(several))
    sizes = [(each + (index < more)) * BLOCK_BYTES for index in range(len(several))]
    sizes[-1] += over
    return tuple(SliceRun(array, size) for array, size in zip(several, sizes, strict=True) if size)
