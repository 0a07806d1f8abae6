"""What users of streams see, over simulated links and time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orbit.errors import (
    BusyError,
    ClosedError,
    DeadlineExceeded,
    OrbitError,
    PathFailed,
    StreamError,
    UsageError,
)
from orbit.events import STAGED_REFUSALS_TOTAL
from orbit.protocol.streams.frames import Note, NoteKind, pack_note
from orbit.runtime.messaging.contract import Charge
from orbit.runtime.messaging.stream_objects import StreamInbox, StreamSender
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.stream_pair import CEILING_BYTES, StreamNode, StreamNodes

BIG = CEILING_BYTES + 1


@asynccontextmanager
async def nodes(*, heartbeat_s: float = 5.0, seed: int = 0) -> AsyncIterator[Any]:
    """(world, receiver, producer); nothing may be left at the end."""
    world = StreamNodes(seed)
    receiver, producer = world.add(heartbeat_s=heartbeat_s), world.add(heartbeat_s=heartbeat_s)
    yield world, receiver, producer
    await world.settle()
    world.check_nothing_left()


async def collect(inbox: StreamInbox[Any], into: list[Any] | None = None) -> list[Any]:
    items = [] if into is None else into
    async for item in inbox:
        items.append(item if not isinstance(item, memoryview) else bytes(item))
    return items


async def pair(
    receiver: StreamNode, producer: StreamNode, item_type: Any = None, capacity: int = 256
) -> tuple[StreamInbox[Any], StreamSender]:
    inbox = receiver.streams.open(item_type, capacity)
    return inbox, await producer.streams.attach(inbox.handle)


async def ended(inbox: StreamInbox[Any], items: list[Any]) -> str:
    """The kind of the error that ends it."""
    with pytest.raises(StreamError) as caught:
        await collect(inbox, items)
    with pytest.raises(StreamError) as again:  # it stays ended
        await collect(inbox)
    assert again.value.kind == caught.value.kind
    return str(caught.value.kind)


# --- the good end ---------------------------------------------------------------------------------


def test_items_arrive_in_order_and_then_the_end() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=4)
            payloads = [pattern(n, n) for n in (0, 1, 7, 4096, CEILING_BYTES)] * 4
            reading = asyncio.ensure_future(collect(inbox))
            for payload in payloads:
                await sender.send(payload)
            await sender.finalize()
            await sender.finalize()
            assert await reading == payloads
            assert await collect(inbox) == []
            with pytest.raises(ClosedError):
                sender.send(b"late")

    run_virtual(main())


def test_finalize_returns_when_everything_is_at_the_receiver_though_nobody_reads() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            await sender.send(b"a")
            await sender.send(pattern(BIG))
            await sender.finalize()
            assert inbox.buffered == 2
            world.cut(producer.links[receiver.identity.worker_id])
            await asyncio.sleep(1)
            assert await collect(inbox) == [b"a", pattern(BIG)]

    run_virtual(main())


def test_async_with_finalizes() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer), receiver.streams.open() as inbox:
            async with await producer.streams.attach(str(inbox.handle)) as sender:
                await sender.send(bytearray(b"x"))
                await sender.send(memoryview(b"yz"))
            assert await collect(inbox) == [b"x", b"yz"]

    run_virtual(main())


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_long_items_are_staged_and_keep_their_place(beyond: int) -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            payloads = [b"0", pattern(CEILING_BYTES + beyond), b"2", pattern(3 * BIG, 3), b"4"]
            reading = asyncio.ensure_future(collect(inbox))
            for payload in payloads:
                await sender.send(payload)
            await sender.finalize()
            assert await reading == payloads
            link = producer.links[receiver.identity.worker_id]
            staged = [f.note.kind for f in link.sent].count(NoteKind.STAGED)
            assert staged == (2 if beyond > 0 else 1)
            assert max(len(frame.payload) for frame in link.sent) <= CEILING_BYTES

    run_virtual(main())


def test_within_one_node() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, _producer):
            inbox, sender = await pair(receiver, receiver, int)
            for value in range(600):
                if value % 200 == 0 and value:
                    assert [await anext(inbox) for _ in range(200)] == list(
                        range(value - 200, value)
                    )
                await sender.send(value)
            await sender.finalize()
            assert await collect(inbox) == list(range(400, 600))

    run_virtual(main())


# --- room -----------------------------------------------------------------------------------------


def test_a_send_waits_for_room_and_send_nowait_does_not() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=2)
            sender.send_nowait(b"0")
            sender.send_nowait(b"1")
            with pytest.raises(BusyError):
                sender.send_nowait(b"x")
            waiting = asyncio.ensure_future(_await(sender.send(b"2")))
            await asyncio.sleep(1)
            assert not waiting.done()
            assert bytes(await anext(inbox)) == b"0"
            await waiting
            await sender.finalize()
            assert await collect(inbox) == [b"1", b"2"]

    run_virtual(main())


async def _await(sending: Any) -> None:
    await sending


def test_a_wait_that_ends_early_withdraws_its_item() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=1)
            await sender.send(b"0")
            with pytest.raises(DeadlineExceeded):
                await sender.send(b"late", timeout=0.5)
            gone = asyncio.ensure_future(_await(sender.send(bytearray(b"cancelled"))))
            kept = asyncio.ensure_future(_await(sender.send(b"1")))
            await asyncio.sleep(0.1)
            gone.cancel()
            await asyncio.sleep(0.1)
            assert producer.streams.statistics().waiting_sends == 1
            reading = asyncio.ensure_future(collect(inbox))
            await kept
            await sender.finalize()
            assert await reading == [b"0", b"1"]

    run_virtual(main())


def test_sends_are_issued_in_the_plain_call() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=3)
            sendings = [sender.send(bytes([n])) for n in range(9)]
            reading = asyncio.ensure_future(collect(inbox))
            await asyncio.gather(*(_await(sending) for sending in reversed(sendings)))
            await sender.finalize()
            assert await reading == [bytes([n]) for n in range(9)]

    run_virtual(main())


def test_the_memory_of_an_item_is_the_callers_again_when_its_send_is_done() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=8)
            expected = []
            for nbytes in (10, BIG):
                memory = bytearray(pattern(nbytes))
                expected.append(bytes(memory))
                await sender.send(memory)
                memory[:] = bytes(nbytes)
                memory.clear()  # nothing holds it
            await sender.finalize()
            assert await collect(inbox) == expected

    run_virtual(main())


def test_a_slow_reader_bounds_what_waits() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=8)

            async def produce() -> None:
                for n in range(100):
                    await sender.send(pattern(100_000, n))
                await sender.finalize()

            producing = asyncio.ensure_future(produce())
            got = []
            for _ in range(50):
                await asyncio.sleep(0.1)
                found = receiver.streams.statistics()
                assert found.buffered_items <= 8
                assert found.buffered_bytes <= found.promised_bytes <= 1 << 20
                got.append(bytes(await anext(inbox)))
            got += await collect(inbox)
            await producing
            assert got == [pattern(100_000, n) for n in range(100)]

    run_virtual(main())


# --- other ends -----------------------------------------------------------------------------------


def test_fail_comes_behind_what_was_sent() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=2)
            sender.send(b"0")
            sender.send(pattern(BIG))
            refused = sender.send(b"no room")
            sender.fail("the disk is full")
            with pytest.raises(StreamError, match="failed"):
                await refused
            items: list[Any] = []
            assert await ended(inbox, items) == "failed"
            assert items == [b"0", pattern(BIG)]
            with pytest.raises(StreamError, match="the disk is full"):
                await anext(inbox)
            with pytest.raises(StreamError, match="failed"):
                sender.send(b"late")

    run_virtual(main())


@pytest.mark.parametrize("how", ["drop", "garbage", "exception", "close"])
def test_a_producer_that_goes_is_seen(how: str) -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            await sender.send(b"0")
            match how:
                case "drop":
                    sender.drop()
                case "garbage":
                    del sender
                    gc.collect()
                case "exception":
                    with pytest.raises(ZeroDivisionError):
                        async with sender:
                            raise ZeroDivisionError
                case "close":
                    producer.streams.close()
            items: list[Any] = []
            assert await ended(inbox, items) == "dropped"
            assert items == [b"0"]

    run_virtual(main())


@pytest.mark.parametrize("how", ["cancel", "leave", "garbage", "close"])
def test_a_receiver_that_goes_is_seen(how: str) -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=1)
            await sender.send(b"0")
            waiting = asyncio.ensure_future(_await(sender.send(pattern(BIG))))
            match how:
                case "cancel":
                    inbox.cancel()
                    inbox.cancel()
                    assert await ended(inbox, []) == "cancelled"
                case "leave":
                    async with inbox:
                        pass
                case "garbage":
                    await asyncio.sleep(1)
                    del inbox
                    gc.collect()
                case "close":
                    receiver.streams.close()
            await sender.cancelled.wait()
            with pytest.raises(StreamError, match="cancelled"):
                await waiting
            with pytest.raises(StreamError, match="cancelled"):
                sender.send(b"late")
            with pytest.raises(StreamError, match="cancelled"):
                await sender.finalize()

    run_virtual(main())


def test_a_lost_link_ends_both_sides_behind_what_is_here() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer, capacity=4)
            for n in range(3):
                await sender.send(bytes([n]))
            await asyncio.sleep(1)
            await sender.send(pattern(BIG))
            waiting = asyncio.ensure_future(_await(sender.send(b"no room")))
            world.cut(producer.links[receiver.identity.worker_id])
            with pytest.raises(StreamError, match="lost"):
                await waiting
            items: list[Any] = []
            assert await ended(inbox, items) == "lost"
            assert items[:3] == [b"\0", b"\1", b"\2"]
            assert sender.cancelled.is_set()

    run_virtual(main())


@pytest.mark.parametrize("side", ["receiver", "producer"])
def test_silence_ends_a_stream(side: str) -> None:
    """One side's frames are lost without anybody noticing."""

    async def main() -> None:
        async with nodes(heartbeat_s=1.0) as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            await asyncio.sleep(20)  # beats are answered
            assert not sender.cancelled.is_set()
            await sender.send(b"0")
            await asyncio.sleep(0.1)
            link = producer.links[receiver.identity.worker_id]
            mute = link if side == "producer" else link.far
            mute.send = lambda frame: None
            began = asyncio.get_running_loop().time()
            items: list[Any] = []
            if side == "receiver":
                with pytest.raises(StreamError, match="lost"):
                    await sender.finalize()
                assert await collect(inbox) == [b"0"]
            else:
                assert await ended(inbox, items) == "lost"
                assert items == [b"0"]
                assert sender.cancelled.is_set() or await sender.cancelled.wait()
            assert asyncio.get_running_loop().time() - began <= 5.0

    run_virtual(main())


