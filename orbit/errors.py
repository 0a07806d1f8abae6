"""Every error that orbit raises, in one tree.

Fields come first and the message is derived from them, so that a caller decides on types and
values, never on text. `code` is stable across releases; `hint` is one line that a person can act
on, or empty. The type says who is to blame: the caller (UsageError, ConfigError, ClosedError), a
limit (BudgetExceeded, DeadlineExceeded), the other side or the wire (PeerError), the device
(DeviceError, CompletionError), or orbit itself (InternalError).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import ClassVar


class OrbitError(Exception):
    """Root of the tree. `str(error)` is one line without the hint."""

    code: ClassVar[str] = "orbit"
    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # By its fields: what subclasses take is not the message, which is all that Exception keeps.
        return _remade, (type(self), self.args), self.__dict__.copy()


def _remade(kind: type[OrbitError], arguments: tuple[object, ...]) -> OrbitError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments  # which an OSError's `__new__` does not set
    return error


class UsageError(OrbitError):
    """The caller passed something that can never work (a wrong type, a non-contiguous buffer, a
    bad range).
    """

    code = "usage"


class UnknownPeer(UsageError):
    """Nothing is known about the node that a handle names."""

    code = "unknown_peer"

    def __init__(self, worker_id: int) -> None:
        super().__init__(
            f"no address is known for node {worker_id:016x}",
            hint="give the owner's address to add_peer first",
        )
        self.worker_id = worker_id


class ConfigError(OrbitError):
    """A configuration value is invalid; names the knob and the accepted values."""

    code = "config"

    def __init__(self, knob: str, value: object, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{knob}={value!r}: {problem}", hint=hint)
        self.knob = knob
        self.value = value
        self.problem = problem


class ClosedError(OrbitError):
    """The object was closed by its owner before this call."""

    code = "closed"

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed")
        self.what = what


class BusyError(OrbitError):
    """Two tasks raced for one thing, or a `*_nowait` call would have had to wait."""

    code = "busy"


class RangeBusy(BusyError):
    """Memory is in use in a way that excludes this one. `holder` says by what; `nbytes` bytes at
    `address` are held by it, or both are 0 where that is not told (memory of the other side).
    `shared`: it lets others read.
    """

    code = "range_busy"

    def __init__(
        self, holder: str, address: int = 0, nbytes: int = 0, *, shared: bool = False
    ) -> None:
        kind = "shared" if shared else "exclusive"
        where = f" ({nbytes} bytes at {address:#x}, {kind})" if nbytes else ""
        super().__init__(f"the range is in use by {holder}{where}")
        self.holder = holder
        self.address = address
        self.nbytes = nbytes
        self.shared = shared


class DeadlineExceeded(OrbitError, TimeoutError):
    """A deadline passed. `operation` names what was waited for, `timeout_s` how long."""

    code = "deadline"

    def __init__(self, operation: str, timeout_s: float) -> None:
        super().__init__(f"{operation} did not finish within {timeout_s:g} s")
        self.operation = operation
        self.timeout_s = timeout_s


class BudgetExceeded(OrbitError):
    """A configured budget has no room. Nothing was taken."""

    code = "budget"

    def __init__(self, budget: str, requested: int, limit: int, charged: int, knob: str) -> None:
        super().__init__(
            f"{budget}: {requested} requested, {charged} of {limit} in use", hint=f"raise {knob}"
        )
        self.budget = budget
        self.requested = requested
        self.limit = limit
        self.charged = charged
        self.knob = knob


class PeerError(OrbitError):
    """The other side, or the network between, broke the conversation."""

    code = "peer"


class PeerUnreachable(PeerError):
    """No conversation could be started. `kind` is one of refused, timeout (nothing answered),
    silent (connected, but no handshake answer), address (cannot be resolved) or local (this host
    lacks a resource).
    """

    code = "peer_unreachable"

    def __init__(self, endpoint: str, kind: str, detail: str = "", *, hint: str = "") -> None:
        text = {
            "refused": "connection refused",
            "timeout": "no answer to the connection attempt",
            "silent": "connected, but no handshake answer",
            "address": "the address cannot be resolved",
            "local": "this host cannot open a connection",
        }.get(kind, kind)
        super().__init__(f"{endpoint}: {text}" + (f" ({detail})" if detail else ""), hint=hint)
        self.endpoint = endpoint
        self.kind = kind
        self.detail = detail


class PeerLost(PeerError):
    """An established conversation ended; the outcome of calls in flight is unknown."""

    code = "peer_lost"

    @staticmethod
    def cause_of(error: BaseException) -> str:
        """What to pass on as `cause`: another loss' own, so that sentences do not nest."""
        return error.cause if isinstance(error, PeerLost) else str(error)

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(
            f"{peer}: connection lost ({cause}); the outcome of calls in flight is unknown"
        )
        self.peer = peer
        self.cause = cause


