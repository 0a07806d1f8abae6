"""How each fault is brought about at each phase: by a rule of the fake device where the role acts
on its device then, else by what can come at any time, and by another transfer on the same queue
pair where only an action could show the fault.
"""

from __future__ import annotations

import asyncio

from orbit.errors import OrbitError, PathFailed, PathUnavailable, Unquiesced
from orbit.model import Direction
from orbit.testing.path_rail_cases import RunTransfer
from orbit.verbs import records
from orbit.verbs.records import Completion, QueuePairAttributes
from orbit.verbs.requester import RequesterMember
from orbit.verbs.scripted_fabric import FOREVER, RECEIVE
from orbit.verbs.source import SourceMember
from orbit.verbs.status import REM_OP_ERR, RETRY_EXC_ERR, WR_FLUSH_ERR
from tests.unit.verbs.faults.fault_rig import PIECE, World
from tests.unit.verbs.faults.matrix import Cell, Fault, Phase, Role

_ENOMEM, _EBUSY, _EINVAL = 12, 16, 22
_Target = tuple[int, int]  # opcode, and how many of it come before


class Strike:
    """One cell's fault. `before_exposing`, `before_moving` and `at` are called as the transfer
    goes; each does what is due then.
    """

    def __init__(self, world: World, cell: Cell, direction: Direction, array: int) -> None:
        self.other: BaseException | None = None  # how the other transfer ended, if there was one
        self.unknown = 0  # completions that nobody can know
        self.array = array  # of the rail that is hit
        self._world = world
        self._cell = cell
        self._direction = direction
        self._side = world.source if cell.role is Role.SOURCE else world.requester
        self._move = records.READ if direction is Direction.READ else records.WRITE
        self._rule = self._target()

    @property
    def frozen(self) -> Phase | None:
        """The transfer has to stand still in that phase."""
        return self._cell.phase if self._rule is None else None

    def before_exposing(self) -> None:
        if self._cell.phase <= Phase.RECEIVE:
            self._arm()

    def before_moving(self) -> None:
        if self._cell.phase > Phase.RECEIVE:
            self._arm()

    async def at(self, phase: Phase) -> None:
        if phase is not self._cell.phase or self._rule is not None:
            return
        match self._cell.fault:
            case Fault.FOREIGN:
                self._bring_foreign()
            case Fault.DUPLICATE:
                self._repeat()
            case Fault.DESTROY:
                self._kill()
            case Fault.ERROR if phase is not Phase.END:
                self._break_queue_pair()
            case _:
                await self._hit_another()
        if phase not in (Phase.PLAN, Phase.PUBLISH, Phase.MATCH):
            await asyncio.sleep(0.01)  # both sides have heard of it

    # --- by a rule ---

    def _target(self) -> _Target | None:
        """What the rule is about; None: it takes more than a rule."""
        phase, fault = self._cell.phase, self._cell.fault
        if fault is Fault.DESTROY:
            return (0, 0) if phase is Phase.PATH else None
        if fault is Fault.FOREIGN or phase is Phase.END:
            return None
        if self._cell.role is Role.SOURCE:
            return self._of_source(phase, fault)
        return self._of_requester(phase, fault)

    def _of_source(self, phase: Phase, fault: Fault) -> _Target | None:
        if phase <= Phase.BIND:
            repeated = fault is Fault.DUPLICATE and phase is Phase.PLAN
            return None if repeated else (records.BIND_WINDOW, int(phase is Phase.BIND))
        if phase > Phase.RECEIVE and fault in (Fault.PARTIAL, Fault.UNCOUNTED):
            return None  # it posts nothing more
        if Phase.PUBLISH <= phase <= Phase.RECEIPT and fault in (Fault.ERROR, Fault.DUPLICATE):
            return None
        return RECEIVE, int(phase is Phase.MATCH)

    def _of_requester(self, phase: Phase, fault: Fault) -> _Target | None:
        if phase <= Phase.PAYLOAD:
            waits = phase not in (Phase.PATH, Phase.PAYLOAD)
            repeated = fault is Fault.DUPLICATE and waits
            return None if repeated else (self._move, int(phase is Phase.PAYLOAD))
        if phase is Phase.MATCH and fault in (Fault.PARTIAL, Fault.UNCOUNTED):
            return None
        return records.SEND_WITH_INV, int(phase is Phase.MATCH)

    def _arm(self) -> None:
        if self._rule is None:
            return
        if self._cell.fault is Fault.DESTROY:
            self._side.fake.fail_verb("modify_qp", _EINVAL)
            self._side.fake.fail_verb("destroy_qp", _EBUSY, count=FOREVER)
            return
        opcode, skip = self._rule
        if self._cell.fault is Fault.ERROR and opcode == records.SEND_WITH_INV and skip:
            self._deny_receipt(skip)
        else:
            self._add_rule(opcode, skip)

    def _add_rule(self, opcode: int, skip: int) -> None:
        fake = self._side.fake
        match self._cell.fault:
            case Fault.PARTIAL:
                fake.refuse_post(opcode, _ENOMEM, skip=skip)
            case Fault.UNCOUNTED:
                fake.refuse_post(opcode, _ENOMEM, known=False, skip=skip)
            case Fault.LOST:
                fake.lose(opcode, skip=skip)
            case Fault.LATE:
                fake.hold(opcode, skip=skip, count=1)
            case Fault.DUPLICATE:
                fake.duplicate(opcode, skip=skip)
                self.unknown = 1
            case Fault.ERROR if opcode == records.BIND_WINDOW:
                fake.fail_bind(skip=skip)
            case Fault.ERROR:
                fake.fail(opcode, REM_OP_ERR if opcode == RECEIVE else RETRY_EXC_ERR, skip=skip)

    def _deny_receipt(self, skip: int) -> None:
        """It arrives, but not its acknowledgement."""
        tap = self._side.tap
        assert tap is not None
        seen = 0

        def altered(completion: Completion) -> Completion:
            nonlocal seen
            if completion.status or completion.opcode != records.SEND:
                return completion
            seen += 1
            return completion._replace(status=RETRY_EXC_ERR) if seen > skip else completion

        tap.alter = altered

    # --- at any time ---

    def _bring_foreign(self) -> None:
        """Of ids that were never given out, or before, or to another queue pair."""
        tap = self._side.tap
        assert tap is not None
        member = self._member()
        flush = Completion(0xFFFF_FFFF_FFFF, WR_FLUSH_ERR, 0, 0, 1, 0, 0, 0)
        coming = [flush, flush._replace(wr_id=5)]
        if member is not None:
            for wr_id in member.queue_pair._outstanding:
                coming.append(flush._replace(wr_id=wr_id, qp_num=member.queue_pair.qp_num + 1))
        tap.bring(*coming)
        self.unknown = len(coming)

    def _repeat(self) -> None:
        tap = self._side.tap
        assert tap is not None
        tap.bring(tap.polled[-1])
        self.unknown = 1

    def _kill(self) -> None:
        self._side.fake.fail_verb("destroy_qp", _EBUSY, count=FOREVER)
        member = self._member()
        assert member is not None
        member.abort(OrbitError("ended by the test"))

    def _break_queue_pair(self) -> None:
        """The device ends it, as it does after what a peer did wrong."""
        member = self._member()
        assert member is not None
        member.queue_pair._native.modify(QueuePairAttributes(state=records.STATE_ERR))

    def _member(self) -> SourceMember | RequesterMember | None:
        world = self._world
        if self._cell.role is Role.REQUESTER:
            array = world.consumer._requests.arrays.find(world.consumer_session, self.array)
            return None if array is None else array.member(0)
        session = world.owner_session
        return world.owner._sources._arrays[session.attempt, self.array].members.get(0)

    # --- by another transfer ---

    async def _hit_another(self) -> None:
        """The next action of this role on that queue pair is not the parent's."""
        source = self._cell.role is Role.SOURCE
        self._add_rule(records.BIND_WINDOW if source else self._move, 0)
        other = RunTransfer(self._world, [(self.array, PIECE)], 3, self._direction)
        try:
            exposure = await other.expose()
            await other.move(exposure)
        except (PathUnavailable, PathFailed, Unquiesced) as error:
            self.other = error
        await other.retract(transferred=self.other is None)
        if not self._cell.expected.kept:
            other.free()
