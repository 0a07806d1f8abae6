"""The fake fabric and its devices, as a test scripts them.

Owns the C side of the fake (`_turn/scripted.h`) and the script of each device: which completions
come late, twice or never, which work requests fail, which posts and verbs are refused. It executes
the InfiniBand specification, or rdma_rxe's measured departures when the fabric is made with
`rxe=True`. It knows no provider and no event loop.
"""

from __future__ import annotations

import ctypes
import enum
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import DeviceError, UsageError
from . import status as wc_status
from .async_events import AsyncEventKind
from .provider import NativeObject
from .quirks import RXE
from .scripted_port import ScriptedPort
from .turn import BIND_WINDOW, READ, Turn, library_path

ANY_OPCODE = 255
RECEIVE = 64  # the `opcode` of a rule for receives
FOREVER = 0xFFFFFFFF

_EINVAL = 22

_HOLD, _LOSE, _DUPLICATE, _FAIL, _DELAY, _REFUSE = range(1, 7)
_RULE = struct.Struct("=6I")
_COUNTERS = struct.Struct("=10Q")

_CFunction = Callable[..., int]


class Step(enum.IntEnum):
    """enum fake_step: where a helper's call is when a completion is to come in between."""

    BEFORE_POLL = 1
    AFTER_POLL = 2  # that found nothing
    BEFORE_ARM = 3
    AFTER_ARM = 4
    BEFORE_SLEEP = 5  # of `wait`
    BEFORE_DRAIN = 6  # of a channel's events
    AFTER_DRAIN = 7


