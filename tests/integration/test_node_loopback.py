"""Two nodes of one process over real sockets, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from tests.conftest import LOOP_KINDS

Run = Callable[[Any], Any]
TCP = orbit.NodeConfig(transport="tcp")  # the same on a host with devices
INLINE_MAX = orbit.RendezvousConfig().inline_max_bytes
MIB = 1 << 20
SIZES = (0, 1, INLINE_MAX - 1, INLINE_MAX, INLINE_MAX + 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 3)

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)


def test_answers_with_payloads_do_not_pile_up_until_the_link_breaks(run_async: Run) -> None:
    """Together they are more than the backlog of a link (4 MiB)."""

    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            payload = pattern(INLINE_MAX, seed=1)
            handle = await owner.register_data(payload)
            found = await asyncio.gather(*(consumer.get(handle) for _ in range(160)))
            assert all(data == payload for data, _ in found)
            await asyncio.gather(*(consumer.detach(handle, lease) for _, lease in found))
            assert consumer.statistics().sessions == 1
            counters = consumer.statistics().counters
            assert not any(name.startswith("orbit_sessions_closed_total") for name in counters)
            await consumer.release(handle, (await consumer.get(handle))[1])

    run_async(main())


@pytest.mark.parametrize("register", ["register_data", "register_data_pinned"])
def test_every_size_arrives_whole(run_async: Run, register: str) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(bytes(owner.address))
            for nbytes in SIZES:
                payload = pattern(nbytes, seed=nbytes)
                handle = await getattr(owner, register)(payload)
                found = await consumer.metadata(handle)
                assert (found.total_bytes, found.refcount, found.pinned) == (nbytes, 1, False)
                data, first = await consumer.get(handle)
                assert data == payload
                assert data.readonly
                dest = bytearray(b"\xaa" * (nbytes + 13))
                second = await consumer.get_into(handle, memoryview(dest)[7:])
                assert dest == b"\xaa" * 7 + payload + b"\xaa" * 6
                for lease in (first, second):
                    assert lease.path is orbit.PathName.TCP
                    assert lease.reason is orbit.PathReason.ASKED
                    assert lease.nbytes == nbytes
                    assert lease.phases["total"] > 0
                await consumer.detach(handle, first)
                await consumer.release(handle, second)
                with pytest.raises(orbit.UnknownHandle):
                    await consumer.get(handle)

    run_async(main())


@pytest.mark.parametrize("dtype", ["<u1", "<i4", ">f8", "<c16", "?"])
def test_arrays_of_every_kind(run_async: Run, dtype: str) -> None:
    async def main() -> None:
        async with orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            raw = pattern(16 * 31 * 37 * 8)
            array = np.frombuffer(raw, dtype=dtype).reshape(31, -1)
            fortran = np.asfortranarray(array)
            for source in (array, fortran, array[3:7], array.T):
                handle = await owner.register_data(source)
                dest = np.zeros_like(source, order="A" if source is not array.T else "F")
                lease = await consumer.get_into(handle, dest)
                assert lease.nbytes == source.nbytes
                assert dest.tobytes("A") == source.tobytes("A")
            for bad in (array[:, ::2], array[::-1]):
                with pytest.raises(orbit.UsageError, match="contiguous"):
                    await owner.register_data(bad)
                with pytest.raises(orbit.UsageError, match="contiguous"):
                    await owner.register_data_pinned(bad)

    run_async(main())


def test_a_source_that_was_dropped_is_still_served(run_async: Run, tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "payload"
        file.write_bytes(pattern(3 * MIB))
        async with orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            array = np.frombuffer(bytearray(pattern(3 * MIB)), "u1")
            with file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            handles = [await owner.register_data(array), await owner.register_data(mapped)]
            del array, mapped
            gc.collect()
            junk = [bytearray(3 * MIB) for _ in range(4)]
            for handle in handles:
                data, lease = await consumer.get(handle)
                assert data == pattern(3 * MIB)
                await consumer.release(handle, lease)
            del junk

    run_async(main())


def test_a_registered_source_cannot_be_resized_until_it_is_withdrawn(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(TCP) as owner:
            source = bytearray(100)
            handle = await owner.register_data(source)
            with pytest.raises(BufferError):
                source.append(0)
            await owner.withdraw(handle)
            source.append(0)
            pinned = await owner.register_data_pinned(source)
            source.append(0)  # a copy was made
            await owner.withdraw(pinned)

    run_async(main())


def test_two_nodes_fetch_from_each_other_at_once(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as one, orbit.Node(TCP) as two:
            one.add_peer(two.address)
            two.add_peer(one.address)
            retain = orbit.RegisterOptions(retain=True)
            payloads = [pattern(n * 70_000 + 1, n) for n in range(12)]
            handles = [await one.register_data(p, retain) for p in payloads[:6]]
            handles += [await two.register_data(p, retain) for p in payloads[6:]]

            async def fetch(number: int) -> None:
                node = two if number < 6 else one
                data, lease = await node.get(handles[number])
                assert data == payloads[number]
                await node.release(handles[number], lease)

            await asyncio.gather(*(fetch(n) for n in range(12) for _ in range(8)))
            assert one.statistics().slots.leases_held == 0

    run_async(main())


def test_cancelled_in_the_middle_of_a_large_pull(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            payload = bytes(64 * MIB)
            handle = await owner.register_data(payload, orbit.RegisterOptions(retain=True))
            dest = bytearray(len(payload))
            begun = asyncio.Event()
            task = asyncio.ensure_future(
                consumer.get_into(handle, dest, progress=lambda done: begun.set())
            )
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            dest.append(0)
            data, lease = await consumer.get(handle)
            assert len(data) == len(payload)
            await consumer.release(handle, lease)
            assert owner.statistics().slots.leases_held == 0

    run_async(main())


@pytest.mark.parametrize("who", ["owner", "consumer"])
def test_closing_either_side_ends_a_pull(run_async: Run, who: str) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            handle = await owner.register_data(bytes(256 * MIB))
            begun = asyncio.Event()
            dest = mmap.mmap(-1, 256 * MIB)
            task = asyncio.ensure_future(
                consumer.get_into(handle, dest, progress=lambda done: begun.set())
            )
            await begun.wait()
            await (owner if who == "owner" else consumer).close()
            with pytest.raises(orbit.OrbitError):
                await task
            dest.close()  # fails while anybody holds an export

    run_async(main())


def test_three_kinds_of_unreachable(run_async: Run) -> None:
    async def main() -> None:
        quick = orbit.NodeConfig(
            transport="tcp", timeouts=orbit.TimeoutConfig(connect_s=0.2, handshake_s=0.2)
        )
        silent = socket.create_server(("127.0.0.1", 0))  # the kernel connects, nobody answers
        async with orbit.Node(quick) as consumer:
            port = silent.getsockname()[1]
            handle = _peer_at(consumer, f"127.0.0.1:{port}")
            with pytest.raises(orbit.PeerUnreachable) as caught:
                await consumer.get(handle)
            assert caught.value.kind == "silent"
            async with orbit.Node(quick) as gone:
                address = gone.address
            consumer.add_peer(address)
            with pytest.raises(orbit.PeerUnreachable) as caught:
                await consumer.get(orbit.Handle(address.worker_id, handle.slot_id))
            assert caught.value.kind == "refused"
        silent.close()

    run_async(main())


def _peer_at(consumer: orbit.Node, endpoint: str) -> orbit.Handle:
    from orbit.model import Incarnation, SlotId, WorkerId
    from orbit.protocol.address import NodeAddress
    from orbit.protocol.endpoint import Endpoint

    address = NodeAddress(WorkerId(77), Incarnation(1), (Endpoint.parse(endpoint),))
    consumer.add_peer(address)
    return orbit.Handle(WorkerId(77), SlotId(1))


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", None), (None, "b")])
def test_a_wrong_or_missing_secret(run_async: Run, ours: str | None, theirs: str | None) -> None:
    async def main() -> None:
        one = orbit.NodeConfig(transport="tcp", secret=ours)
        two = orbit.NodeConfig(transport="tcp", secret=theirs)
        async with nothing_left(), orbit.Node(one) as owner, orbit.Node(two) as consumer:
            consumer.add_peer(owner.address)
            handle = await owner.register_data(b"x")
            with pytest.raises(orbit.PeerRefused) as caught:
                await consumer.get(handle)
            assert caught.value.reason == "auth"
            assert "secret" in caught.value.hint
            assert owner.statistics().sessions == 0

    run_async(main())


def test_the_same_secret_from_a_file_and_from_code(run_async: Run, tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "secret"
        file.write_text("correct horse\n")
        one = orbit.NodeConfig(transport="tcp", secret_file=file)
        two = orbit.NodeConfig(transport="tcp", secret="correct horse")
        async with orbit.Node(one) as owner, orbit.Node(two) as consumer:
            consumer.add_peer(owner.address)
            payload = pattern(2 * MIB)
            handle = await owner.register_data(payload)
            data, lease = await consumer.get(handle)
            assert data == payload
            await consumer.release(handle, lease)

    run_async(main())


def test_tls_on_the_control_and_the_bulk_connections(run_async: Run) -> None:
    from tests.contract.tls_contexts import client_context, server_context

    async def main() -> None:
        both: dict[str, ssl.SSLContext] = {
            "server_tls": server_context(),
            "client_tls": client_context(),
        }
        # The certificate is for the name, so the address must say the name.
        config = orbit.NodeConfig(transport="tcp", advertise="localhost", **both)  # type: ignore[arg-type]
        async with nothing_left(), orbit.Node(config) as owner, orbit.Node(config) as consumer:
            consumer.add_peer(owner.address)
            payload = pattern(2 * MIB)
            handle = await owner.register_data(payload)
            data, lease = await consumer.get(handle)
            assert data == payload
            await consumer.release(handle, lease)
            async with orbit.Node(TCP) as plain:
                plain.add_peer(owner.address)
                with pytest.raises(orbit.PeerError):
                    await plain.metadata(handle)

    run_async(main())


def test_garbage_on_the_port_harms_nobody(run_async: Run) -> None:
    async def main() -> None:
        async with nothing_left(), orbit.Node(TCP) as owner, orbit.Node(TCP) as consumer:
            consumer.add_peer(owner.address)
            handle = await owner.register_data(b"payload")
            endpoint = owner.address.endpoints[0]
            for garbage in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"orbit\x00\r\n\xff\xff\xff\xff",
                b"\0" * 64,
            ):
                await _send_until_closed(endpoint.pair, garbage)
            data, lease = await consumer.get(handle)
            assert data == b"payload"
            await consumer.release(handle, lease)

    run_async(main())


async def _send_until_closed(endpoint: tuple[str, int], data: bytes) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, endpoint)
        await loop.sock_sendall(sock, data)
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(sock, 4096):
                pass


def test_demanded_rdma_without_a_device(run_async: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration keeps every host from having one."""

    async def main() -> None:
        nothing = orbit.NodeConfig(rdma=orbit.RdmaConfig(enabled=False))
        async with orbit.Node(TCP) as owner, orbit.Node(nothing) as consumer:
            consumer.add_peer(owner.address)
            handle = await owner.register_data(b"x")
            with pytest.raises(orbit.PathUnavailable) as caught:
                await consumer.get(handle, transport="rdma")
            assert caught.value.reason == "not_configured"
            with pytest.raises(orbit.PathUnavailable):
                await consumer.get_pinned(handle)
        demand = orbit.NodeConfig(transport="rdma", rdma=orbit.RdmaConfig(enabled=False))
        async with nothing_left():
            with pytest.raises(orbit.PathUnavailable):
                await orbit.Node(demand).open()

    run_async(main())


