"""ctypes binding of the C helper (`_turn/turn.h`): posting, polling, arming and waiting on native
addresses.

Owns the loading of the libraries and the rule which call keeps the GIL. It knows nothing of lanes,
grants or what a work request is for; it neither retries nor waits except in `wait`, `nap`,
`modify`, `poller_stop` and `prefault`, which drop the GIL. After a fork every call of the child's
copies raises ClosedError. The record builders of `records` are re-exported here.
"""

from __future__ import annotations

import ctypes
import errno as errnos
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from ..errors import ClosedError, DeviceError
from .prefault import prefault
from .records import (
    ACCESS_LOCAL_WRITE,
    ACCESS_MW_BIND,
    ACCESS_REMOTE_READ,
    ACCESS_REMOTE_WRITE,
    BIND_WINDOW,
    FENCE,
    INLINE,
    LOCAL_INV,
    READ,
    SEND,
    SEND_WITH_INV,
    SIGNALED,
    SIZES,
    STATE_ERR,
    STATE_INIT,
    STATE_NAMES,
    STATE_RESET,
    STATE_RTR,
    STATE_RTS,
    WC,
    WINDOW_READ,
    WINDOW_WRITE,
    WRITE,
    Completion,
    QueuePairAttributes,
    pack_bind,
    pack_local_inv,
    pack_read,
    pack_recv,
    pack_send,
    pack_send_with_inv,
    pack_write,
)

ABI = 4
ACCEPTED_UNKNOWN = 0xFFFFFFFF
POLL_MAX = 64  # completions per crossing; a fuller queue is met by the next call
_ARMED = 1  # enum turn_state

_CFunction = Callable[..., int]


class PostResult(NamedTuple):
    """What a post did: `errno` 0 means that every request was taken.

    Otherwise `accepted` requests of the chain were taken, in order, and will complete; None means
    that the provider could not tell, and the queue pair must be fenced (moved to ERR and drained)
    before anything else.
    """

    accepted: int | None
    errno: int


class Look(NamedTuple):
    """What a call saw of a completion queue. Fewer completions than were asked for, and `armed`:
    the next one raises an event. Neither: the next call says why.
    """

    found: list[Completion]
    armed: bool
    events: int  # read and acknowledged


class Posted(NamedTuple):
    """What `post` did. Refused receives keep the send requests from being posted. `look` is None
    when nothing was looked for, or not everything was posted.
    """

    receives: PostResult
    sends: PostResult
    look: Look | None


@dataclass(slots=True)
class Crossings:
    """How often each call went into C: the benchmark reports crossings per operation."""

    post: int = 0
    wake: int = 0
    nap: int = 0
    post_send: int = 0
    post_recv: int = 0
    post_shared_receive: int = 0
    poll: int = 0
    arm: int = 0
    drain_events: int = 0
    wait: int = 0
    poller_drain: int = 0
    modify: int = 0
    prefault: int = 0
    window_key: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__slots__)


def library_path(kind: Literal["native", "scripted"]) -> Path:
    """The built shared object. DeviceError (ENOENT) when this installation has none."""
    for found in sorted((Path(__file__).parent / "_turn").glob(f"_{kind}*.so")):
        return found
    raise DeviceError(
        "helper",
        "load",
        errnos.ENOENT,
        f"this installation was built without the {kind} helper",
        hint="install libibverbs-dev (rdma-core-devel on RPM systems) and build orbit again",
    )


class _Scratch(threading.local):
    """Out-parameters per thread, so that a thread switch between a call and its reading mixes
    nothing up."""

    def __init__(self) -> None:
        self.accepted = ctypes.c_uint32()
        self.accepted_ref = ctypes.byref(self.accepted)
        self.accepted_both = (ctypes.c_uint32 * 2)()  # enum turn_accepted
        self.state = ctypes.c_uint32()
        self.state_ref = ctypes.byref(self.state)
        self.completions = ctypes.create_string_buffer(POLL_MAX * WC.size)
        self.view = memoryview(self.completions).toreadonly()


class _RareCalls:
    """The C functions that no completion loop calls."""

    __slots__ = (
        "async_fd",
        "channel_fd",
        "modify",
        "poller_bind",
        "poller_free",
        "poller_start",
        "poller_stop",
        "set_window_key",
        "window_key",
    )

    def __init__(self, held: ctypes.CDLL, free: ctypes.CDLL) -> None:
        u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        self.async_fd = _function(held, "turn_async_fd", u64)
        self.channel_fd = _function(held, "turn_channel_fd", u64)
        self.modify = _function(free, "turn_modify", u64, u64, ctypes.c_char_p)
        self.poller_bind = _function(held, "turn_poller_bind", u64, ctypes.c_char_p, u32)
        start = (u64, ctypes.c_int, u32, u32, u32, pointer)
        self.poller_start = _function(held, "turn_poller_start", *start, result=u64)
        self.poller_stop = _function(free, "turn_poller_stop", u64, result=None)
        self.poller_free = _function(held, "turn_poller_free", u64, result=None)
        self.set_window_key = _function(held, "turn_set_window_key", u64, u32, result=None)
        self.window_key = _function(held, "turn_window_key", u64)

    def replace_all(self, stand_in: _CFunction) -> None:
        for name in self.__slots__:
            setattr(self, name, stand_in)


