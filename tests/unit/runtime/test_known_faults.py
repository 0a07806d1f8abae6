"""Faults that a rendezvous of this kind is known to have had, one test each: orbit has none.

They were read in another implementation's source. What they cost there is in each docstring. The
eleventh, a staging header that handlers see and pass on, is test_staging.py's among the messages.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orbit.config import NodeConfig, RendezvousConfig
from orbit.errors import (
    BudgetExceeded,
    LeaseError,
    OrbitError,
    PeerRefused,
    UnknownHandle,
    UsageError,
)
from orbit.model import Handle, Lease, WorkerId
from orbit.protocol.messages import (
    AcquireReply,
    AcquireRequest,
    DetachRequest,
    EndReply,
    ReadyAnswer,
    RefRequest,
    ReleaseRequest,
)
from orbit.runtime.options import RegisterOptions
from orbit.runtime.owner import Owner
from orbit.testing.clock import run_virtual
from orbit.testing.pattern import pattern
from orbit.testing.world import World, WorldNode

PAYLOAD = pattern(200_000)
PATHS = ["rdma", "tcp"]
LEASE_S = 0.5


class Pair:
    """An owner, a consumer, and one payload of the owner's."""

    def __init__(self, world: World, rendezvous: RendezvousConfig | None = None) -> None:
        config = NodeConfig(rendezvous=rendezvous or RendezvousConfig(lease_timeout=LEASE_S))
        self.world = world
        self.owner, self.consumer = world.add_node(config), world.add_node(config)
        world.introduce()

    async def register(self, options: RegisterOptions | None = None) -> Handle:
        return await self.owner.rendezvous.owner.register_data_pinned(PAYLOAD, options)

    async def get(self, handle: Handle, path: str, node: WorldNode | None = None) -> Lease:
        api = (node or self.consumer).rendezvous.consumer
        data, lease = await api.get(handle, transport=path, timeout=None)
        assert data == PAYLOAD
        return lease

    @property
    def slots(self) -> Any:
        return self.owner.rendezvous.statistics().slots

    def assert_gone(self) -> None:
        """The slot, its leases, its transfers and its memory."""
        assert (self.slots.slots, self.slots.leases_held, self.slots.staged_bytes) == (0, 0, 0)
        assert self.world.fabric.exposed_count == 0
        assert self.owner.memory is not None
        assert self.owner.memory.allocated_count == 0


@pytest.mark.parametrize("path", PATHS)
def test_1_two_releases_at_one_reference_free_the_slot(path: str) -> None:
    """Lock and reference went in two steps: two readers who both release left a slot without
    references and locks that nobody freed.
    """

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register()
            leases = await asyncio.gather(*(pair.get(handle, path) for _ in range(2)))
            api = pair.consumer.rendezvous.consumer
            await asyncio.gather(*(api.release(handle, lease) for lease in leases))
            await asyncio.sleep(0.1)
            pair.assert_gone()

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_2_the_last_detach_frees_a_slot_without_references(path: str) -> None:
    """A detach never freed, so a slot whose references had gone while it was being read stayed."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register()
            first, last = [await pair.get(handle, path) for _ in range(2)]
            api = pair.consumer.rendezvous.consumer
            await api.release(handle, first)
            assert pair.slots.slots == 1
            await api.detach(handle, last)
            await asyncio.sleep(0.1)
            pair.assert_gone()

    run_virtual(main())


def test_3_nothing_revives_a_slot_without_references() -> None:
    """An acquire, or one more reference, brought a dying slot back."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register()
            first, last = [await pair.get(handle, "tcp") for _ in range(2)]
            api = pair.consumer.rendezvous.consumer
            await api.release(handle, first)
            with pytest.raises(UnknownHandle):
                await pair.get(handle, "tcp")
            with pytest.raises(UnknownHandle):
                await api.ref_handle(handle)
            await api.detach(handle, last)

    run_virtual(main())


