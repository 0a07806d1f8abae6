"""The data paths that one node has, by name, and why it lacks the one that it lacks.

Nothing here knows what a path is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import InternalError, PathUnavailable
from ..model import Direction, PathName, PathReason
from ..transport.interface import CallHandler, DataPath, PinnedMemory, Session


@dataclass(frozen=True, slots=True)
class Paths:
    """`rdma` None: `rdma_reason` says why in one word, `rdma_detail` to a person. `memory` is the
    arena that pinned registrations go to.
    """

    tcp: DataPath
    rdma: DataPath | None = None
    rdma_reason: PathReason = PathReason.NOT_CONFIGURED
    rdma_detail: str = ""
    memory: PinnedMemory | None = None

    def __iter__(self) -> Iterator[DataPath]:
        if self.rdma is not None:
            yield self.rdma
        yield self.tcp

    def by_name(self, name: PathName) -> DataPath:
        """The path that a decision named."""
        for path in self:
            if path.name is name:
                return path
        raise InternalError(f"this node has no {name} path")

    def rdma_availability(
        self, session: Session, direction: Direction = Direction.READ
    ) -> PathReason:
        """OK, or why RDMA cannot serve that peer, from facts at hand."""
        return self.rdma_reason if self.rdma is None else self.rdma.availability(session, direction)

    def unavailable(self, reason: PathReason, detail: str = "") -> PathUnavailable:
        """The error for a caller who demanded RDMA."""
        hint = _HINTS.get(reason, "")
        return PathUnavailable(PathName.RDMA, reason, detail or self.rdma_detail, hint=hint)

    def handlers(self) -> dict[str, CallHandler]:
        """Control calls that the paths answer themselves."""
        merged: dict[str, CallHandler] = {}
        for path in self:
            merged.update(path.handlers())
        return merged


_HINTS: Mapping[PathReason, str] = {
    PathReason.NO_DEVICE: "`rdma link` lists RDMA devices; use transport auto or tcp without one",
    PathReason.NO_PYVERBS: "install pyverbs (package python3-pyverbs), or use transport tcp",
    PathReason.NO_HELPER: "build orbit with the verbs headers present (package libibverbs-dev)",
    PathReason.PERMISSION: "this user needs read and write access to /dev/infiniband/uverbs*",
    PathReason.KILL_SWITCH: "unset ORBIT_RDMA_RENDEZVOUS_DISABLE or set rendezvous.enabled",
    PathReason.PEER_WITHOUT: "the owner has no usable RDMA device",
    PathReason.NOT_PINNED: "the owner must register the data with register_data_pinned",
}
