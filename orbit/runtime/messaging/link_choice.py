"""Which transport carries messages to a peer: by priority, decided once for each epoch, or as the
caller demands.

Eligibility comes from facts at hand; only a link that is wanted is opened. One that cannot be
opened leaves that epoch on the next transport, said once to the log and always to the counters. A
link that dies is no reason to choose again: its successor is of the same kind.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import NotAdmitted, PathUnavailable
from ...events import Recorder, TransportChosen, TransportRefused
from ...model import PathName, PathReason, WorkerId
from ...transport.interface import Session
from ...transport.messages import LinkClient, MessageLink, MessageTransport
from ..limited_log import LimitedLog

_log = logging.getLogger("orbit")

SessionTo = Callable[[WorkerId], Awaitable[Session]]


@dataclass(frozen=True, slots=True)
class Missing:
    """Why this node lacks a transport."""

    reason: PathReason
    detail: str = ""


@dataclass(slots=True)
class _Epoch:
    refused: dict[PathName, Missing] = field(default_factory=dict)
    chosen: PathName | None = None


class LinkChooser:
    """`priority` orders those of `transports` that sends may use unasked. `missing` says why a name
    is not among them.
    """

    def __init__(
        self,
        transports: Sequence[MessageTransport],
        priority: Sequence[PathName],
        missing: Mapping[PathName, Missing],
        session_to: SessionTo,
        recorder: Recorder,
    ) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._order = [name for name in priority if name in self._transports]
        self._missing = missing
        self._session_to = session_to
        self._recorder = recorder
        self._epochs: dict[bytes, _Epoch] = {}  # by attempt
        self._limited = LimitedLog(_log)

    async def open(
        self, worker_id: WorkerId, wanted: PathName | None, client: LinkClient
    ) -> tuple[Session, MessageLink]:
        """The link to that node, opened if there is none. Raises PathUnavailable for a demanded
        transport that cannot be had, and what keeps this node from the peer.
        """
        if wanted is not None and wanted not in self._transports:
            raise self._unavailable(wanted, self._lacking(wanted))
        session = await self._session_to(worker_id)
        epoch = self._epochs.setdefault(session.attempt, _Epoch())
        if wanted is not None:
            return session, await self._demanded(session, epoch, wanted, client)
        for name in self._order:
            link = await self._try(session, epoch, self._transports[name], client)
            if link is not None:
                self._choose(session, epoch, name)
                return session, link
        refused = {**self._missing, **epoch.refused}
        reasons = ", ".join(f"{name}: {why.reason}" for name, why in refused.items())
        raise NotAdmitted(str(session.peer), f"no message transport ({reasons})")

    def forget(self, session: Session) -> None:
        """The epoch is over."""
        self._epochs.pop(session.attempt, None)

    # --- within -----------------------------------------------------------------------------------

    async def _demanded(
        self, session: Session, epoch: _Epoch, wanted: PathName, client: LinkClient
    ) -> MessageLink:
        link = await self._try(session, epoch, self._transports[wanted], client)
        if link is None:
            raise self._unavailable(wanted, epoch.refused[wanted])
        return link

    async def _try(
        self, session: Session, epoch: _Epoch, transport: MessageTransport, client: LinkClient
    ) -> MessageLink | None:
        """None, and the reason in `epoch`, when it cannot be had."""
        name = transport.name
        if name in epoch.refused:
            return None
        reason = transport.availability(session)
        if reason is not PathReason.OK:
            self._refuse(session, epoch, name, Missing(reason), tried=False)
            return None
        try:
            return await transport.open(session, client)
        except PathUnavailable as error:
            reason = _reason(error)
            self._refuse(session, epoch, name, Missing(reason, error.detail), tried=True)
            return None

    def _choose(self, session: Session, epoch: _Epoch, name: PathName) -> None:
        if epoch.chosen is name:
            return
        epoch.chosen = name
        first = next(iter(epoch.refused.values()), None)
        reason = PathReason.OK if first is None else first.reason
        self._recorder.record(TransportChosen(session.peer.worker_id, name, reason))

    def _refuse(
        self, session: Session, epoch: _Epoch, name: PathName, why: Missing, *, tried: bool
    ) -> None:
        worker_id = session.peer.worker_id
        epoch.refused[name] = why
        self._recorder.record(TransportRefused(worker_id, name, why.reason))
        if tried:
            self._limited.warning(
                (worker_id, name, why.reason),
                "messages to %s do not go by %s: %s %s",
                *(session.peer, name, why.reason, why.detail),
                event="message_link_refused",
                peer=session.peer,
                path=name,
                reason=why.reason,
            )

    def _lacking(self, name: PathName) -> Missing:
        return self._missing.get(name) or Missing(PathReason.NOT_CONFIGURED)

    def _unavailable(self, name: PathName, why: Missing) -> PathUnavailable:
        return PathUnavailable(name, why.reason, why.detail)


def _reason(error: PathUnavailable) -> PathReason:
    try:
        return PathReason(error.reason)
    except ValueError:
        return PathReason.CONNECT_FAILED