def test_what_a_node_listens_on_and_says_of_itself(run_async: Run) -> None:
    async def main() -> None:
        async with orbit.Node(TCP) as node:
            (endpoint,) = node.address.endpoints
            assert endpoint.is_loopback
            assert endpoint.port > 0
            taken = orbit.NodeConfig(listen=str(endpoint), transport="tcp")
            with pytest.raises(orbit.ConfigError, match=str(endpoint.port)):
                await orbit.Node(taken).open()
        everywhere = orbit.NodeConfig(listen="0.0.0.0:0", transport="tcp")
        async with orbit.Node(everywhere) as node:
            assert node.address.endpoints
            assert not any(e.is_wildcard for e in node.address.endpoints)
        named = orbit.NodeConfig(
            listen="0.0.0.0:0",
            advertise=("host.example", "10.1.2.3:7"),
            worker_id=5,
            transport="tcp",
        )
        async with orbit.Node(named) as node:
            first, second = map(str, node.address.endpoints)
            assert first.startswith("host.example:")
            assert second == "10.1.2.3:7"
            assert node.identity.worker_id == 5
        with pytest.raises(orbit.ConfigError):
            await orbit.Node(orbit.NodeConfig(listen="nowhere", advertise="a b")).open()
        with pytest.raises(orbit.ClosedError):
            _ = node.statistics() and node.add_peer(b"")

    run_async(main())


def test_a_node_opens_once_and_closes_for_everybody(run_async: Run) -> None:
    async def main() -> None:
        node = orbit.Node(TCP)
        with pytest.raises(orbit.ClosedError):
            _ = node.address
        await node.close()  # nothing to close
        async with nothing_left():
            async with node:
                with pytest.raises(orbit.UsageError):
                    await node.open()
            await asyncio.gather(*(node.close() for _ in range(5)))
            with pytest.raises(orbit.ClosedError):
                await node.register_data(b"")

    run_async(main())
