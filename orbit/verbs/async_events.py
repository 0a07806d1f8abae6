"""What a device says outside any completion: the kinds of asynchronous events and what each is
about.

Owns the numbers of `ibv_event_type` and the frozen record of one event. It reads no descriptor and
knows no provider: those get each event and acknowledge it in the same breath (D9).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class AsyncEventKind(enum.StrEnum):
    """`ibv_event_type` by name. UNKNOWN stands for one that a later kernel adds."""

    CQ_ERR = "CQ_ERR"
    QP_FATAL = "QP_FATAL"
    QP_REQ_ERR = "QP_REQ_ERR"
    QP_ACCESS_ERR = "QP_ACCESS_ERR"
    COMM_EST = "COMM_EST"
    SQ_DRAINED = "SQ_DRAINED"
    PATH_MIG = "PATH_MIG"
    PATH_MIG_ERR = "PATH_MIG_ERR"
    DEVICE_FATAL = "DEVICE_FATAL"
    PORT_ACTIVE = "PORT_ACTIVE"
    PORT_ERR = "PORT_ERR"
    LID_CHANGE = "LID_CHANGE"
    PKEY_CHANGE = "PKEY_CHANGE"
    SM_CHANGE = "SM_CHANGE"
    SRQ_ERR = "SRQ_ERR"
    SRQ_LIMIT_REACHED = "SRQ_LIMIT_REACHED"
    QP_LAST_WQE_REACHED = "QP_LAST_WQE_REACHED"
    CLIENT_REREGISTER = "CLIENT_REREGISTER"
    GID_CHANGE = "GID_CHANGE"
    WQ_FATAL = "WQ_FATAL"
    UNKNOWN = "UNKNOWN"

    @property
    def number(self) -> int:
        """The value in `ibv_event_type`; that of UNKNOWN is none of them."""
        return _KINDS.index(self)


class Subject(enum.Enum):
    """Which object an event is about."""

    DEVICE = "device"
    PORT = "port"
    COMPLETION_QUEUE = "completion queue"
    QUEUE_PAIR = "queue pair"
    SHARED_RECEIVE = "shared receive queue"


_KINDS = tuple(AsyncEventKind)  # declared in the order of ibv_event_type
_QUEUE_PAIR_KINDS = frozenset(
    {
        AsyncEventKind.QP_FATAL,
        AsyncEventKind.QP_REQ_ERR,
        AsyncEventKind.QP_ACCESS_ERR,
        AsyncEventKind.COMM_EST,
        AsyncEventKind.SQ_DRAINED,
        AsyncEventKind.PATH_MIG,
        AsyncEventKind.PATH_MIG_ERR,
        AsyncEventKind.QP_LAST_WQE_REACHED,
    }
)
_SHARED_RECEIVE_KINDS = frozenset({AsyncEventKind.SRQ_ERR, AsyncEventKind.SRQ_LIMIT_REACHED})
# A work queue of its own (WQ_FATAL) is nothing that orbit makes.
_DEVICE_KINDS = frozenset(
    {AsyncEventKind.DEVICE_FATAL, AsyncEventKind.WQ_FATAL, AsyncEventKind.UNKNOWN}
)


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One event, acknowledged already. Of the last three fields those that its subject has."""

    kind: AsyncEventKind
    native: int = 0  # address of the completion queue, queue pair or shared receive queue
    qp_num: int = 0
    port: int = 0

    @property
    def subject(self) -> Subject:
        return subject_of(self.kind)


def kind_of(number: int) -> AsyncEventKind:
    return _KINDS[number] if 0 <= number < len(_KINDS) else AsyncEventKind.UNKNOWN


def subject_of(kind: AsyncEventKind) -> Subject:
    if kind in _QUEUE_PAIR_KINDS:
        return Subject.QUEUE_PAIR
    if kind in _SHARED_RECEIVE_KINDS:
        return Subject.SHARED_RECEIVE
    if kind is AsyncEventKind.CQ_ERR:
        return Subject.COMPLETION_QUEUE
    return Subject.DEVICE if kind in _DEVICE_KINDS else Subject.PORT


def event_of(number: int, element: int, qp_num: int = 0) -> AsyncEvent:
    """From what a provider reads: the number, and an address or a port; `qp_num` where the subject
    is a queue pair."""
    kind = kind_of(number)
    subject = subject_of(kind)
    if subject is Subject.PORT:
        return AsyncEvent(kind, port=element)
    if subject is Subject.DEVICE:
        return AsyncEvent(kind)
    return AsyncEvent(kind, native=element, qp_num=qp_num)


__all__ = ["AsyncEvent", "AsyncEventKind", "Subject", "event_of", "kind_of", "subject_of"]
