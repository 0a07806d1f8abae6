"""C37 with messages, streams and files: read-only memory is sent from everywhere, a file that was
cut short under its registration ends the transfer and not the process, and nothing ever writes into
what is read-only.

Payloads under handles, over both paths, are tests/scenarios/memory_cases.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from tests.integration.messages.settled import TCP

Run = Callable[[Coroutine[Any, Any, None]], None]
SMALL, LARGE = 1000, 400_000  # a message of one packet, and one that is staged
ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def sources(payload: bytes) -> Iterator[dict[str, Any]]:
    """The case's list."""
    frozen = np.frombuffer(bytearray(payload), "u1")
    frozen.setflags(write=False)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile(dir="/dev/shm"))
        file.write(payload)
        file.flush()
        fd = file.fileno()
        mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        private = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        yield {
            "bytes": payload,
            "view": memoryview(bytearray(payload)).toreadonly(),
            "array": frozen,
            "mapping": mapping,
            "private": private,  # of these the only one that may be written
        }
        file.seek(0)
        assert file.read() == payload
        gc.collect()
        for pages in (mapping, private):
            pages.close()  # nobody holds an export


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_messages_and_items_are_sent_from_it(run_async: Run, nbytes: int) -> None:
    payload = pattern(nbytes)
    seen: list[bytes] = []

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as server, orbit.Node(TCP) as client:
            server.handler("echo", lambda message: bytes(message.payload))
            server.handler("keep", lambda message: seen.append(bytes(message.payload)))
            there = client.add_peer(server.address)
            with sources(payload) as found:
                for source in found.values():
                    assert await client.unary(there, "echo", source) == payload
                    await client.send(there, "keep", source, wait=True)
                async with server.open_stream() as inbox:

                    async def collect() -> list[bytes]:
                        return [bytes(item) async for item in inbox]

                    collecting = asyncio.ensure_future(collect())
                    async with await client.attach_stream(inbox.handle) as sender:
                        for source in found.values():
                            await sender.send(source)
                    assert await collecting == [payload] * len(found)
            assert seen == [payload] * len(found)

    run_async(main())


@pytest.mark.parametrize("nbytes", [0, SMALL, LARGE])
def test_every_source_under_a_handle_and_no_destination(run_async: Run, nbytes: int) -> None:
    payload = pattern(nbytes) if nbytes else b""

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            other = await owner.register_data(pattern(LARGE))
            with sources(payload) if nbytes else contextlib.nullcontext({"bytes": b""}) as found:
                for name, source in found.items():
                    for register in (owner.register_data, owner.register_data_pinned):
                        handle = await register(source)
                        data, lease = await consumer.get(handle)
                        assert data == payload
                        await consumer.release(handle, lease)
                    if name == "private":
                        continue
                    for refused in (
                        owner.register_owned(source),
                        owner.register_data_in_place(source),
                        owner.register_destination(source),
                        consumer.get_into(other, source),
                        consumer.get_into(other, [bytearray(LARGE), source]),
                    ):
                        with pytest.raises(orbit.UsageError, match="read-only"):
                            await refused
            assert owner.statistics().slots.leases_held == 0

    run_async(main())


TRUNCATED = """
import asyncio, mmap, sys, tempfile
import orbit
from orbit.testing.pattern import pattern

CONFIG = orbit.NodeConfig(transport="tcp", timeouts=orbit.TimeoutConfig(no_progress_s=2.0))
NBYTES = 8 << 20

async def main():
    async with orbit.Node(CONFIG) as owner, orbit.Node(CONFIG) as consumer:
        consumer.add_peer(owner.address)
        with tempfile.TemporaryFile() as file:
            file.write(pattern(NBYTES))
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            handle = await owner.register_data(mapped, orbit.RegisterOptions(retain=True))
            _, lease = await consumer.get(handle)
            await consumer.detach(handle, lease)
            file.truncate(int(sys.argv[1]))
            for _ in range(3):
                try:
                    await consumer.get(handle)
                except orbit.OrbitError as error:
                    print(type(error).__name__)
            await owner.withdraw(handle)
        healthy = await owner.register_data(pattern(NBYTES))
        data, lease = await consumer.get(healthy)
        assert data == pattern(NBYTES)
        await consumer.release(healthy, lease)
        assert owner.statistics().slots.slots == 0

asyncio.run(main())
print("alive")
"""


@pytest.mark.parametrize("left", [0, 4 << 20, (4 << 20) + 100])
def test_a_file_that_was_cut_short_under_its_payload(left: int) -> None:
    """Pages that are gone must not be touched by this process: the kernel is asked to send them,
    and says no.
    """
    command = [sys.executable, "-c", TRUNCATED, str(left)]
    ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *errors, last = ended.stdout.split()
    assert last == "alive"
    assert len(errors) == 3
    assert set(errors) <= {"PathFailed", "TransferFailed", "PeerLost"}