class _ForkedAway:
    """Stands in for every C function of a forked child's copy."""

    def __call__(self, *_arguments: object) -> NoReturn:
        raise ClosedError("the verbs helper of the parent process")


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


class Turn:
    """One loaded library. Calls with the GIL held (`post`, `post_*`, `wake`, `poll`, `arm`,
    `drain_events`, `poller_drain`, window keys) never block; `nap`, `wait`, `modify`, `poller_stop`
    and `prefault` drop it. Addresses come from the provider's objects and must be alive.

    `post`, `wake` and `nap` are what a completion loop needs, each in one crossing. They take
    whether the queue is armed from the call before (False: not known), and say it to the next one.
    """

    def __init__(self, library: Path, modify_fn: int = 0) -> None:
        try:
            held = ctypes.PyDLL(str(library))
            free = ctypes.CDLL(str(library))
        except OSError as error:
            raise DeviceError("helper", "load", errnos.ENOEXEC, str(error)) from error
        _check_layout(held, library)
        u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
        self._modify_fn = modify_fn
        look = (u64, u64, pointer, u32, pointer)
        lists = (u64, ctypes.c_char_p, u32, ctypes.c_char_p, u32)
        self._post = _function(held, "turn_post", *lists, pointer, *look)
        self._wake = _function(held, "turn_wake", *look)
        self._post_send = _function(held, "turn_post_send", u64, ctypes.c_char_p, u32, pointer)
        self._post_recv = _function(held, "turn_post_recv", u64, ctypes.c_char_p, u32, pointer)
        self._post_shared_receive = _function(
            held, "turn_post_srq_recv", u64, ctypes.c_char_p, u32, pointer
        )
        self._poll = _function(held, "turn_poll", u64, pointer, u32)
        self._arm = _function(held, "turn_arm", u64)
        self._drain_events = _function(held, "turn_drain_events", u64, u64)
        self._wait = _function(free, "turn_wait", u64, u64, u32, u32, pointer, u32, pointer)
        self._poller_drain = _function(held, "turn_poller_drain", u64, pointer, u32)
        self._rare = _RareCalls(held, free)
        self._scratch = _Scratch()
        self.crossings = Crossings()
        _turns.add(self)

    def post(
        self,
        qp: int,
        receives: Sequence[bytes],
        sends: Sequence[bytes],
        channel: int = 0,
        cq: int = 0,
        armed: bool = False,
        max_completions: int = 0,
    ) -> Posted:
        """Post packed receives and then, as one chain, send requests of one queue pair. With
        `max_completions` (at most POLL_MAX) then as `wake`.
        """
        self.crossings.post += 1
        scratch = self._scratch
        scratch.state.value = armed
        rc = self._post(
            qp,
            b"".join(receives),
            len(receives),
            b"".join(sends),
            len(sends),
            scratch.accepted_both,
            channel,
            cq,
            scratch.completions,
            min(max_completions, POLL_MAX),
            scratch.state_ref,
        )
        if rc < 0:
            return _partly_posted(rc, len(receives), *scratch.accepted_both)
        look = _look(scratch, rc, "poll_cq") if max_completions else None
        return Posted(PostResult(len(receives), 0), PostResult(len(sends), 0), look)

    def wake(
        self, channel: int, cq: int, armed: bool = False, max_completions: int = POLL_MAX
    ) -> Look:
        """Read and acknowledge the channel's events, poll, and where fewer than `max_completions`
        (at most POLL_MAX) were found, arm the queue unless it is `armed`, and poll again. Raises
        DeviceError only when there was no completion: what fails fails in the next call, too.
        """
        self.crossings.wake += 1
        scratch = self._scratch
        scratch.state.value = armed
        wanted = min(max_completions, POLL_MAX)
        count = self._wake(channel, cq, scratch.completions, wanted, scratch.state_ref)
        return _look(scratch, count, "poll_cq")

    def nap(self, channel: int, cq: int, spin_us: int, nap_us: int, armed: bool = False) -> Look:
        """Without the GIL: poll for `spin_us`, then sleep on the channel for up to `nap_us`, until
        there is a completion; then as `wake`. Nothing found: none in time, and the queue is armed.
        """
        self.crossings.nap += 1
        scratch = self._scratch
        scratch.state.value = armed
        count = self._wait(
            cq, channel, spin_us, nap_us, scratch.completions, POLL_MAX, scratch.state_ref
        )
        return _look(scratch, count, "wait")

    def post_send(self, qp: int, requests: Sequence[bytes]) -> PostResult:
        """Post packed requests as one chain, in order, in one crossing."""
        self.crossings.post_send += 1
        scratch = self._scratch
        count = len(requests)
        rc = self._post_send(qp, b"".join(requests), count, scratch.accepted_ref)
        return PostResult(count, 0) if rc == 0 else _refused(rc, scratch.accepted.value)

    def post_recv(self, qp: int, requests: Sequence[bytes]) -> PostResult:
        self.crossings.post_recv += 1
        scratch = self._scratch
        count = len(requests)
        rc = self._post_recv(qp, b"".join(requests), count, scratch.accepted_ref)
        return PostResult(count, 0) if rc == 0 else _refused(rc, scratch.accepted.value)

    def post_shared_receive(self, srq: int, requests: Sequence[bytes]) -> PostResult:
        """The same for a shared receive queue. When `accepted` is None nothing can be fenced: the
        queue is given up with its queue pairs."""
        self.crossings.post_shared_receive += 1
        scratch = self._scratch
        count = len(requests)
        rc = self._post_shared_receive(srq, b"".join(requests), count, scratch.accepted_ref)
        return PostResult(count, 0) if rc == 0 else _refused(rc, scratch.accepted.value)

    def poll(self, cq: int, max_completions: int = POLL_MAX) -> list[Completion]:
        """Up to `max_completions` (at most POLL_MAX) completions. Fewer than that means that the
        queue was empty."""
        self.crossings.poll += 1
        scratch = self._scratch
        count = self._poll(cq, scratch.completions, min(max_completions, POLL_MAX))
        return _completions(scratch, count, "poll_cq") if count else []

    def arm(self, cq: int) -> None:
        """One event at the next completion, errors included. Poll again afterwards: what came
        before raises none."""
        self.crossings.arm += 1
        rc = self._arm(cq)
        if rc < 0:
            raise DeviceError("completion queue", "req_notify_cq", -rc)

    def drain_events(self, channel: int, cq: int) -> int:
        """Read and acknowledge every pending event; how many there were."""
        self.crossings.drain_events += 1
        count = self._drain_events(channel, cq)
        if count < 0:
            raise DeviceError("completion channel", "get_cq_event", -count)
        return count

    def wait(
        self,
        cq: int,
        channel: int,
        spin_us: int,
        nap_us: int,
        max_completions: int = POLL_MAX,
    ) -> list[Completion]:
        """Without the GIL: poll for `spin_us`, then sleep on the channel for up to `nap_us`. Empty
        means none in time, and that the queue is armed."""
        self.crossings.wait += 1
        scratch = self._scratch
        wanted = min(max_completions, POLL_MAX)
        count = self._wait(cq, channel, spin_us, nap_us, scratch.completions, wanted, None)
        return _completions(scratch, count, "wait") if count else []

    def channel_fd(self, channel: int) -> int:
        fd = self._rare.channel_fd(channel)
        if fd < 0:
            raise DeviceError("completion channel", "fd", -fd)
        return fd

    def async_fd(self, context: int) -> int:
        """The descriptor of a context's asynchronous events."""
        fd = self._rare.async_fd(context)
        if fd < 0:
            raise DeviceError("context", "async_fd", -fd)
        return fd

    def poller_start(self, cq: int, event_fd: int, entries: int, idle_us: int, nap_us: int) -> int:
        """The address of a native poller of `cq`; `poller.py` has its life and its rules."""
        error = ctypes.c_int()
        made = self._rare.poller_start(cq, event_fd, entries, idle_us, nap_us, ctypes.byref(error))
        if not made:
            raise DeviceError("completion queue", "start a poller", -error.value)
        return made

    def poller_bind(self, poller: int, cpus: Sequence[int]) -> None:
        """Keep its thread on these processors. Raises DeviceError: it may use none of them."""
        rc = self._rare.poller_bind(poller, struct.pack(f"={len(cpus)}I", *cpus), len(cpus))
        if rc < 0:
            raise DeviceError("completion queue", "bind a poller", -rc)

    def poller_drain(self, poller: int, max_completions: int = POLL_MAX) -> list[Completion]:
        """Up to `max_completions` (at most POLL_MAX), oldest first. Fewer means that the ring was
        empty, and that the next completion is announced. Raises DeviceError once, after them, when
        polling failed."""
        self.crossings.poller_drain += 1
        scratch = self._scratch
        count = self._poller_drain(poller, scratch.completions, min(max_completions, POLL_MAX))
        return _completions(scratch, count, "poll_cq") if count else []

    def poller_stop(self, poller: int) -> None:
        """Without the GIL: stop and join the thread. What it found stays to be drained."""
        self._rare.poller_stop(poller)

    def poller_free(self, poller: int) -> None:
        self._rare.poller_free(poller)

    def set_window_key(self, window: int, key: int) -> None:
        """Write the key of a finished bind back into the window object: a bind that does not say
        what the window has starts from it."""
        self.crossings.window_key += 1
        self._rare.set_window_key(window, key)

    def window_key(self, window: int) -> int:
        self.crossings.window_key += 1
        return self._rare.window_key(window) & 0xFFFFFFFF

    def modify(self, qp: int, attributes: QueuePairAttributes, device: str = "queue pair") -> None:
        """Without the GIL. May block for a second (RTR towards an absent neighbour): call it off
        the event loop."""
        self.crossings.modify += 1
        rc = self._rare.modify(self._modify_fn, qp, attributes.pack())
        if rc < 0:
            state = STATE_NAMES.get(attributes.state, "?")
            raise DeviceError(device, f"modify_qp to {state}", -rc)

    def prefault(self, address: int, length: int) -> None:
        """Without the GIL: fault the pages of a range in before it is registered. Contents stay as
        they are. DeviceError when the range is not mapped."""
        if isinstance(self._poll, _ForkedAway):
            self._poll()
        self.crossings.prefault += prefault(address, length)

    def forget_in_child(self) -> None:
        """The parent's objects are not this process's: make every call raise."""
        gone = _ForkedAway()
        self._post = self._wake = gone
        self._post_send = self._post_recv = self._post_shared_receive = gone
        self._poll = self._arm = self._drain_events = self._wait = self._poller_drain = gone
        self._rare.replace_all(gone)


