"""READ arrays: one dial for all who wait, back-off, replacement, and what a source refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orbit.errors import PathUnavailable, PeerRefused
from orbit.model import PathReason
from orbit.protocol.messages import BulkMember, ConnectBulkReply, ConnectBulkRequest
from tests.contract.rdma_pairs import QUICK, Get, ScriptedPair, counts, join, rdma_pair


def test_concurrent_prepares_share_one_dial() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            session = pair.consumer_session
            results = await asyncio.gather(*(pair.consumer.prepare(session) for _ in range(1000)))
            assert set(results) == {PathReason.OK}
            assert counts(pair.consumer)["connects"] == counts(pair.owner)["connects"] == 2

    asyncio.run(main())


def test_a_failed_dial_is_not_paid_by_everyone() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            pair.b.fail_verb("modify_qp", 110, count=1000)
            session = pair.consumer_session
            results = [await pair.consumer.prepare(session) for _ in range(100)]
            assert set(results) == {PathReason.CONNECT_FAILED}
            assert counts(pair.consumer)["connect_failures"] < 20
            assert pair.consumer.availability(session) is PathReason.CONNECT_FAILED
            pair.b.clear_rules()
            await asyncio.sleep(QUICK.connect_backoff_s + 0.01)
            assert await pair.consumer.prepare(session) is PathReason.OK
            await Get(pair, 5000).run()

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["create_qp", "reg_mr", "modify_qp"])
def test_a_source_that_cannot_says_so_and_keeps_nothing(verb: str) -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            pair.a.fail_verb(verb, 12, skip=1)
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.CONNECT_FAILED
            await asyncio.sleep(QUICK.connect_backoff_s + 0.01)
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await Get(pair, 5000).run()
            assert pair.owner.statistics().queue_pairs == 2

    asyncio.run(main())


def test_a_peer_without_rails_is_peer_without() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            session = pair.consumer_session
            session.peer_hello = replace(session.peer_hello, rails=())
            assert pair.consumer.availability(session) is PathReason.PEER_WITHOUT
            assert await pair.consumer.prepare(session) is PathReason.PEER_WITHOUT

    asyncio.run(main())


def test_a_lost_member_is_replaced_and_the_other_serves_meanwhile() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            await pair.consumer.prepare(pair.consumer_session)
            for lease in range(1, 8):
                get = Get(pair, 5000, lease)
                await get.expose()
                await get.retract(transferred=False)  # ends the queue pair
                await Get(pair, 5000, 100 + lease).run()  # the other member
                for _ in range(500):
                    await asyncio.sleep(0.002)
                    if counts(pair.consumer)["connects"] == 2 + lease:
                        break
            assert pair.owner.statistics().queue_pairs == 2
            assert counts(pair.owner)["aborts"] == counts(pair.consumer)["aborts"] == 7

    asyncio.run(main())


def test_an_unprepared_array_offers_nothing() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            with pytest.raises(PathUnavailable) as caught:
                await Get(pair, 100).expose()
            assert caught.value.reason == PathReason.CONNECT_FAILED

    asyncio.run(main())


def request(pair: ScriptedPair, **changes: object) -> ConnectBulkRequest:
    good = ConnectBulkRequest(
        array=0,
        attempt=1,
        rail=pair.consumer.hints[0],
        source_gid=pair.owner.hints[0].gid,
        members=(BulkMember(0, 17, 5),),
        rd_atomic=1,
        connection=bytes(16),
    )
    return replace(good, **changes)  # type: ignore[arg-type]


BAD_REQUESTS: dict[str, tuple[dict[str, object], str]] = {
    "unknown rail": ({"source_gid": "::ffff:9.9.9.9"}, "no_rail"),
    "no member": ({"members": ()}, "bad_request"),
    "twice the same": ({"members": (BulkMember(0, 1, 1), BulkMember(0, 2, 2))}, "bad_request"),
    "too many": ({"members": tuple(BulkMember(i, i + 1, 1) for i in range(17))}, "bad_request"),
    "a far index": ({"members": (BulkMember(1 << 40, 1, 1),)}, "bad_request"),
    "a wide qpn": ({"members": (BulkMember(0, 1 << 24, 1),)}, "bad_request"),
    "no connection id": ({"connection": b""}, "bad_request"),
    "no rd_atomic": ({"rd_atomic": 0}, "bad_request"),
    "no attempt": ({"attempt": 0}, "stale_attempt"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_takes_nothing(name: str) -> None:
    changes, reason = BAD_REQUESTS[name]

    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            with pytest.raises(PeerRefused) as caught:
                await pair.consumer_session.call(request(pair, **changes), ConnectBulkReply)
            assert caught.value.reason == reason
            assert pair.owner.statistics().queue_pairs == 0

    asyncio.run(main())


def test_an_older_attempt_is_refused_and_a_newer_one_replaces() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            call = pair.consumer_session.call
            first = await call(request(pair, attempt=5), ConnectBulkReply)
            with pytest.raises(PeerRefused) as caught:
                await call(request(pair, attempt=5), ConnectBulkReply)
            assert caught.value.reason == "stale_attempt"
            second = await call(request(pair, attempt=6), ConnectBulkReply)
            assert second.members[0].qpn != first.members[0].qpn
            assert second.connection != first.connection
            assert pair.owner.statistics().queue_pairs == 1

    asyncio.run(main())


def test_a_source_serves_a_bounded_number_of_queue_pairs() -> None:
    async def main() -> None:
        config = replace(QUICK, endpoints_max=3, arrays_per_session_max=2)
        async with rdma_pair(config=config, consumer_config=QUICK, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            busy = [Get(pair, 100, lease) for lease in (1, 2)]
            for get in busy:  # nothing idle can be evicted
                await get.expose()
            call = pair.consumer_session.call
            two = (BulkMember(0, 17, 5), BulkMember(1, 18, 5))
            with pytest.raises(PeerRefused) as caught:
                await call(request(pair, array=1, members=two), ConnectBulkReply)
            assert caught.value.reason == "busy"
            await call(request(pair, array=1, attempt=2), ConnectBulkReply)
            with pytest.raises(PeerRefused) as caught:
                await call(request(pair, array=2), ConnectBulkReply)
            assert caught.value.reason == "busy"
            _, theirs = join(pair.owner, pair.consumer, 2)
            assert await pair.consumer.prepare(theirs) is PathReason.CONNECT_FAILED
            pair.owner_session.close()
            await pair.owner.close_session(pair.owner_session)
            await asyncio.sleep(QUICK.connect_backoff_s + 0.01)
            assert await pair.consumer.prepare(theirs) is PathReason.OK

    asyncio.run(main())


def test_an_idle_array_makes_room_for_another_peer() -> None:
    async def main() -> None:
        config = replace(QUICK, endpoints_max=2)
        async with rdma_pair(config=config, consumer_config=QUICK, pinned_targets=False) as pair:
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            _, theirs = join(pair.owner, pair.consumer, 2)
            busy = Get(pair, 5000)
            exposure = await busy.expose()
            assert await pair.consumer.prepare(theirs) is PathReason.CONNECT_FAILED
            await busy.pull(exposure)
            await busy.retract()
            await asyncio.sleep(QUICK.connect_backoff_s + 0.01)
            assert await pair.consumer.prepare(theirs) is PathReason.OK
            # The first array is gone, was not dialed again by itself, and comes back when asked.
            for _ in range(200):
                await asyncio.sleep(0.002)
                if pair.consumer.statistics().queue_pairs == 2:
                    break
            assert pair.consumer.statistics().queue_pairs == 2
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await Get(pair, 5000, 2).run()

    asyncio.run(main())


def test_a_gid_is_found_again_at_another_index_and_missed_when_it_is_gone() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            gid = pair.b.gids[1]
            pair.b.set_gid(1, "::")
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.CONNECT_FAILED
            pair.b.set_gid(5, gid)
            await asyncio.sleep(QUICK.connect_backoff_s + 0.01)
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.OK
            await Get(pair, 5000).run()

    asyncio.run(main())


def test_closing_during_a_dial_leaves_nothing() -> None:
    async def main() -> None:
        async with rdma_pair(pinned_targets=False) as pair:
            pair.b.set_rtr_delay(0.05)
            preparing = asyncio.ensure_future(pair.consumer.prepare(pair.consumer_session))
            await asyncio.sleep(0.02)
            await pair.consumer.close()
            assert await preparing is not PathReason.OK
            assert await pair.consumer.prepare(pair.consumer_session) is PathReason.DRAINING

    asyncio.run(main())
