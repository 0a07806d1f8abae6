"""Calls over one control connection, in both directions, as a machine.

It owns the table of this side's outstanding calls (bounded, with deadlines and generations) and the
set of the peer's calls being served, and turns frames into effects. It knows no methods, no
messages, no link and no clock. Ids are `generation << 16 | slot`: a slot's generation rises with
each use, so a late reply never meets the wrong call, and a repeated request is always told from a
new one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType

from ..errors import BusyError, DeadlineExceeded, OrbitError, PeerProtocolError, PeerRefused
from .bootstrap import DETAIL_CHARS_MAX, printable
from .codec import Readable, decode, encode
from .framing import FrameKind, SendFrame, encode_frame, split_frame

CallId = NewType("CallId", int)

SLOTS_MAX_DEFAULT: Final = 1024
METHOD_CHARS_MAX: Final = 64
_SLOT_BITS = 16
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_ID_MAX = (1 << 64) - 1


class _Ended(Enum):
    """How the last call of a slot ended: tells a duplicate reply from a late one."""

    NOT = "outstanding"
    REPLIED = "replied"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    ended: _Ended = _Ended.GIVEN_UP
    timeout_s: float = 0.0
    method: str = ""


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallCompleted:
    """The peer answered. `body` is plain data for a message's `from_wire`."""

    call_id: CallId
    body: object


@dataclass(frozen=True, slots=True)
class CallFailed:
    """PeerRefused(code) when the peer said no, else DeadlineExceeded, PeerLost or ClosedError."""

    call_id: CallId
    error: OrbitError


@dataclass(frozen=True, slots=True)
class Serve:
    """The peer asks. Answer with `reply` or `fault` under the same id, once."""

    call_id: CallId
    method: str
    body: object


@dataclass(frozen=True, slots=True)
class ServeNotification:
    """The peer tells. There is no answer."""

    method: str
    body: object


@dataclass(frozen=True, slots=True)
class PongArrived:
    """The answer to `ping_frame(number)`."""

    number: int


@dataclass(frozen=True, slots=True)
class GoodbyeArrived:
    """The peer starts no more calls and closes soon."""


Effect = (
    SendFrame
    | CallCompleted
    | CallFailed
    | Serve
    | ServeNotification
    | PongArrived
    | GoodbyeArrived
)


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """`late` replies came after their call was given up, `duplicate` ones after it was answered."""

    started: int
    completed: int
    failed: int
    outstanding: int
    served: int
    late_replies: int
    duplicate_replies: int


