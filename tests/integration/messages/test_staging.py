"""Large payloads between nodes over sockets: bounds in time and size, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

import orbit
from orbit.testing.leftovers import nothing_left
from orbit.testing.pattern import pattern
from orbit.testing.waiting import until
from tests.conftest import LOOP_KINDS
from tests.integration.messages.settled import SOAK, TCP, counter, settle

Run = Callable[[Coroutine[Any, Any, None]], None]

pytestmark = pytest.mark.parametrize("loop_kind", LOOP_KINDS)

CEILING = 4 << 10
BIG = CEILING + 1
TIMEOUTS = "orbit_messenger_staged_fetch_timeouts_total"
REFUSALS = "orbit_messenger_staged_refusals_total"
LATE = "orbit_messenger_late_replies_total"


def config(**rendezvous: Any) -> orbit.NodeConfig:
    return replace(
        TCP,
        messaging=orbit.MessagingConfig(eager_max_bytes=CEILING),
        rendezvous=orbit.RendezvousConfig(inline_max_bytes=0, rdma_min_bytes=CEILING, **rendezvous),
    )


class Stuck:
    """An owner that answers no acquire until it is let go: `asked` counts them."""

    def __init__(self, node: orbit.Node) -> None:
        self.asked = 0
        self._gate = asyncio.Event()
        owner: Any = node._open()._owner
        answer = owner._answer

        async def stuck(*arguments: Any) -> Any:
            self.asked += 1
            await self._gate.wait()
            return await answer(*arguments)

        owner._answer = stuck

    def let_go(self) -> None:
        self._gate.set()


@contextlib.asynccontextmanager
async def nodes(
    a_config: orbit.NodeConfig | None = None, b_config: orbit.NodeConfig | None = None
) -> AsyncIterator[tuple[orbit.Node, orbit.Node, Any]]:
    """(a, b, b as a's peer). At the end nothing may be left of any message."""
    async with (
        nothing_left(),
        orbit.Node(a_config or config()) as a,
        orbit.Node(b_config or config()) as b,
    ):
        b.add_peer(a.address)
        yield a, b, a.add_peer(b.address)
        await settle(a, b)


def slots(node: orbit.Node) -> int:
    return node.statistics().slots.slots


def test_a_handler_that_passes_its_headers_on(run_async: Run) -> None:
    """Each hop fetches its own payload, and none sees the headers of another."""

    async def main() -> None:
        async with nodes() as (a, b, peer), orbit.Node(config()) as c:
            end = b.add_peer(c.address)
            seen: list[tuple[bytes, dict[str, str]]] = []

            @b.handler("forward")
            async def forward(message: orbit.Message) -> memoryview:
                seen.append((bytes(message.payload), dict(message.headers)))
                twice = bytes(message.payload) * 2
                return await b.unary(end, "end", twice, headers=message.headers, timeout=5.0)

            @c.handler("end")
            def end_of_it(message: orbit.Message) -> bytes:
                seen.append((bytes(message.payload), dict(message.headers)))
                return bytes(message.payload) * 2

            for payload in (pattern(BIG), pattern(CEILING // 2)):  # staged twice; not at all
                seen.clear()
                answer = await a.unary(peer, "forward", payload, headers={"k": "v"}, timeout=5.0)
                assert answer == payload * 4
                assert seen == [(payload, {"k": "v"}), (payload * 2, {"k": "v"})]
            await settle(a, b, c)

    run_async(main())


@pytest.mark.parametrize("call", ["send", "sync", "unary"])
def test_each_payload_serves_one_reader(run_async: Run, call: str) -> None:
    async def main() -> None:
        async with nodes() as (a, b, peer):
            got: list[bytes] = []
            b.handler("f", lambda message: got.append(bytes(message.payload)))
            payload = bytearray(pattern(BIG))
            await getattr(a, call)(peer, "f", payload)
            await until(lambda: got and not slots(a))
            assert got == [pattern(BIG)]
            ends = a.statistics().counters
            assert ends['orbit_rendezvous_leases_ended_total{how="released"}'] == 1
            payload.extend(b"the caller's again")

    run_async(main())


# --- time -----------------------------------------------------------------------------------------


def test_the_callers_time_ends_the_fetch_in_silence(run_async: Run) -> None:
    async def main() -> None:
        async with nodes() as (a, b, peer):
            ran: list[object] = []
            b.handler("f", ran.append)
            await a.sync(peer, "f", b"warm")
            ran.clear()
            stuck = Stuck(a)
            for call in (a.sync, a.unary):
                with pytest.raises(orbit.DeadlineExceeded):
                    await call(peer, "f", bytearray(BIG), timeout=0.2)
            await until(lambda: counter(b, TIMEOUTS) == 2)
            bound = f'{TIMEOUTS}{{bound="caller"}}'
            assert b.statistics().counters[bound] == 2
            assert (stuck.asked, ran) == (2, [])
            stuck.let_go()
            await settle(a, b)
            await a.sync(peer, "f", b"after them")
            assert counter(a, LATE) == 0, "an answer to a call that had ended"

    run_async(main())


def test_the_receivers_time_ends_the_fetch_with_an_error(
    run_async: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "orbit")

    async def main() -> None:
        async with nodes(b_config=config(staged_fetch_timeout=0.2)) as (a, b, peer):
            ran: list[object] = []
            b.handler("f", ran.append)
            stuck = Stuck(a)
            for call in (a.sync, a.unary):
                with pytest.raises(orbit.RequestFailed, match=r"within 0\.2 s") as caught:
                    await call(peer, "f", bytearray(BIG), timeout=30.0)
                assert caught.value.reason == "fetch_timeout"
            payload = bytearray(BIG)
            await a.send(peer, "f", payload)
            payload.extend(b"the caller's again")
            assert [r for r in caplog.records if "within 0.2 s" in r.getMessage()]
            bound = f'{TIMEOUTS}{{bound="receiver"}}'
            assert b.statistics().counters[bound] == 3
            assert ran == []
            stuck.let_go()

    run_async(main())


def test_the_fetch_of_a_reply_has_the_same_bounds(run_async: Run) -> None:
    async def main() -> None:
        async with nodes(a_config=config(staged_fetch_timeout=0.5)) as (a, b, peer):
            b.handler("large", lambda message: bytes(BIG))
            stuck = Stuck(b)
            with pytest.raises(orbit.DeadlineExceeded):
                await a.unary(peer, "large", timeout=0.2)
            with pytest.raises(orbit.RequestFailed) as caught:
                await a.unary(peer, "large", timeout=30.0)
            assert caught.value.reason == "fetch_timeout"
            await until(lambda: not slots(b), 5.0)
            stuck.let_go()
            assert await a.unary(peer, "large") == bytes(BIG)

    run_async(main())


@pytest.mark.parametrize("how", ["the time of the calls", "the end of the route"])
def test_what_a_receiver_that_stops_fetching_leaves_behind(run_async: Run, how: str) -> None:
    """C16: 200 payloads that nobody picks up, and nobody says so."""
    count = 2000 if SOAK else 200
    timed = how == "the time of the calls"

    async def main() -> None:
        async with nodes() as (a, b, peer):
            b.handler("f", lambda message: None)
            begun = 0

            async def never(handle: orbit.Handle, timeout_s: float | None) -> Any:
                nonlocal begun
                begun += 1
                await asyncio.Event().wait()

            b._open().payloads.fetch = never  # type: ignore[method-assign]
            payloads = [bytearray(BIG) for _ in range(count)]
            timeout = 2.0 if timed else 60.0
            call = a.sync if timed else a.send
            results = [call(peer, "f", p, timeout=timeout, wait=True) for p in payloads]
            await until(lambda: begun == count)
            assert slots(a) == count
            if not timed:
                await b.close()
            outcomes = await asyncio.gather(*map(_outcome, results))
            kind = orbit.DeadlineExceeded if timed else orbit.OutcomeUnknown
            assert {type(outcome) for outcome in outcomes} == {kind}
            await until(lambda: not slots(a))
            for payload in payloads:
                payload.extend(b"free")
            assert a.statistics().messaging.staged_payloads == 0
            await b.close()

    async def _outcome(result: orbit.SendResult[Any]) -> object:
        try:
            return await result
        except orbit.OrbitError as error:
            return error

    run_async(main())


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("call", ["send", "sync", "unary"])
def test_the_receivers_limit(
    run_async: Run, call: str, beyond: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "orbit")
    limit = 100_000

    async def main() -> None:
        async with nodes(b_config=config(staged_payload_max=limit)) as (a, b, peer):
            got: list[int] = []
            b.handler("f", lambda message: got.append(len(message.payload)))
            result = getattr(a, call)(peer, "f", bytes(limit + beyond))
            if beyond and call != "send":
                with pytest.raises(orbit.RequestFailed, match=rf"{limit + 1}.* {limit} ") as caught:
                    await result
                assert caught.value.reason == "too_large"
            else:
                await result
            await a.sync(peer, "f", b"and on")
            assert got == ([6] if beyond else [limit, 6])
            assert counter(b, REFUSALS) == beyond
            lost = [r for r in caplog.records if f"{limit + 1}" in r.getMessage()]
            assert bool(lost) == bool(beyond and call == "send")

    run_async(main())


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_callers_limit_for_replies(run_async: Run, beyond: int) -> None:
    limit = 100_000

    async def main() -> None:
        async with nodes(a_config=config(staged_payload_max=limit)) as (a, b, peer):
            b.handler("large", lambda message: bytes(limit + beyond))
            if beyond:
                with pytest.raises(orbit.RequestFailed, match=rf"{limit + 1}.* {limit} ") as caught:
                    await a.unary(peer, "large")
                assert caught.value.reason == "too_large"
            else:
                assert await a.unary(peer, "large") == bytes(limit)
            # What a limits is what it takes, not what it sends.
            b.handler("size", lambda message: str(len(message.payload)).encode())
            assert await a.unary(peer, "size", bytes(limit + 1)) == str(limit + 1).encode()

    run_async(main())


def test_an_item_over_the_limit_ends_its_own_stream(run_async: Run) -> None:
    limit = 600_000  # items up to 256 KiB are not staged

    async def main() -> None:
        async with (
            nodes(b_config=config(staged_payload_max=limit)) as (a, b, _),
            b.open_stream() as inbox,
            b.open_stream() as other_inbox,
        ):
            sender = await a.attach_stream(inbox.handle)
            other = await a.attach_stream(other_inbox.handle)
            await other.send(pattern(limit))
            await sender.send(pattern(limit))
            assert await anext(inbox) == pattern(limit)
            await sender.send(pattern(limit + 1))
            for end in (anext(inbox), _send_until_refused(sender)):
                with pytest.raises(orbit.StreamError, match=rf"{limit + 1}.* {limit} "):
                    await end
            await other.finalize()
            assert [bytes(item) async for item in other_inbox] == [pattern(limit)]
            assert counter(b, REFUSALS) == 1

    async def _send_until_refused(sender: Any) -> None:
        async with asyncio.timeout(5.0):
            await sender.cancelled.wait()
        await sender.send(b"more")

    run_async(main())


def test_items_of_streams_have_no_bound_in_time(run_async: Run) -> None:
    async def main() -> None:
        async with (
            nodes(b_config=config(staged_fetch_timeout=0.1)) as (a, b, _),
            b.open_stream() as inbox,
        ):
            sender = await a.attach_stream(inbox.handle)
            stuck = Stuck(a)
            await sender.send(pattern(300_000))
            await until(lambda: stuck.asked)
            await asyncio.sleep(0.3)
            stuck.let_go()
            await sender.finalize()
            assert [bytes(item) async for item in inbox] == [pattern(300_000)]
            assert counter(b, TIMEOUTS) == 0

    run_async(main())


# --- the end --------------------------------------------------------------------------------------


def test_a_drain_waits_for_a_fetch_that_has_begun(run_async: Run) -> None:
    async def main() -> None:
        async with nodes() as (a, b, peer):
            b.handler("size", lambda message: str(len(message.payload)).encode())
            assert bytes(await a.unary(peer, "size", b"warm")) == b"4"
            stuck = Stuck(a)
            call = a.unary(peer, "size", bytes(BIG))
            await until(lambda: stuck.asked)
            b.begin_drain()
            ending = asyncio.ensure_future(b.graceful_shutdown(orbit.ShutdownPolicy.timeout(10.0)))
            with pytest.raises(orbit.PeerDraining):
                await a.unary(peer, "size", bytes(BIG))
            assert b.statistics().dispatch.guards == 1
            stuck.let_go()
            assert await call == str(BIG).encode()
            await ending

    run_async(main())
