"""Processes with everything open on real devices and a bound window, that then end or fork as they
are told: nothing, exit, wait, fork-exit or fork-drop, one word per line in.

Each is a child of this one, which has opened nothing: starting Python costs seconds on an emulated
processor. Says "open PID" when all is there, and "ended STATUS"; what a child finds after it had
opened goes to that.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

from orbit.errors import ClosedError
from orbit.verbs import status
from orbit.verbs._pyverbs import PyverbsProvider
from orbit.verbs.turn import pack_send
from tests.contract.turn_rig import Rig, made_rig

WORKS, BROKEN, CHILD_WAS_SERVED = 0, 3, 4


def child(rig: Rig, how: str) -> None:
    """Ask the parent's objects for everything, then end in a way that runs destructors."""
    a, b = rig.a, rig.b
    request = pack_send(1, a.address, a.region.lkey, 8)
    for use in (
        lambda: a.turn.post_send(a.qp.native, [request]),
        lambda: a.turn.post_send(1, [request]),
        lambda: a.turn.poll(1),
        lambda: a.context.port(1),
        a.domain.allocate_window,
        a.qp.close,
        b.context.close,
    ):
        try:
            use()
        except ClosedError:
            continue
        os._exit(CHILD_WAS_SERVED)
    if how == "drop":
        rig.__dict__.clear()
        del a, b, request, use
        gc.collect()
        os._exit(WORKS)
    sys.exit(WORKS)


def main(how: str) -> int:
    provider = PyverbsProvider()
    if how == "nothing":  # for comparison
        print("open", os.getpid(), flush=True)
        return WORKS
    source = "rxb1" if "rxb1" in provider.devices() else provider.devices()[0]
    rig = made_rig(provider, provider.devices()[0], provider, source, False)
    key = rig.bind(rig.b.domain.allocate_window(), 0, 4096)
    print("open", os.getpid(), flush=True)
    if how == "wait":
        signal.pause()
    if how.startswith("fork"):
        pid = os.fork()
        if pid == 0:
            child(rig, how.removeprefix("fork-"))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != WORKS:
            return code
        with contextlib.suppress(AssertionError):
            if rig.read(key, 0, 4096).status == status.SUCCESS:
                return WORKS
        return BROKEN
    return WORKS


def serve() -> int:
    PyverbsProvider()  # opens nothing
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return main(line.strip())
        _, status = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
    return WORKS


if __name__ == "__main__":
    sys.exit(serve())
