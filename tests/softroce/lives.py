"""The process of one host from which all its workers come: one JSON object, a Slot, per worker on
its command line. `commands` and `answers` are descriptors that it inherits.

It has imported everything, looked for the rails and opened nothing. A worker's life is a child, so
that the next one is there at once where starting Python costs seconds on an emulated processor.
Each life says `ready` with its process id; after its end, `exited` with its exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.softroce import message_worker, node_worker, rails

_NO_MORE = 100  # a life's exit status when its commands have ended


@dataclass(frozen=True)
class Slot:
    kind: str  # "messages" or "node"
    listen: str
    worker_id: int
    commands: int
    answers: int

    @property
    def serve(self) -> Callable[[], Coroutine[Any, Any, None]]:
        if self.kind == "messages":
            return lambda: message_worker.serve(self.listen, self.worker_id)
        return lambda: node_worker.serve(self.listen)


def keep(slot: Slot) -> int:
    """One life after another, until nobody commands any more."""
    while True:
        child = os.fork()
        if child == 0:
            asyncio.run(slot.serve())
            return _NO_MORE
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == _NO_MORE:
            return 0
        print(json.dumps({"exited": code}), flush=True)


def main(words: list[str]) -> int:
    import orbit.node  # (what no life has to import then)
    from orbit.verbs._pyverbs import PyverbsProvider

    slots = [Slot(**json.loads(word)) for word in words]
    with contextlib.suppress(orbit.DeviceError):
        PyverbsProvider()  # opens nothing
    rails.look_once()
    rails.discovered()
    keepers = []
    for slot in slots:
        keeper = os.fork()
        if keeper == 0:
            os.dup2(slot.commands, sys.stdin.fileno())
            os.dup2(slot.answers, sys.stdout.fileno())
            for other in slots:  # a worker ends when nobody can command it any more
                os.close(other.commands)
                os.close(other.answers)
            return keep(slot)
        keepers.append(keeper)
    for slot in slots:  # whoever waits for an answer hears of a keeper's end
        os.close(slot.commands)
        os.close(slot.answers)
    for keeper in keepers:
        os.waitpid(keeper, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