def test_an_item_that_cannot_be_fetched_ends_the_stream_in_its_place() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            world.store.fail_next_get = PathFailed("tcp", "get_failed")
            await sender.send(b"0")
            await sender.send(pattern(BIG))
            await sender.send(b"2")
            items: list[Any] = []
            assert await ended(inbox, items) == "failed"
            assert items == [b"0"]
            await sender.cancelled.wait()

    run_virtual(main())


def test_an_item_that_cannot_be_staged_fails_the_stream_behind_those_before() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            world.store.fail_next_register = OrbitError("no memory")
            await sender.send(b"0")
            staged = sender.send(pattern(BIG))
            behind = sender.send(b"2")
            with pytest.raises(StreamError, match="no memory"):
                await staged
            with pytest.raises(StreamError, match="no memory"):
                await behind
            items: list[Any] = []
            assert await ended(inbox, items) == "failed"
            assert items == [b"0"]

    run_virtual(main())


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_item_over_the_receivers_limit_ends_its_own_stream(beyond: int) -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            world.store.payload_max = BIG
            inbox, sender = await pair(receiver, producer)
            other_inbox, other = await pair(receiver, producer)
            payloads = [b"before", pattern(BIG + beyond)]
            for payload in payloads:
                await sender.send(payload)
            if not beyond:
                await sender.finalize()
                assert await collect(inbox) == payloads
            else:
                items: list[Any] = []
                with pytest.raises(StreamError, match=rf"{BIG + 1}.* {BIG} ") as caught:
                    await collect(inbox, items)
                assert (caught.value.kind, items) == ("failed", [b"before"])
                await asyncio.wait_for(sender.cancelled.wait(), 1)
                with pytest.raises(StreamError, match=rf"{BIG + 1}.* {BIG} "):
                    await sender.send(b"more")
            await other.send(pattern(BIG))
            await other.finalize()
            assert await collect(other_inbox) == [pattern(BIG)]
            refusals = receiver.recorder.counters.value(STAGED_REFUSALS_TOTAL, what="item")
            assert refusals == beyond

    run_virtual(main())


