"""Streams between two nodes over real sockets: order, staged items, and ends of every kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orbit.config import MessagingConfig, NodeConfig, RdmaConfig
from orbit.errors import NotAdmitted, PeerDraining, StreamError
from orbit.node import Node, ShutdownPolicy, StreamHandle
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS

Run = Callable[[Any], Any]

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)

CONFIG = NodeConfig(rdma=RdmaConfig(enabled=False), messaging=MessagingConfig(heartbeat_s=2.0))
EAGER_BYTES = 256 << 10


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[Node, Node]]:
    """(receiver, producer)"""
    async with Node(CONFIG) as receiver, Node(CONFIG) as producer:
        producer.add_peer(receiver.address)
        yield receiver, producer
        # Its owner takes a staged item back some turns of the loop after the end of the stream.
        for node in (receiver, producer):
            await until(lambda node=node: node.statistics().slots.slots == 0)


def item(number: int) -> bytes:
    nbytes = number * 131 % 2000
    if number % 100 == 99:
        nbytes = EAGER_BYTES + number
    return number.to_bytes(4, "big") + pattern(nbytes, number)


async def produce(node: Node, handle: StreamHandle, count: int) -> None:
    async with await node.attach_stream(handle) as sender:
        for number in range(count):
            await sender.send(item(number))


async def consume(inbox: Any, count: int) -> None:
    number = 0
    async for received in inbox:
        assert received == item(number)
        number += 1
    assert number == count


def test_two_thousand_items_in_order(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer), receiver.open_stream() as inbox:
            await asyncio.gather(produce(producer, inbox.handle, 2000), consume(inbox, 2000))

    run_async(main())


def test_streams_beside_each_other_and_beside_calls(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            receiver.handler("echo", lambda message: message.payload)
            inboxes = [receiver.open_stream(capacity=16) for _ in range(20)]
            work = [produce(producer, inbox.handle, 110) for inbox in inboxes]
            work += [consume(inbox, 110) for inbox in inboxes]
            streaming = asyncio.gather(*work)
            for number in range(50):
                reply = await producer.unary(receiver.identity, "echo", item(number))
                assert bytes(reply) == item(number)
            await streaming

    run_async(main())


def test_a_stream_that_nobody_reads_holds_up_nobody(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            receiver.handler("echo", lambda message: message.payload)
            stuck = receiver.open_stream()
            sender = await producer.attach_stream(stuck.handle)
            sendings = [sender.send(pattern(50_000)) for _ in range(100)]
            async with receiver.open_stream() as inbox:
                await asyncio.gather(produce(producer, inbox.handle, 300), consume(inbox, 300))
            for _ in range(100):
                await producer.unary(receiver.identity, "echo", b"x")
            assert stuck.buffered < 100
            stuck.cancel()
            await sender.cancelled.wait()
            with pytest.raises(StreamError, match="cancelled"):
                await sendings[-1]

    run_async(main())


def test_typed_values_both_ways_over_one_connection(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            # The handle travels as an ordinary payload, and the answer is a stream too.
            async def answer(message: Any) -> None:
                async with await receiver.attach_stream(bytes(message.payload)) as sender:
                    for number in range(10):
                        await sender.send({"number": number})

            receiver.handler("answer", answer)
            async with producer.open_stream(dict) as inbox:
                calling = producer.sync(receiver.identity, "answer", bytes(inbox.handle))
                assert [value["number"] async for value in inbox] == list(range(10))
                await calling

    run_async(main())


def test_a_peer_that_dies_is_seen_at_both_ends(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            inbox = receiver.open_stream()
            sender = await producer.attach_stream(inbox.handle)
            await sender.send(b"0")
            await sender.send(pattern(EAGER_BYTES + 1))
            assert await anext(inbox) == b"0"
            assert await anext(inbox) == pattern(EAGER_BYTES + 1)
            await producer.close()
            with pytest.raises(StreamError) as caught:
                await anext(inbox)
            assert caught.value.kind in ("dropped", "lost")
            with pytest.raises(StreamError):
                sender.send(b"late")

    run_async(main())


def test_a_receiver_that_closes_is_seen(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            inbox = receiver.open_stream()
            sender = await producer.attach_stream(inbox.handle)
            await sender.send(pattern(EAGER_BYTES + 1))
            await receiver.close()
            await sender.cancelled.wait()
            with pytest.raises(StreamError) as caught:
                sender.send(b"late")
            assert caught.value.kind in ("cancelled", "lost")

    run_async(main())


def test_within_one_node(run_async: Run) -> None:
    async def main() -> None:
        async with Node(CONFIG) as node, node.open_stream() as inbox:
            await asyncio.gather(produce(node, inbox.handle, 300), consume(inbox, 300))

    run_async(main())


def test_who_may_attach(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            inbox = receiver.open_stream()
            sender = await producer.attach_stream(str(inbox.handle))
            with pytest.raises(StreamError, match="attached"):
                await producer.attach_stream(inbox.handle)
            unknown = StreamHandle(receiver.identity.worker_id, 1)
            with pytest.raises(StreamError, match="unknown"):
                await producer.attach_stream(unknown)
            with pytest.raises(NotAdmitted, match="no address"):
                await producer.attach_stream(StreamHandle(producer.identity.worker_id ^ 5, 1))
            await sender.finalize()
            assert [received async for received in inbox] == []

    run_async(main())


def test_a_draining_receiver_takes_no_new_stream_and_goes_on_with_the_old(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            inbox, late = receiver.open_stream(), receiver.open_stream()
            sender = await producer.attach_stream(inbox.handle)
            receiver.begin_drain()
            with pytest.raises(PeerDraining):
                await producer.attach_stream(late.handle)
            await sender.send(b"0")
            await sender.finalize()
            assert [bytes(received) async for received in inbox] == [b"0"]
            late.cancel()

    run_async(main())


def test_a_graceful_shutdown_lets_open_streams_end(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            inbox = receiver.open_stream()
            sender = await producer.attach_stream(inbox.handle)
            ending = [
                asyncio.create_task(node.graceful_shutdown()) for node in (receiver, producer)
            ]
            for number in range(10):
                await sender.send(item(number))
                await asyncio.sleep(0)
            assert not any(task.done() for task in ending)
            await sender.finalize()
            assert [bytes(received) async for received in inbox] == [item(n) for n in range(10)]
            await asyncio.gather(*ending)

    run_async(main())


def test_a_shutdown_out_of_time_ends_open_streams(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):
            inbox = receiver.open_stream()
            sender = await producer.attach_stream(inbox.handle)
            await producer.graceful_shutdown(ShutdownPolicy.timeout(0.02))
            with pytest.raises(StreamError):
                await anext(aiter(inbox))
            with pytest.raises(StreamError):
                await sender.send(b"late")

    run_async(main())


def test_cancel_storm(run_async: Run) -> None:
    async def main() -> None:
        async with two_nodes() as (receiver, producer):

            async def one(number: int) -> None:
                inbox = receiver.open_stream(capacity=4)
                sender = await producer.attach_stream(inbox.handle)

                async def feed() -> None:
                    for count in range(10_000):
                        await sender.send(item(count))

                feeding = asyncio.ensure_future(feed())
                for _ in range(number % 7):
                    await anext(inbox)
                inbox.cancel()
                with pytest.raises(StreamError, match="cancelled"):
                    await feeding

            await asyncio.gather(*(one(number) for number in range(30)))

    run_async(main())
