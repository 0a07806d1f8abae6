"""Streams in every order of events within bounds, planted mistakes that the search must find, and
many streams at once over links that die.

The wide bounds replace the fast ones when ORBIT_SOAK is set (`make soak`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbit.errors import InternalError, OrbitError, StreamError
from orbit.protocol.streams import receiver as r
from orbit.protocol.streams import sender as s
from orbit.protocol.streams.ends import EndKind, StreamWindow
from orbit.runtime.messaging.stream_objects import StreamInbox, StreamSender
from orbit.testing import stream_world
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.stream_explorer import FAULTS, explore, moves_of
from orbit.testing.stream_pair import CEILING_BYTES, StreamNode, StreamNodes
from orbit.testing.stream_world import Script, StreamWorld, Violation
from tests.soak import SOAK

WINDOW = StreamWindow(2, 100)
ENDS = ("finalize", "fail", "drop")
FAST = {
    "plain": Script((10, 60, 10), ENDS),
    "staged": Script((10, -80, 10), ENDS),
    "cancel": Script((60, -60, 60), ("finalize",), ("cancel",)),
    "death": Script((10, -80, 50), ("finalize", "fail"), ("die",)),
    "broken fetch and death": Script((10, -80, 50), ("finalize",), ("break", "die")),
    "broken behind what is not here": Script((-10, -10), ("finalize",), ("break",)),
    "withdrawal and drop": Script((60, 60, 60), ("finalize",), ("withdraw", "drop")),
    "time": Script((60, -60), ("finalize",), ("time",)),
}
WIDE = {
    "all faults": Script((60, -60, 10), ENDS, ("cancel", "die", "break", "withdraw", "drop")),
    "much time": Script((60, -60, 10), ("finalize",), ("time", "time")),
    "time and death": Script((60, -60, 60), ENDS, ("time", "die", "withdraw")),
    "long": Script((50, 50, -90, 1, 50, 99), ENDS, ("cancel", "die")),
}
SCRIPTS = WIDE if SOAK else FAST


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_order_keeps_the_rules(name: str) -> None:
    found = explore(StreamWorld(SCRIPTS[name], WINDOW), 3_000_000)
    assert found.final > 0
    assert ("finalized", "finalized") in found.ends


def test_what_both_ends_see_fits_together() -> None:
    """Without a fault both see the producer's end; a cancel and a death may be seen differently."""
    plain = explore(StreamWorld(FAST["plain"], WINDOW))
    assert plain.ends == {(kind, kind) for kind in ("finalized", "failed", "dropped")}
    cancelled = explore(StreamWorld(FAST["cancel"], WINDOW))
    assert cancelled.ends == {
        ("finalized", "finalized"),
        ("cancelled", "cancelled"),
        ("finalized", "cancelled"),  # everything was there when the reader gave it up
    }


@pytest.mark.parametrize("window", [StreamWindow(1, 2), StreamWindow(1, 64), StreamWindow(5, 20)])
def test_small_windows_make_progress(window: StreamWindow) -> None:
    found = explore(StreamWorld(Script((0, 1, 64, -200, 10)), window))
    assert found.ends == {("finalized", "finalized")}


@given(st.data())
@settings(max_examples=400 if SOAK else 60)
def test_long_scripts_in_random_orders(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(-120, 120), max_size=25))
    faults = data.draw(st.sets(st.sampled_from(sorted(FAULTS)), max_size=2))
    window = StreamWindow(data.draw(st.integers(1, 6)), data.draw(st.integers(2, 120)))
    script = Script(tuple(lengths), (data.draw(st.sampled_from(ENDS)),), tuple(faults))
    world = StreamWorld(script, window)
    rng = data.draw(st.randoms(use_true_random=False))
    for _ in range(2000):
        moves = moves_of(world)
        if not moves:
            break
        rng.choice(moves)[1](world)
        world.check()
    assert world.settled()


# --- planted mistakes -----------------------------------------------------------------------------


class Overtakes(s.StreamSender):
    """A short item passes a long one that waits."""

    def _send(self, now: float) -> list[s.SenderEffect]:
        for ticket, charge in sorted(self._waiting.items(), key=lambda entry: entry[1]):
            self._waiting.move_to_end(ticket)
            del charge
        return super()._send(now)


class IgnoresBytes(s.StreamSender):
    def _fits(self, charge: int) -> bool:
        return self._items_sent < self._items_limit


class EndsEarly(s.StreamSender):
    """The end does not wait for sends without credit."""

    def _settle(self, effects: list[s.SenderEffect]) -> tuple[s.SenderState, list[s.SenderEffect]]:
        if self.end is not None and self.state is s.SenderState.ATTACHED:
            self._waiting.clear()
        return super()._settle(effects)