class PeerRestarted(PeerError):
    """The process behind a known address is a new one; handles of the old one are gone."""

    code = "peer_restarted"


class PeerRefused(PeerError):
    """The other side answered and said no. `reason` is its stable code."""

    code = "peer_refused"

    def __init__(self, reason: str, detail: str = "", *, hint: str = "") -> None:
        super().__init__(
            f"refused by the peer: {reason}" + (f" ({detail})" if detail else ""), hint=hint
        )
        self.reason = reason
        self.detail = detail


class PeerProtocolError(PeerError):
    """Bytes arrived that the protocol does not allow. The connection is closed."""

    code = "peer_protocol"


class OutcomeUnknown(PeerLost):
    """A call was on its way when its link ended: the peer may have run the handler, or not."""

    code = "outcome_unknown"


class NotAdmitted(PeerError):
    """A message was given up before a byte of it left: nothing of it reached the peer. `cause` says
    why; sending it again is safe.
    """

    code = "not_admitted"

    def __init__(self, peer: str, cause: str, *, hint: str = "") -> None:
        super().__init__(f"{peer}: message not sent ({cause})", hint=hint)
        self.peer = peer
        self.cause = cause


class PeerDraining(PeerError):
    """The peer shuts down and takes no new requests; the handler did not run."""

    code = "peer_draining"

    def __init__(self, peer: str) -> None:
        super().__init__(f"{peer}: request rejected, the peer is shutting down")
        self.peer = peer


class RequestFailed(PeerError):
    """The peer answered a message with an error, or its answer cannot be had. `reason` is one of
    unknown_handler, mismatch, decode, failed (the handler raised, or a payload cannot be fetched),
    overflow (its lane is full), too_large (for the receiver's limit), fetch_timeout (a large
    payload was not fetched in the receiver's time) or internal.
    """

    code = "request_failed"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(
            f"the peer could not answer: {reason}" + (f" ({detail})" if detail else "")
        )
        self.reason = reason
        self.detail = detail


class StreamError(PeerError):
    """A stream ended before its end. `kind` is one of failed (the sender said so, or an item could
    not be had), dropped (the sender went away), cancelled (the receiver said so), lost (the peer or
    the link is gone) or protocol (the peer broke the rules). When attaching: unknown (no such
    stream, or it has ended), attached (it has a producer) or full (the receiver has no room).
    """

    code = "stream"

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"stream {kind}" + (f" ({detail})" if detail else ""))
        self.kind = kind
        self.detail = detail


class UnknownHandle(OrbitError):
    """The owner holds nothing under this handle: never registered, released, or from an earlier
    life.
    """

    code = "unknown_handle"

    def __init__(self, handle: str) -> None:
        super().__init__(f"no data is registered under handle {handle}")
        self.handle = handle


class WrongDirection(UsageError):
    """A destination was asked for its bytes, or a payload was to be written."""

    code = "direction"