def _function(
    library: ctypes.CDLL,
    name: str,
    *arguments: type,
    result: type[ctypes._SimpleCData[int]] | None = ctypes.c_int,
) -> _CFunction:
    function = library[name]
    function.argtypes = arguments
    function.restype = result
    return function


def _check_layout(library: ctypes.CDLL, path: Path) -> None:
    try:
        abi = int(library["turn_abi"]())
        sizes = int(library["turn_sizes"]()) & 0xFFFFFFFF
    except AttributeError as error:
        raise DeviceError("helper", "load", errnos.ENOEXEC, f"{path.name}: {error}") from error
    if (abi, sizes) != (ABI, SIZES):
        raise DeviceError(
            "helper",
            "load",
            errnos.ENOEXEC,
            f"{path.name} has ABI {abi} and sizes {sizes:#x}, expected {ABI} and {SIZES:#x}",
            hint="build orbit again: the helper was built from another version",
        )


def _refused(rc: int, accepted: int) -> PostResult:
    return PostResult(None if accepted == ACCEPTED_UNKNOWN else accepted, -rc)


def _partly_posted(rc: int, receives: int, accepted: int, accepted_sends: int) -> Posted:
    if accepted == receives:
        return Posted(PostResult(receives, 0), _refused(rc, accepted_sends), None)
    return Posted(_refused(rc, accepted), PostResult(0, -rc), None)