class ForgetsToRelease(s.StreamSender):
    def _over(self, end: Any) -> tuple[s.SenderState, list[s.SenderEffect]]:
        state, effects = super()._over(end)
        return state, [e for e in effects if not isinstance(e, s.Release)]


class FinishesBeforeTheFetch(r.StreamReceiver):
    def _finish(self, *, ended: bool = False) -> list[r.ReceiverEffect]:
        if ended and self.bound:
            self.bound = False
            return [r.SendFinished(), r.Unbind()]
        return []


class ReadsUnfetched(r.StreamReceiver):
    def _arrived(
        self, item: r.ItemArrived, now: float
    ) -> tuple[r.ReceiverState, list[r.ReceiverEffect]]:
        state, effects = super()._arrived(item, now)
        for place in self._places:
            place.ready = True
        return state, effects


class CreditsTooMuch(r.StreamReceiver):
    def _credit(self) -> r.SendCredit:
        credit = super()._credit()
        return r.SendCredit(credit.items_limit + 1, credit.bytes_limit)


class NeverCredits(r.StreamReceiver):
    def _take(self) -> tuple[r.ReceiverState, list[r.ReceiverEffect]]:
        state, _ = super()._take()
        return state, []

    def _credit(self) -> r.SendCredit:
        return r.SendCredit(self._items_limit, self._bytes_limit)


SENDER_MISTAKES: list[tuple[type[s.StreamSender], Script, str]] = [
    (Overtakes, Script((60, 60, 60, 10)), "order of issue"),
    (IgnoresBytes, Script((60, 60, 60)), "finds room"),
    (EndsEarly, Script((60, 60, 60)), "behind every item"),
    (ForgetsToRelease, Script((10,)), "released"),
]
RECEIVER_MISTAKES: list[tuple[type[r.StreamReceiver], Script, str]] = [
    (FinishesBeforeTheFetch, Script((-60,), faults=("break",)), "at the receiver|every item|can"),
    (ReadsUnfetched, Script((-60, 10)), "."),
    (CreditsTooMuch, Script((10, 10, 10)), "rules|finds room"),
    (NeverCredits, Script((10, 10, 10)), "too many states"),  # beats and answers without an end
]


@pytest.mark.parametrize(("mistake", "script", "rule"), SENDER_MISTAKES)
def test_a_mistake_of_the_sender_is_found(
    mistake: type[s.StreamSender], script: Script, rule: str
) -> None:
    world = StreamWorld(script, StreamWindow(2, 100) if mistake is not IgnoresBytes else NARROW)
    world.sender = mistake(world.window, stream_world.HEARTBEAT_S, 0.0)
    with pytest.raises(Violation, match=rule):
        explore(world)


NARROW = StreamWindow(3, 100)


@pytest.mark.parametrize(("mistake", "script", "rule"), RECEIVER_MISTAKES)
def test_a_mistake_of_the_receiver_is_found(
    mistake: type[r.StreamReceiver], script: Script, rule: str
) -> None:
    world = StreamWorld(script, WINDOW)
    world.receiver = mistake(stream_world.HEARTBEAT_S)
    world.receiver.step(r.Attach(WINDOW), 0.0)
    with pytest.raises(Violation, match=rule):
        explore(world, 500)


# --- many streams, real shells --------------------------------------------------------------------


class Feed:
    """One stream that is fed and read by tasks, and what was seen of it."""

    def __init__(self, rng: random.Random, number: int, count: int) -> None:
        self.random = random.Random(rng.random())
        self.number = number
        self.count = count
        self.sent = 0  # items whose send was done
        self.read = 0
        self.producer_end = ""
        self.reader_end = ""

    def item(self, n: int) -> bytes:
        nbytes = (n * 37 + self.number) % 1500
        if n % 97 == 50:
            nbytes = CEILING_BYTES + n
        return n.to_bytes(4, "big") + pattern(nbytes, n)

    async def produce(self, sender: StreamSender, *, fate: str) -> None:
        try:
            for n in range(self.count):
                await sender.send(self.item(n))
                self.sent += 1
                if self.random.random() < 0.02:
                    await asyncio.sleep(self.random.uniform(0, 0.01))
            if fate == "fail":
                sender.fail("asked to")
                self.producer_end = "failed"
                return
            if fate == "drop":
                sender.drop()
                self.producer_end = "dropped"
                return
            await sender.finalize()
            self.producer_end = "finalized"
        except StreamError as error:
            self.producer_end = error.kind

    async def consume(self, inbox: StreamInbox[memoryview], *, cancel_after: int | None) -> None:
        try:
            async for item in inbox:
                assert item == self.item(self.read), f"stream {self.number}: item {self.read}"
                self.read += 1
                if self.read == cancel_after:
                    inbox.cancel()
                if self.random.random() < 0.02:
                    await asyncio.sleep(self.random.uniform(0, 0.01))
            self.reader_end = "finalized"
        except StreamError as error:
            self.reader_end = error.kind

    def check(self) -> None:
        assert self.producer_end
        assert self.reader_end
        assert self.read <= self.count
        if self.reader_end == "finalized" or self.producer_end == "finalized":
            assert self.reader_end in ("finalized", "cancelled")
        if self.reader_end == "finalized":
            assert self.read == self.count
        if self.reader_end in ("failed", "dropped"):
            assert self.read == self.count  # nothing that was sent is lost before the end