def test_4_a_handle_of_another_node_is_not_served() -> None:
    """Only the lower half of a handle was looked at."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register()
            foreign = Handle(WorkerId(77), handle.slot_id)
            session = await pair.consumer.rendezvous.session_to(pair.owner.identity.worker_id)
            for request in (AcquireRequest(foreign), RefRequest(foreign)):
                with pytest.raises(PeerRefused) as caught:
                    await session.call(request, AcquireReply)
                assert caught.value.reason == "unknown_handle"
            assert pair.slots.leases_held == 0

    run_virtual(main())


@pytest.mark.parametrize("claimed", [1 << 50, len(PAYLOAD) + 1, len(PAYLOAD) - 1])
def test_5_the_length_that_an_owner_claims_is_not_believed(
    claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was allocated as claimed, and what came short of it was delivered as zeros."""
    honest = Owner._answer_ready

    async def lying(owner: Owner, *args: Any) -> AcquireReply:
        ready = (await honest(owner, *args)).ready
        assert ready is not None
        return AcquireReply(ready=ReadyAnswer(ready.lease_id, ready.transfer_id, claimed))

    async def main() -> None:
        async with World() as world:
            limit = RendezvousConfig(lease_timeout=LEASE_S, payload_max_bytes=1 << 20)
            pair = Pair(world, limit)
            handle = await pair.register(RegisterOptions(retain=True))
            monkeypatch.setattr(Owner, "_answer_ready", lying)
            dest = bytearray(1 << 20)
            api = pair.consumer.rendezvous.consumer
            if claimed < len(PAYLOAD):
                lease = await api.get_into(
                    handle, dest, transport="tcp", timeout=None, progress=None
                )
                assert dest[:claimed] == PAYLOAD[:claimed]
                assert dest[claimed:] == bytes(len(dest) - claimed)
                await api.detach(handle, lease)
            else:
                error = BudgetExceeded if claimed > 1 << 20 else OrbitError
                with pytest.raises(error):
                    await pair.get(handle, "tcp")
            await asyncio.sleep(0.1)
            assert pair.slots.leases_held == 0

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_6_a_destination_that_is_too_small_is_seen_first_and_costs_no_lease(path: str) -> None:
    """The capacity was looked at while writing, and the error left the lease behind."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register()
            dest = bytearray(len(PAYLOAD) - 1)
            with pytest.raises(UsageError):
                await pair.consumer.rendezvous.consumer.get_into(
                    handle, dest, transport=path, timeout=None, progress=None
                )
            assert dest == bytes(len(dest))
            dest.append(0)  # it is not exported any more
            await asyncio.sleep(0.1)
            assert (pair.slots.leases_held, pair.slots.slots) == (0, 1)

    run_virtual(main())


@pytest.mark.parametrize("message", [DetachRequest, ReleaseRequest])
def test_7_a_lease_under_a_wrong_handle_stays(message: Any) -> None:
    """A wrong pair used the lease up, and its lock stayed for ever."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            one, two = await pair.register(), await pair.register()
            lease = await pair.get(one, "tcp")
            api = pair.consumer.rendezvous.consumer
            with pytest.raises(LeaseError):
                await api.detach(two, lease)
            session = await pair.consumer.rendezvous.session_to(pair.owner.identity.worker_id)
            with pytest.raises(PeerRefused) as caught:
                await session.call(message(two, lease.lease_id), EndReply)
            assert caught.value.reason == "lease"
            assert pair.slots.leases_held == 1
            await api.release(one, lease)
            await asyncio.sleep(0.1)
            assert (pair.slots.leases_held, pair.slots.slots) == (0, 1)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["silent", "killed"])
def test_8_a_consumer_that_is_heard_of_no_more_pins_nothing(path: str, how: str) -> None:
    """There was no deadline: a consumer that died, or whose release was lost, pinned the slot."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register()
            await pair.get(handle, path)
            if how == "killed":
                world.kill(pair.consumer)
            else:
                assert pair.slots.leases_held == 1
            await asyncio.sleep(1.5 * LEASE_S)
            pair.assert_gone()

    run_virtual(main())


def test_8_a_payload_that_nobody_fetches_goes_with_its_time_to_live() -> None:
    """It was stored with the slot and never read."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            for _ in range(3):
                await pair.register(RegisterOptions(ttl=1.0))
            await asyncio.sleep(0.9)
            assert pair.slots.slots == 3
            await asyncio.sleep(0.3)
            pair.assert_gone()
            assert pair.slots.slots_expired == 3

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_9_a_release_over_the_wire_is_seen_in_the_statistics(path: str) -> None:
    """The gauge of live slots went up and never down."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            for _ in range(5):
                handle = await pair.register()
                assert pair.slots.slots == 1
                lease = await pair.get(handle, path)
                assert (pair.slots.leased_bytes, pair.slots.leases_held) == (len(PAYLOAD), 1)
                await pair.consumer.rendezvous.consumer.release(handle, lease)
                await asyncio.sleep(0.1)
                assert (pair.slots.slots, pair.slots.leased_bytes) == (0, 0)

    run_virtual(main())


@pytest.mark.parametrize("path", PATHS)
def test_10_a_transfer_ends_with_its_lease(path: str) -> None:
    """Transfers lived as long as a lease that nobody took back, and each end looked at all."""

    async def main() -> None:
        async with World() as world:
            pair = Pair(world)
            handle = await pair.register(RegisterOptions(retain=True))
            leases = [await pair.get(handle, path) for _ in range(20)]
            assert world.fabric.exposed_count == 20
            await pair.consumer.rendezvous.consumer.detach(handle, leases[0])
            await asyncio.sleep(0.1)
            assert world.fabric.exposed_count == 19
            await asyncio.sleep(1.5 * LEASE_S)
            assert world.fabric.exposed_count == 0

    run_virtual(main())