def _look(scratch: _Scratch, count: int, verb: str) -> Look:
    found = _completions(scratch, count, verb) if count else []
    state = scratch.state.value
    return Look(found, bool(state & _ARMED), state >> 1)


def _completions(scratch: _Scratch, count: int, verb: str) -> list[Completion]:
    if count < 0:
        raise DeviceError("completion queue", verb, -count)
    return list(map(Completion._make, WC.iter_unpack(scratch.view[: count * WC.size])))


def _after_fork_in_child() -> None:
    for turn in list(_turns):
        turn.forget_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = [
    "ACCESS_LOCAL_WRITE",
    "ACCESS_MW_BIND",
    "ACCESS_REMOTE_READ",
    "ACCESS_REMOTE_WRITE",
    "BIND_WINDOW",
    "FENCE",
    "INLINE",
    "LOCAL_INV",
    "POLL_MAX",
    "READ",
    "SEND",
    "SEND_WITH_INV",
    "SIGNALED",
    "STATE_ERR",
    "STATE_INIT",
    "STATE_RESET",
    "STATE_RTR",
    "STATE_RTS",
    "WINDOW_READ",
    "WINDOW_WRITE",
    "WRITE",
    "Completion",
    "Crossings",
    "Look",
    "PostResult",
    "Posted",
    "QueuePairAttributes",
    "Turn",
    "library_path",
    "pack_bind",
    "pack_local_inv",
    "pack_read",
    "pack_recv",
    "pack_send",
    "pack_send_with_inv",
    "pack_write",
]