class OutOfRange(UsageError):
    """Bytes were named that do not lie within the memory they were named of."""

    code = "out_of_range"


class RegisterOwnedError(OrbitError):
    """Memory was not registered. `buffer` is the caller's object, given back untouched; the reason
    is `cause` (BudgetExceeded: the routine one).
    """

    code = "register_owned"

    def __init__(self, cause: OrbitError, buffer: object) -> None:
        super().__init__(f"the buffer was not registered: {cause}", hint=cause.hint)
        self.cause = cause
        self.buffer = buffer


class LeaseError(OrbitError):
    """A lease is unknown, ended already, or belongs to another handle."""

    code = "lease"


class DeviceError(OrbitError):
    """A verbs call failed. `device`, `verb` and `errno` say which and how."""

    code = "device"

    def __init__(
        self, device: str, verb: str, errno: int, detail: str = "", *, hint: str = ""
    ) -> None:
        text = os.strerror(errno) if errno else "failed"
        super().__init__(
            f"{device}: {verb}: {text}" + (f" ({detail})" if detail else ""), hint=hint
        )
        self.device = device
        self.verb = verb
        self.errno = errno


class PathUnavailable(OrbitError):
    """A demanded path cannot be had. Raised before the first byte moves. `reason` is a PathReason
    value.
    """

    code = "path_unavailable"

    def __init__(self, path: str, reason: str, detail: str = "", *, hint: str = "") -> None:
        super().__init__(
            f"no {path} path: {reason}" + (f" ({detail})" if detail else ""), hint=hint
        )
        self.path = path
        self.reason = reason
        self.detail = detail


class PathFailed(OrbitError):
    """A path broke during a transfer, after every writer of the target has stopped. `reason` is a
    PathReason.
    """

    code = "path_failed"

    def __init__(self, path: str, reason: str, detail: str = "", *, hint: str = "") -> None:
        text = f"{path} transfer failed: {reason}" + (f" ({detail})" if detail else "")
        super().__init__(text, hint=hint)
        self.path = path
        self.reason = reason
        self.detail = detail


class CompletionError(OrbitError):
    """A work request completed in error."""

    code = "completion"

    def __init__(
        self, status: int, status_name: str, vendor_err: int, qp_num: int, opcode: str
    ) -> None:
        super().__init__(
            f"{opcode} on queue pair {qp_num}: {status_name} ({status}, vendor {vendor_err})"
        )
        self.status = status
        self.status_name = status_name
        self.vendor_err = vendor_err
        self.qp_num = qp_num
        self.opcode = opcode


class TransferFailed(OrbitError):
    """Every allowed attempt failed. `attempts` holds their errors, oldest first."""

    code = "transfer_failed"

    def __init__(self, what: str, attempts: Sequence[BaseException]) -> None:
        detail = "; then ".join(str(a) for a in attempts)
        super().__init__(f"{what}: {detail}")
        self.attempts = tuple(attempts)


class Unquiesced(OrbitError):
    """The end of hardware access to memory could not be proven. The memory stays held and
    charged: do not free it.
    """

    code = "unquiesced"

    def __init__(self, what: str, retained_bytes: int, cause: str) -> None:
        super().__init__(
            f"{what}: {retained_bytes} bytes retained, end of access not proven ({cause})"
        )
        self.what = what
        self.retained_bytes = retained_bytes
        self.cause = cause


class LabError(OrbitError):
    """The SoftRoCE lab could not do its part. `stage` names the step that failed (tools, kernel,
    boot, device ...).
    """

    code = "lab"

    def __init__(self, stage: str, detail: str, *, hint: str = "") -> None:
        super().__init__(f"lab stage {stage} failed: {detail}", hint=hint)
        self.stage = stage
        self.detail = detail


class InternalError(OrbitError):
    """A bug in orbit: an invariant did not hold."""

    code = "internal"