def test_an_end_while_an_item_is_being_staged() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            memory = bytearray(pattern(BIG))
            staged = sender.send(memory)
            await asyncio.sleep(0)
            producer.streams.on_route_lost(producer.links[receiver.identity.worker_id].route, None)
            with pytest.raises(StreamError, match="lost"):
                await staged
            memory.clear()
            world.cut(producer.links[receiver.identity.worker_id])
            assert await ended(inbox, []) == "lost"

    run_virtual(main())


# --- who may attach -------------------------------------------------------------------------------


def test_there_is_one_producer() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            assert inbox.attached
            for other in (producer, world.add(), receiver):
                with pytest.raises(StreamError) as caught:
                    await other.streams.attach(inbox.handle)
                assert caught.value.kind == "attached"
            await sender.finalize()
            await collect(inbox)
            with pytest.raises(StreamError) as caught:
                await producer.streams.attach(bytes(inbox.handle))
            assert caught.value.kind == "unknown"

    run_virtual(main())


def test_a_cancelled_inbox_takes_no_producer() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox = receiver.streams.open()
            inbox.cancel()
            with pytest.raises(StreamError, match="unknown"):
                await producer.streams.attach(inbox.handle)

    run_virtual(main())


@pytest.mark.parametrize("rounds", range(4))
def test_a_cancelled_attach_leaves_no_producer(rounds: int) -> None:
    async def main() -> None:
        async with nodes(seed=rounds) as (_, receiver, producer):
            inbox = receiver.streams.open()
            attaching = asyncio.ensure_future(producer.streams.attach(inbox.handle))
            await asyncio.sleep(rounds * 0.0003)
            if attaching.done():
                attaching.result().drop()
            attaching.cancel()
            await asyncio.wait([attaching])
            await asyncio.sleep(0.1)  # the call may still have been on its way
            if inbox.attached:
                assert await ended(inbox, []) == "dropped"
            inbox.cancel()

    run_virtual(main())


