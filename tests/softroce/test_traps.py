"""The five measured traps of pyverbs, each shut: destructors, fork, the GIL, lost key write-backs,
unacknowledged events.

Each test would hang, fail or leave a line in the kernel log without the door's care
(docs/design/pyverbs-door.md).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orbit.errors import ClosedError, DeviceError
from orbit.verbs import status
from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.provider import QueuePairCaps
from orbit.verbs.quirks import RXE, quirks_of
from orbit.verbs.turn import (
    STATE_INIT,
    STATE_RTR,
    QueuePairAttributes,
    pack_read,
    pack_send_with_inv,
)
from tests.contract.turn_rig import Endpoint, Rig, closing, made_rig

# Without the care: 50 s, in a state that cannot be killed.
GONE_WITHIN_S = 2.0
TICKER_GAP_S = 0.05  # without: the whole second
FAILED = 255
KERNEL_FAULT = re.compile(r"WARNING:|BUG:|Oops|blocked for more than|general protection|RIP:")


@pytest.fixture
def rig() -> Iterator[Rig]:
    provider = PyverbsProvider()
    source = "rxb1" if "rxb1" in provider.devices() else provider.devices()[0]
    yield from closing(made_rig(provider, provider.devices()[0], provider, source, False))


@pytest.fixture
def kernel_log() -> Iterator[None]:
    """What the kernel says during the test must hold no fault."""
    before = len(read_kernel_log())
    yield
    new = read_kernel_log()[before:]
    assert not [line for line in new if KERNEL_FAULT.search(line)]


def read_kernel_log() -> list[str]:
    return subprocess.run(["dmesg"], check=True, text=True, capture_output=True).stdout.splitlines()


class Opener:
    """Starts processes of `all_open`, one after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.softroce.all_open"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def open(self, how: str) -> int:
        """Until everything is open; its process id."""
        assert self._process.stdin
        print(how, file=self._process.stdin, flush=True)
        return int(self._heard("open"))

    def ended(self) -> tuple[int, float]:
        """With which status, and after how many seconds from now."""
        start = time.monotonic()
        code = int(self._heard("ended"))
        return code, time.monotonic() - start

    def close(self) -> None:
        self._process.communicate(timeout=90)

    def _heard(self, what: str) -> str:
        assert self._process.stdout
        word, _, rest = self._process.stdout.readline().partition(" ")
        assert word == what
        return rest


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    process = Opener()
    yield process
    process.close()


@pytest.mark.usefixtures("kernel_log")
class TestDestructors:
    def test_an_exit_with_everything_open(self, opener: Opener) -> None:
        opener.open("nothing")
        _, usual_s = opener.ended()
        opener.open("exit")
        code, seconds = opener.ended()
        assert code == 0
        assert seconds < usual_s + GONE_WITHIN_S

    def test_a_kill_with_everything_open(self, opener: Opener) -> None:
        os.kill(opener.open("wait"), signal.SIGKILL)
        code, seconds = opener.ended()
        assert code == -9
        assert seconds < GONE_WITHIN_S

    def test_closed_objects_leave_nothing(self) -> None:
        """A life, many times over, with the collector in between: no descriptor stays."""
        provider = PyverbsProvider()
        device = provider.devices()[0]

        def life() -> None:
            endpoint = Endpoint(provider, device)
            endpoint.window()
            endpoint.close()
            gc.collect()

        life()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(8):
            life()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_no_parent_closes_before_its_children(self, rig: Rig) -> None:
        for parent in (rig.a.context, rig.a.domain, rig.a.cq, rig.a.channel):
            with pytest.raises(DeviceError) as busy:
                parent.close()
            assert busy.value.errno == errno.EBUSY
        assert rig.read(0, 0, 0).status == status.SUCCESS

    def test_a_closed_parent_makes_nothing(self) -> None:
        provider = PyverbsProvider()
        context = provider.open(provider.devices()[0])
        context.close()
        with pytest.raises(ClosedError):
            context.allocate_domain()


@pytest.mark.usefixtures("kernel_log")
class TestFork:
    @pytest.mark.parametrize("how", ["exit", "drop"])
    def test_a_child_leaves_the_parents_queue_pairs_alone(self, opener: Opener, how: str) -> None:
        """The child is refused everything (else 4); the parent still reads its window (else 3)."""
        opener.open(f"fork-{how}")
        code, _ = opener.ended()
        assert code == 0


