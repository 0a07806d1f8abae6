"""Transfers that are over by the owner's word: the last call gives the lease back, and its answer
says whether every byte is in place.

Owns what such transfers share: that call, and the rows of their tables in which its answer is all
that is still due. What follows from the answer is for `put` and `parent` to say.
"""

from __future__ import annotations

from ..errors import OrbitError
from ..model import LeaseId
from .transfer import (
    GIVEN_UP,
    AcquireAnswered,
    AcquireFailed,
    Cancelled,
    DeadlinePassed,
    End,
    Ended,
    EndFailed,
    PathsReady,
    PeerGone,
    Step,
    Stopped,
    Transfer,
    TransferState,
    TransferTable,
    to,
)

_S = TransferState

LAST_ROWS: TransferTable = {
    _S.ABANDONING: {
        AcquireAnswered: to(_S.FAILED),
        AcquireFailed: to(_S.FAILED),
        Ended: to(_S.FAILED),
        EndFailed: to(_S.FAILED),
        PeerGone: to(_S.FAILED),
        Cancelled: to(_S.ABANDONING),
        Stopped: to(_S.ABANDONING),
        DeadlinePassed: to(_S.ABANDONING),
    },
    _S.FINISHED: {kind: to(_S.FINISHED) for kind in GIVEN_UP},
    _S.FAILED: {
        PathsReady: to(_S.FAILED),
        AcquireAnswered: to(_S.FAILED),  # after PeerGone: a lease that went with its epoch
        AcquireFailed: to(_S.FAILED),
        Ended: to(_S.FAILED),
        EndFailed: to(_S.FAILED),
        **{kind: to(_S.FAILED) for kind in GIVEN_UP},
    },
}


class ConfirmedTransfer(Transfer):
    """A put, or one request of an engine."""

    def _complete(self) -> Step:
        assert self._lease_id is not None
        return _S.COMPLETING, [End(self._lease_id, transferred=True)]

    def _settle(self, event: Ended | EndFailed) -> Step:
        lease_id, self._lease_id = self._lease_id, None  # the call has given it back
        if self.state is _S.ABANDONING:
            return _S.FAILED, []
        assert lease_id is not None
        return self._ended(lease_id, event.error if isinstance(event, EndFailed) else None)

    def _ended(self, lease_id: LeaseId, failure: OrbitError | None) -> Step:
        """The lease is over, and somebody waits. `failure` None: as the call said it."""
        raise NotImplementedError