class CallTable:
    """One connection's calls. Every method decides at once; the caller carries out the effects."""

    def __init__(self, *, slots_max: int = SLOTS_MAX_DEFAULT, serving_max: int = 4096) -> None:
        if not 0 < slots_max <= _SLOT_MASK + 1:
            raise ValueError(f"slots_max={slots_max}")
        self._slots_max = slots_max
        self._serving_max = serving_max
        self._slots: list[_Slot] = []
        self._free: list[int] = []
        self._outstanding: dict[CallId, float | None] = {}  # id -> deadline, oldest first
        self._deadlines: list[tuple[float, CallId]] = []  # heap; entries of ended calls linger
        self._serving: set[CallId] = set()
        self._peer_generations: dict[int, int] = {}  # the peer's slot -> its last generation
        self._closed: OrbitError | None = None
        self._started = self._completed = self._failed = self._served = 0
        self._late = self._duplicate = 0

    # --- this side's calls ---

    def start(
        self, method: str, body: object, now: float, deadline: float | None = None
    ) -> tuple[CallId, SendFrame]:
        """Take a slot. Raises BusyError when none is free, and the closing error once closed."""
        if self._closed is not None:
            raise self._closed
        number = self._take_slot()
        slot = self._slots[number]
        call_id = CallId((slot.generation + 1) << _SLOT_BITS | number)
        try:
            frame = _frame(FrameKind.CALL, [call_id, method, body])
        except BaseException:
            self._free.append(number)
            raise
        slot.generation += 1
        slot.ended = _Ended.NOT
        slot.method = method
        self._outstanding[call_id] = deadline
        if deadline is not None:
            slot.timeout_s = max(deadline - now, 0.0)
            heapq.heappush(self._deadlines, (deadline, call_id))
        self._started += 1
        return call_id, SendFrame(frame)

    def cancel(self, call_id: CallId) -> None:
        """Nobody waits for it any more; its reply will be dropped. Ended calls: nothing happens."""
        if call_id in self._outstanding:
            self._finish(call_id, _Ended.GIVEN_UP)

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def deadline(self) -> float | None:
        """When `on_deadline` is due next; None when no outstanding call has a deadline."""
        while self._deadlines and self._deadlines[0][1] not in self._outstanding:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def on_deadline(self, now: float) -> list[Effect]:
        """Fails every call whose deadline has come."""
        effects: list[Effect] = []
        while (due := self.deadline) is not None and due <= now:
            _, call_id = heapq.heappop(self._deadlines)
            slot = self._slots[call_id & _SLOT_MASK]
            error = DeadlineExceeded(f"call {slot.method}", slot.timeout_s)
            self._finish(call_id, _Ended.GIVEN_UP)
            effects.append(CallFailed(call_id, error))
        return effects

    def close(self, error: OrbitError) -> list[Effect]:
        """The connection is gone: every outstanding call fails with `error` (PeerLost says that
        their outcome is unknown), nothing is served any more. Idempotent."""
        if self._closed is not None:
            return []
        self._closed = error
        calls = list(self._outstanding)
        for call_id in calls:
            self._finish(call_id, _Ended.GIVEN_UP)
        self._serving.clear()
        self._deadlines.clear()
        return [CallFailed(call_id, error) for call_id in calls]

    # --- the peer's calls ---

    def reply(self, call_id: CallId, body: object) -> list[Effect]:
        """Answer a served call. Nothing once the connection is gone."""
        return self._answer(call_id, FrameKind.REPLY, [call_id, body])

    def fault(self, call_id: CallId, code: str, detail: str = "") -> list[Effect]:
        """Say no to a served call: `code` is stable, `detail` for people."""
        return self._answer(
            call_id, FrameKind.FAULT, [call_id, code, printable(detail, DETAIL_CHARS_MAX)]
        )

    # --- frames ---

    def on_frame(self, frame: Readable, now: float) -> list[Effect]:
        """One frame of the epoch. Raises PeerProtocolError, with nothing changed: then close."""
        if self._closed is not None:
            return []
        kind, raw = split_frame(frame)
        body = decode(raw)
        if not isinstance(body, list):
            raise PeerProtocolError(f"{kind.name}: expected a list")
        match kind, body:
            case FrameKind.CALL, [call_id, str(method), argument]:
                return self._on_call(_id(kind, call_id), _method(method), argument)
            case FrameKind.REPLY, [call_id, result]:
                call = _id(kind, call_id)
                return [CallCompleted(call, result)] if self._on_answer(call) else []
            case FrameKind.FAULT, [call_id, str(code), str(detail)]:
                call = _id(kind, call_id)
                error = PeerRefused(printable(code, 32), printable(detail, DETAIL_CHARS_MAX))
                return [CallFailed(call, error)] if self._on_answer(call, failed=True) else []
            case FrameKind.NOTIFY, [str(method), argument]:
                return [ServeNotification(_method(method), argument)]
            case FrameKind.PING, [number]:
                return [SendFrame(_frame(FrameKind.PONG, [_id(kind, number)]))]
            case FrameKind.PONG, [number]:
                return [PongArrived(_id(kind, number))]
            case FrameKind.GOODBYE, []:
                return [GoodbyeArrived()]
            case _:
                raise PeerProtocolError(f"{kind.name}: not a frame of an open epoch, or malformed")

    def statistics(self) -> CallStatistics:
        return CallStatistics(
            started=self._started,
            completed=self._completed,
            failed=self._failed,
            outstanding=len(self._outstanding),
            served=self._served,
            late_replies=self._late,
            duplicate_replies=self._duplicate,
        )

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if len(self._slots) == self._slots_max:
            raise BusyError(
                f"{self._slots_max} calls to this peer are outstanding",
                hint="wait for some of them, or raise the limit of calls per peer",
            )
        self._slots.append(_Slot())
        return len(self._slots) - 1

    def _finish(self, call_id: CallId, ended: _Ended) -> None:
        del self._outstanding[call_id]
        number = call_id & _SLOT_MASK
        self._slots[number].ended = ended
        self._free.append(number)
        if ended is _Ended.GIVEN_UP:
            self._failed += 1
        # Calls end long before their deadlines: without this the heap would hold minutes of them.
        if len(self._deadlines) > 2 * len(self._outstanding) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self._outstanding]
            heapq.heapify(self._deadlines)

    def _on_answer(self, call_id: CallId, *, failed: bool = False) -> bool:
        """Whether an outstanding call ended by it."""
        if call_id in self._outstanding:
            self._finish(call_id, _Ended.REPLIED)
            self._failed += failed
            self._completed += not failed
            return True
        number, generation = call_id & _SLOT_MASK, call_id >> _SLOT_BITS
        if number >= len(self._slots) or not 0 < generation <= self._slots[number].generation:
            raise PeerProtocolError(f"an answer to call {call_id:#x}, which was never made")
        slot = self._slots[number]
        if generation == slot.generation and slot.ended is _Ended.REPLIED:
            self._duplicate += 1
        else:
            self._late += 1
        return False

    def _on_call(self, call_id: CallId, method: str, body: object) -> list[Effect]:
        number, generation = call_id & _SLOT_MASK, call_id >> _SLOT_BITS
        if generation <= self._peer_generations.get(number, 0):
            raise PeerProtocolError(f"call id {call_id:#x} was used before")
        self._peer_generations[number] = generation
        if len(self._serving) >= self._serving_max:
            # The peer may have given up on these; its own limit no longer bounds what runs here.
            detail = f"{self._serving_max} calls are being served"
            return [SendFrame(_frame(FrameKind.FAULT, [call_id, "busy", detail]))]
        self._serving.add(call_id)
        self._served += 1
        return [Serve(call_id, method, body)]

    def _answer(self, call_id: CallId, kind: FrameKind, body: list[object]) -> list[Effect]:
        if call_id not in self._serving:
            return []
        frame = _frame(kind, body)  # may raise: then the call is still there to be refused
        self._serving.remove(call_id)
        return [SendFrame(frame)]


def notify_frame(method: str, body: object) -> bytes:
    return _frame(FrameKind.NOTIFY, [method, body])


def ping_frame(number: int) -> bytes:
    return _frame(FrameKind.PING, [number])


def goodbye_frame() -> bytes:
    return _frame(FrameKind.GOODBYE, [])


def _frame(kind: FrameKind, body: list[object]) -> bytes:
    return encode_frame(kind, encode(body))


def _id(kind: FrameKind, value: object) -> CallId:
    if type(value) is not int or not 0 <= value <= _ID_MAX:
        raise PeerProtocolError(f"{kind.name}: id {str(value)[:40]!r}")
    return CallId(value)


def _method(name: str) -> str:
    if not name.isascii() or not name.isidentifier() or len(name) > METHOD_CHARS_MAX:
        raise PeerProtocolError(f"method name {name[:METHOD_CHARS_MAX]!r}")
    return name