class TestInterpreterLock:
    def test_a_slow_transition_does_not_stop_the_others(self, rig: Rig) -> None:
        """RTR towards a neighbour that is not there takes a second; a ticker goes on meanwhile."""
        fresh = rig.a.new_qp()
        rig.a.closing.append(fresh)
        index, own_gid = rig.gids[0]
        fresh.modify(QueuePairAttributes(STATE_INIT))
        to_nobody = QueuePairAttributes(
            STATE_RTR, dgid=re.sub(r"\d+$", "99", own_gid), sgid_index=index
        )
        for _ in range(3):  # an emulated processor stalls by itself now and then
            usual_s, _, _ = longest_gap_during(lambda: time.sleep(0.3))
            gap_s, total_s, error = longest_gap_during(lambda: fresh.modify(to_nobody))
            assert isinstance(error, DeviceError)
            assert error.errno == errno.ETIMEDOUT
            assert total_s > 0.5  # it did block, but not the others
            if gap_s < usual_s + TICKER_GAP_S:
                break
        assert gap_s < usual_s + TICKER_GAP_S

    def test_prefaulting_does_not_stop_the_others(self, rig: Rig) -> None:
        """It keeps a processor busy, so only that the others go on at all can be said."""
        memory = mmap.mmap(-1, 64 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        gap_s, total_s, error = longest_gap_during(lambda: rig.a.turn.prefault(address, 64 << 20))
        assert error is None
        assert gap_s < total_s / 2


def longest_gap_during(
    work: Callable[[], object],
) -> tuple[float, float, BaseException | None]:
    """Of a 1 ms ticker in this thread while another one works; how long that took; its error."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            errors.append(None)
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run)
    start = last = time.perf_counter()
    gap = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        last, gap = now, max(gap, now - last)
    thread.join()
    return gap, last - start, errors[0]


class TestEvents:
    def test_acknowledged_events_do_not_block_the_destroy(self, rig: Rig) -> None:
        a = rig.a
        channel = a.context.create_channel()
        cq = a.context.create_cq(64, channel)
        c, d = a.domain.create_queue_pair(cq, cq, QueuePairCaps(8, 8)), rig.b.new_qp()
        rig.connect(c, d)
        events = 0
        for i in range(50):
            a.turn.arm(cq.native)
            a.post(pack_read(i, a.address, a.region.lkey, 0, 0, 0), qp=c)
            assert a.turn.wait(cq.native, channel.native, 0, 2_000_000)
            events += a.turn.drain_events(channel.native, cq.native)
        for thing in (c, d):
            thing.close()
        start = time.monotonic()
        cq.close()
        channel.close()
        assert time.monotonic() - start < GONE_WITHIN_S

    def test_unread_events_do_not_block_it_either(self, rig: Rig) -> None:
        a = rig.a
        a.turn.arm(a.cq.native)
        rig.read(0, 0, 0)  # the rig's own close follows


class TestWhatTheDeviceSays:
    def test_the_quirk_row_is_true(self, rig: Rig) -> None:
        quirks = quirks_of(rig.b.context.limits().vendor_id)
        assert quirks is RXE
        assert (rig.b.region.rkey != 0) is quirks.remote_key_without_access
        key = rig.bind(rig.b.window(), 0, 4096)
        outside = rig.read(key, 8192, 8)
        assert (outside.status == status.REM_ACCESS_ERR) is quirks.enforces_window_range
        rig.b.receive()
        rig.a.post(pack_send_with_inv(1, rig.a.address, rig.a.region.lkey, 8, key))
        assert rig.a.done().status == status.SUCCESS
        assert rig.b.done().wc_flags & 0xC == quirks.with_inv_flag

    def test_grants_are_read_back(self, rig: Rig) -> None:
        plain = rig.a.domain.create_queue_pair(rig.a.cq, rig.a.cq, QueuePairCaps(8, 8))
        assert plain.caps.inline_bytes == 16  # asked for none
        plain.close()

    def test_facts(self, rig: Rig) -> None:
        limits, port = rig.a.context.limits(), rig.a.context.port(1)
        assert limits.window_type_2b
        assert (port.active, port.state, port.link_layer) == (True, "ACTIVE", "ethernet")
        assert port.mtu in {1024, 2048, 4096}
        assert rig.a.context.gid(1, 200) == "::"
        with pytest.raises(DeviceError):
            rig.a.context.port(2)


class TestPermission:
    def test_a_device_node_that_may_not_be_opened(self) -> None:
        nodes = {node: node.stat().st_mode for node in Path("/dev/infiniband").glob("uverbs*")}
        for node in nodes:
            node.chmod(0o600)
        try:
            assert as_nobody(open_first_device) == errno.EACCES
        finally:
            for node, mode in nodes.items():
                node.chmod(mode & 0o777)

    def test_more_memory_than_may_be_locked(self) -> None:
        assert as_nobody(register_too_much) == errno.ENOMEM


def as_nobody(work: Callable[[], int]) -> int:
    """The exit status of `work` in a child without privileges and with little lockable memory."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        os.setgid(65534)
        os.setuid(65534)
        code = FAILED
        try:
            code = work()
        finally:
            os._exit(code)  # never back into pytest
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def open_first_device() -> int:
    provider = PyverbsProvider()
    try:
        provider.open(provider.devices()[0])
    except DeviceError as error:
        return error.errno
    return 0


def register_too_much() -> int:
    provider = PyverbsProvider()
    domain = provider.open(provider.devices()[0]).allocate_domain()
    memory = mmap.mmap(-1, 1 << 20)
    try:
        domain.register(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20, 1)
    except DeviceError as error:
        return error.errno if "ulimit -l" in error.hint else 0
    return 0