async def run_feeds(
    world: StreamNodes,
    feeds: list[Feed],
    between: Callable[[], tuple[StreamNode, StreamNode]],
    *,
    fates: tuple[str, ...] = ("finalize",),
    cancels: bool = False,
) -> None:
    tasks = []
    for feed in feeds:
        receiver, producer = between()
        inbox = receiver.streams.open()
        try:
            sender = await producer.streams.attach(inbox.handle)
        except InternalError:
            raise
        except OrbitError:
            feed.producer_end = feed.reader_end = "lost"
            inbox.cancel()
            continue
        cancel_after = feed.random.randrange(1, feed.count + 1) if cancels else None
        fate = feed.random.choice(fates)
        tasks.append(asyncio.ensure_future(feed.produce(sender, fate=fate)))
        tasks.append(asyncio.ensure_future(feed.consume(inbox, cancel_after=cancel_after)))
    await asyncio.gather(*tasks)
    await world.settle()
    for feed in feeds:
        feed.check()
    world.check_nothing_left()


def test_ten_thousand_items() -> None:
    async def main() -> Feed:
        world = StreamNodes(1)
        ends = world.add(), world.add()
        feed = Feed(world.random, 0, 10_000)
        await run_feeds(world, [feed], lambda: ends)
        return feed

    feed = run_virtual(main())
    assert (feed.read, feed.reader_end) == (10_000, "finalized")


def test_a_hundred_streams_beside_each_other() -> None:
    async def main() -> list[Feed]:
        world = StreamNodes(2)
        ends = world.add(), world.add()
        feeds = [Feed(world.random, n, 100) for n in range(100)]
        await run_feeds(world, feeds, lambda: ends)
        return feeds

    assert {feed.reader_end for feed in run_virtual(main())} == {"finalized"}


def test_churn() -> None:
    """Streams come and go, one after another and both ways."""

    async def main() -> None:
        world = StreamNodes(3)
        ends = world.add(), world.add()
        for n in range(200):
            feed = Feed(world.random, n, 5)
            await run_feeds(
                world,
                [feed],
                lambda n=n: ends[:: 1 - 2 * (n % 2)],
                fates=("finalize", "fail", "drop"),
            )  # type: ignore[misc]

    run_virtual(main())


def test_cancel_storm() -> None:
    async def main() -> list[Feed]:
        world = StreamNodes(4)
        ends = world.add(), world.add()
        feeds = [Feed(world.random, n, 60) for n in range(100)]
        await run_feeds(world, feeds, lambda: ends, cancels=True)
        return feeds

    ends = {feed.reader_end for feed in run_virtual(main())}
    assert "cancelled" in ends


async def run_story(seed: int) -> list[Feed]:
    world = StreamNodes(seed, delay_max_s=random.Random(seed).choice((0.0001, 0.01)))
    nodes = [world.add(heartbeat_s=0.5) for _ in range(3)]
    feeds = [Feed(world.random, n, world.random.randrange(1, 150)) for n in range(12)]

    async def trouble() -> None:
        for _ in range(world.random.randrange(4)):
            await asyncio.sleep(world.random.uniform(0, 10 * world.delay_max_s))
            links = [link for node in nodes for link in node.links.values()]
            if links:
                world.cut(world.random.choice(links))

    troubling = asyncio.ensure_future(trouble())
    await run_feeds(
        world,
        feeds,
        lambda: (world.random.choice(nodes), world.random.choice(nodes)),
        fates=("finalize", "finalize", "fail", "drop"),
        cancels=world.random.random() < 0.3,
    )
    await troubling
    return feeds


@pytest.mark.parametrize("seed", range(200 if SOAK else 16))
def test_whatever_happens_order_is_kept_and_nothing_is_left(seed: int) -> None:
    run_virtual(run_story(seed))


def test_the_stories_are_not_empty_and_replay() -> None:
    def told(seed: int) -> list[tuple[int, str, str]]:
        return [(f.read, f.producer_end, f.reader_end) for f in run_virtual(run_story(seed))]

    stories = [told(seed) for seed in range(6)]
    assert stories == [told(seed) for seed in range(6)]
    ends = {end for story in stories for _, *both in story for end in both}
    assert {"finalized", "failed", "dropped", "lost"} <= ends
    assert EndKind.PROTOCOL.value not in ends