def test_a_hundred_windows_then_full() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            pairs = [await pair(receiver, producer) for _ in range(100)]
            assert receiver.streams.statistics().promised_bytes <= 8 << 20
            more = [receiver.streams.open() for _ in range(64)]
            kind = ""
            for inbox in more:
                try:
                    pairs.append((inbox, await producer.streams.attach(inbox.handle)))
                except StreamError as error:
                    kind = error.kind
                    break
            assert kind == "full"
            for inbox, sender in pairs:
                await sender.finalize()
                await collect(inbox)
            for inbox in more:
                inbox.cancel()

    run_virtual(main())


def test_notes_of_strangers_touch_nothing() -> None:
    async def main() -> None:
        async with nodes() as (world, receiver, producer):
            inbox, sender = await pair(receiver, producer)
            stranger = world.add()
            link = world.connect(stranger, receiver.identity.worker_id)
            stream_id = inbox.handle.stream_id
            for attachment in (1, 2):
                for kind in (NoteKind.ITEM, NoteKind.FINALIZED, NoteKind.DROPPED):
                    header = pack_note(Note(kind, stream_id, attachment))
                    charge = Charge(link.far, 1)
                    receiver.streams.on_item(link.far.route, header, memoryview(b""), charge)
                for kind in (NoteKind.CREDIT, NoteKind.CANCEL, NoteKind.FINISHED):
                    header = pack_note(Note(kind, stream_id, attachment))
                    receiver.streams.on_event(link.far.route, header, memoryview(b""))
                    back = producer.streams
                    foreign = world.connect(producer, stranger.identity.worker_id).route
                    back.on_event(foreign, header, memoryview(b""))
            await sender.send(b"0")
            await sender.finalize()
            assert await collect(inbox) == [b"0"]

    run_virtual(main())


# --- typed ----------------------------------------------------------------------------------------


def test_typed_items_are_values() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, (int, dict))
            values = [1, {"a": [1.5, "x", b"y", None]}, -7]
            for value in values:
                await sender.send(value)
            with pytest.raises(UsageError):
                sender.send(object())
            await sender.finalize()
            assert await collect(inbox) == values

    run_virtual(main())


@pytest.mark.parametrize("wrong", ["text", 1.5])
def test_a_value_of_another_type_ends_the_stream(wrong: object) -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            inbox, sender = await pair(receiver, producer, int)
            for value in (1, wrong, 3):
                await sender.send(value)
            items: list[Any] = []
            assert await ended(inbox, items) == "failed"
            assert items == [1]
            await sender.cancelled.wait()

    run_virtual(main())


def test_what_is_wrong_in_a_call_is_said_at_once() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            for capacity in (0, -1, 1.5, True, 1 << 20):
                with pytest.raises(UsageError):
                    receiver.streams.open(capacity=capacity)
            with pytest.raises(UsageError):
                receiver.streams.open("int")
            for handle in ("stream-1", b"short", 7):
                with pytest.raises(UsageError):
                    await producer.streams.attach(handle)
            inbox, sender = await pair(receiver, producer)
            for item in (1, "text", None):
                with pytest.raises(UsageError):
                    sender.send(item)
            with pytest.raises(UsageError):
                sender.send(b"", timeout=0)
            reading = asyncio.ensure_future(collect(inbox))
            await asyncio.sleep(0)
            with pytest.raises(BusyError):
                await anext(inbox)
            await sender.finalize()
            await reading
            receiver.streams.close()
            with pytest.raises(ClosedError):
                receiver.streams.open()
            with pytest.raises(ClosedError):
                await receiver.streams.attach(inbox.handle)

    run_virtual(main())


# --- drain ----------------------------------------------------------------------------------------


def test_wait_idle_waits_for_streams_with_producers_only() -> None:
    async def main() -> None:
        async with nodes() as (_, receiver, producer):
            unused = receiver.streams.open()
            await asyncio.wait_for(receiver.streams.wait_idle(), 1)
            inbox, sender = await pair(receiver, producer)
            idle = [
                asyncio.ensure_future(node.streams.wait_idle()) for node in (receiver, producer)
            ]
            await asyncio.sleep(1)
            assert not any(waiter.done() for waiter in idle)
            await sender.finalize()
            await asyncio.gather(*idle)
            await collect(inbox)
            unused.cancel()

    run_virtual(main())