@dataclass(frozen=True, slots=True)
class FakeCounters:
    """struct fake_counters: what a device did, and what was done to it that must not be."""

    sent_bytes: int
    binds: int
    invalidates: int
    flushed: int
    receiver_not_ready: int  # requests of peers that met no receive here
    double_invalidates: int
    destroyed_with_windows: int
    keys_reused: int
    overruns: int
    live_objects: int

    @property
    def misuse(self) -> dict[str, int]:
        """Not empty means a bug in the caller, on any provider."""
        names = ("double_invalidates", "destroyed_with_windows", "keys_reused", "overruns")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class FakeLibrary:
    """The functions of scripted.h. All of them keep the GIL."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(str(library_path("scripted")))
        self._functions: dict[str, _CFunction] = {}

    def call(self, name: str, *arguments: int | bytes) -> int:
        """For functions that return 0 or -errno, or a value that fits 32 bits."""
        return self._function(name, ctypes.c_int, arguments)(*arguments)

    def make(self, device: str, verb: str, name: str, *arguments: int) -> int:
        """For makers: the new object's address. DeviceError with the maker's errno."""
        error = ctypes.c_int()
        function = self._function(name, ctypes.c_uint64, (*arguments, b""))
        made = function(*arguments, ctypes.addressof(error))
        if error.value or not made:
            raise DeviceError(device, verb, -error.value)
        return made

    def address(self, name: str, *arguments: int) -> int:
        return self._function(name, ctypes.c_uint64, arguments)(*arguments)

    def _function(
        self, name: str, result: type[ctypes._SimpleCData[int]], arguments: tuple[int | bytes, ...]
    ) -> _CFunction:
        function = self._functions.get(name)
        if function is None:
            found = self._library[name]
            # uint32_t arguments travel in whole registers on both supported architectures.
            found.argtypes = [
                ctypes.c_void_p if isinstance(a, bytes) else ctypes.c_uint64 for a in arguments
            ]
            found.restype = result
            function = self._functions[name] = found
        return function


class ScriptedFabric:
    """Devices that reach each other, in this process. `rxe` makes them behave as rdma_rxe does."""

    def __init__(self, *, rxe: bool = False) -> None:
        self.rxe = rxe
        self.library = FakeLibrary()
        self.turn = Turn(library_path("scripted"))
        self.devices: dict[str, ScriptedDevice] = {}
        self.native = self.library.address("fake_fabric_new", int(rxe))
        # Memory only; what still runs at interpreter exit keeps it.
        finalizer = weakref.finalize(self, _free_fabric, self.library, self.native)
        finalizer.atexit = False

    def add_device(self, name: str, *gids: str) -> ScriptedDevice:
        """`gids` fill the table from index 0; "::" leaves an entry empty. Without any, one
        IPv4-mapped GID is made up at index 1, behind a link-local one, as a RoCE device has them.
        """
        if name in self.devices:
            raise UsageError(f"the fabric has a device {name!r} already")
        number = len(self.devices) + 1
        device = ScriptedDevice(self, name)
        table = gids or (f"fe80::5054:ff:fe00:{number:x}", f"::ffff:198.18.0.{number}")
        for index, gid in enumerate(table):
            device.set_gid(index, gid)
        self.devices[name] = device
        return device


def _free_fabric(library: FakeLibrary, native: int) -> None:
    library.address("fake_fabric_free", native)


@dataclass(slots=True)
class _VerbFailure:
    errno: int
    skip: int
    left: int


class ScriptedDevice(ScriptedPort):
    """One device of a fabric and its script. Rules match work requests of this device as they are
    posted (receives: as they complete), after `skip` of the same opcode, for `count` of them."""

    def __init__(self, fabric: ScriptedFabric, name: str) -> None:
        super().__init__(fabric, name)
        if fabric.rxe:
            self.facts.limits = replace(self.facts.limits, vendor_id=RXE.vendor_id)
            self.facts.message_bytes_max = 8 << 20
        self._failures: dict[str, _VerbFailure] = {}

    # -- completions and work requests

    def hold(self, opcode: int = ANY_OPCODE, *, skip: int = 0, count: int = FOREVER) -> None:
        """Late: the completions, and those behind them on the same queue, wait for `release`."""
        self._rule(_HOLD, opcode, skip, count)

    def lose(self, opcode: int, *, skip: int = 0, count: int = 1) -> None:
        self._rule(_LOSE, opcode, skip, count)

    def duplicate(self, opcode: int, *, skip: int = 0, count: int = 1) -> None:
        self._rule(_DUPLICATE, opcode, skip, count)

    def fail(
        self, opcode: int, status: int, *, vendor_err: int = 0, skip: int = 0, count: int = 1
    ) -> None:
        """Complete with `status` (see `status.py`) instead of being executed; the queue pair goes
        to ERR."""
        self._rule(_FAIL, opcode, skip, count, status, vendor_err)

    def fail_bind(self, *, skip: int = 0, count: int = 1) -> None:
        self.fail(BIND_WINDOW, wc_status.MW_BIND_ERR, skip=skip, count=count)

    def delay_payload(self, opcode: int = READ, *, skip: int = 0, count: int = FOREVER) -> None:
        """The bytes of a READ or WRITE move at `release`, and never when the queue pair dies
        before."""
        self._rule(_DELAY, opcode, skip, count)

    def refuse_post(
        self, opcode: int, errno: int, *, known: bool = True, skip: int = 0, count: int = 1
    ) -> None:
        """The entry is refused at post. Not `known`: the provider cannot tell how many it took
        before."""
        self._rule(_REFUSE, opcode, skip, count, errno, int(known))

    def release(self) -> int:
        """Move delayed payloads, then deliver held completions; how many. The rules stay."""
        return self._call("fake_device_release")

    def release_at(self, step: Step, *, skip: int = 0) -> None:
        """`release` once, inside the next call of the helper that reaches `step` after `skip`
        others did: what a completion does that comes in between."""
        self._call("fake_device_release_at", int(step), skip)

    def clear_rules(self) -> None:
        self._call("fake_device_clear_rules")
        self._failures.clear()

    # -- verbs

    def fail_verb(self, verb: str, errno: int, *, skip: int = 0, count: int = 1) -> None:
        """Refuse a verb by its libibverbs name without `ibv_`: "open_device", "reg_mr", "create_qp"
        ..."""
        self._failures[verb] = _VerbFailure(errno, skip, count)

    def check_verb(self, verb: str) -> None:
        """The provider asks before it executes."""
        failure = self._failures.get(verb)
        if failure is None:
            return
        if failure.skip:
            failure.skip -= 1
        elif failure.left:
            failure.left -= 1
            raise DeviceError(self.name, verb, failure.errno, "scripted")

    def check_limit(self, verb: str, asked: int, limit: int) -> None:
        """As a device does it that has no more."""
        if asked > limit:
            raise DeviceError(self.name, verb, _EINVAL, f"{asked} asked, it has {limit}")

    # -- what happened

    def raise_event(self, kind: AsyncEventKind, about: NativeObject | None = None) -> None:
        """An asynchronous event: about an object of this device, or about the device or its port,
        for every context of it."""
        target = about.native if about is not None else self.native
        if self.fabric.library.call("fake_raise_event", target, kind.number, 1):
            raise UsageError(f"{self.name}: {kind} is about an object that is gone")

    def counters(self) -> FakeCounters:
        buffer = ctypes.create_string_buffer(_COUNTERS.size)
        address = ctypes.addressof(buffer)
        self.fabric.library.call("fake_device_counters", self.native, address)
        return FakeCounters(*_COUNTERS.unpack(buffer.raw))

    def reaches(self, address: int, nbytes: int) -> int:
        """How many ways it still has to these bytes: windows that are bound over them, and work
        that names them and whose end nobody has seen."""
        return self._call("fake_device_reaches", address, nbytes)

    @property
    def panicked(self) -> bool:
        """The kernel under an rxe device would have died: a window was invalidated that was not
        bound."""
        return self.fabric.rxe and self.counters().double_invalidates > 0

    def _rule(
        self, action: int, opcode: int, skip: int, count: int, status: int = 0, extra: int = 0
    ) -> None:
        packed = _RULE.pack(action, opcode, skip, count, status, extra)
        if self.fabric.library.call("fake_device_add_rule", self.native, packed):
            raise UsageError(f"{self.name}: too many rules; clear_rules() first")
