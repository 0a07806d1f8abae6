"""Both machines of a stream: every state and input as recorded, and the rules one by one."""

from __future__ import annotations

from typing import Any

import pytest

from orbit.errors import InternalError
from orbit.protocol.streams import receiver as r
from orbit.protocol.streams import sender as s
from orbit.protocol.streams.ends import EndKind, StreamWindow
from orbit.protocol.streams.frames import NoteKind
from tests.unit.protocol.streams.machine_snapshots import MACHINES, WINDOW, files, reach

TABLES: dict[str, tuple[Any, Any]] = {
    "stream_sender": (s.SENDER_TABLE, s.SenderInput),
    "stream_receiver": (r.RECEIVER_TABLE, r.ReceiverInput),
}


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_generated_file_is_current(path: Any) -> None:
    assert path.read_text() == files()[path], "run streams/machine_snapshots.py"


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_and_every_input_is_covered(name: str) -> None:
    _, roads, inputs = MACHINES[name]
    table, union = TABLES[name]
    assert set(roads) == {str(state) for state in table}
    assert {type(event) for event in inputs} == set(union.__args__)


@pytest.mark.parametrize("name", MACHINES)
def test_an_unlisted_input_changes_nothing(name: str) -> None:
    build, roads, inputs = MACHINES[name]
    table, _ = TABLES[name]
    for state, road in roads.items():
        for event in inputs:
            machine = reach(build, road)
            if type(event) in table[machine.state]:
                continue
            before = repr(vars(machine))
            with pytest.raises(InternalError, match="not allowed"):
                machine.step(event, 1.0)
            assert repr(vars(machine)) == before, f"{state} + {event}"


# --- sender ---------------------------------------------------------------------------------------


def sender(items: int = 4, nbytes: int = 100) -> s.StreamSender:
    return s.StreamSender(StreamWindow(items, nbytes), 1.0, 0.0)


def test_items_leave_in_order_of_issue_and_a_short_one_never_overtakes() -> None:
    machine = sender()
    assert machine.step(s.Submit(1, 50), 0.0) == [s.SendItem(1, 0)]
    assert machine.step(s.Submit(2, 40), 0.0) == [s.SendItem(2, 1)]
    assert machine.step(s.Submit(3, 20), 0.0) == []
    assert machine.step(s.Submit(4, 1), 0.0) == []
    assert machine.waiting == 2
    assert machine.step(s.Credited(5, 150), 0.0) == [s.SendItem(3, 2), s.SendItem(4, 3)]


@pytest.mark.parametrize("nbytes", [49, 50, 51, 10_000])
def test_an_item_is_charged_half_a_window_at_most(nbytes: int) -> None:
    machine = sender()
    machine.step(s.Submit(1, nbytes), 0.0)
    machine.step(s.Submit(2, nbytes), 0.0)
    assert machine.waiting == 0
    machine.step(s.Submit(3, nbytes), 0.0)
    assert machine.waiting == 1  # two take all of it, or all but two bytes
    assert machine.has_room(0) is False


def test_withdrawing_the_first_lets_the_next_go() -> None:
    machine = sender()
    for ticket, nbytes in enumerate((50, 45, 20, 3)):
        machine.step(s.Submit(ticket, nbytes), 0.0)
    assert machine.waiting == 2
    assert machine.step(s.Withdraw(2), 0.0) == [s.SendItem(3, 2)]
    assert machine.step(s.Withdraw(0), 0.0) == []  # it has left


def test_finalize_waits_for_what_was_issued_and_the_end_needs_no_credit() -> None:
    machine = sender(items=1)
    machine.step(s.Submit(1, 1), 0.0)
    machine.step(s.Submit(2, 1), 0.0)
    assert machine.step(s.Finalize(), 0.0) == []
    assert machine.state is s.SenderState.FINISHING
    assert machine.step(s.Credited(2, 101), 0.0) == [
        s.SendItem(2, 1),
        s.SendTerminal(NoteKind.FINALIZED, 2, ""),
    ]
    assert machine.step(s.Finished(), 0.0) == [s.Release()]
    assert machine.end is not None
    assert machine.end.kind is EndKind.FINALIZED


def test_an_item_that_was_not_staged_moves_the_end_to_its_place() -> None:
    machine = sender()
    for ticket in range(3):
        machine.step(s.Submit(ticket, 1), 0.0)
    assert machine.step(s.Abandon(NoteKind.FAILED, "full", 1), 0.0) == [
        s.SendTerminal(NoteKind.FAILED, 1, "full")
    ]


def test_more_credit_than_was_sent_ends_the_stream() -> None:
    machine = sender()
    effects = machine.step(s.Credited(5, 100), 0.0)
    assert effects[-1] == s.Release()
    assert machine.end is not None
    assert machine.end.kind is EndKind.PROTOCOL


def test_an_old_credit_takes_nothing_away() -> None:
    machine = sender()
    for ticket in range(3):
        machine.step(s.Submit(ticket, 10), 0.0)
    machine.step(s.Credited(6, 120), 0.0)
    machine.step(s.Credited(4, 100), 0.0)
    assert machine.items_taken == 2


def test_it_beats_while_it_is_idle_and_only_then() -> None:
    machine = sender()
    machine.step(s.Submit(1, 1), 0.7)
    assert machine.on_deadline(1.0) == []  # an item went out meanwhile
    assert machine.deadline == 1.7
    assert machine.on_deadline(1.7) == [s.SendHeartbeat()]
    machine.step(s.Credited(4, 100), 1.8)  # answered
    for now in (2.7, 3.7, 4.7):
        assert machine.on_deadline(now) == [s.SendHeartbeat()]
    effects = machine.on_deadline(5.7)
    assert effects[-1] == s.Release()
    assert machine.end is not None
    assert machine.end.kind is EndKind.LOST


# --- receiver -------------------------------------------------------------------------------------


def receiver(items: int = 4, nbytes: int = 100) -> r.StreamReceiver:
    machine = r.StreamReceiver(1.0)
    machine.step(r.Attach(StreamWindow(items, nbytes)), 0.0)
    return machine


@pytest.mark.parametrize("sequence", [0, 2])
def test_a_gap_or_a_duplicate_ends_it_behind_what_is_here(sequence: int) -> None:
    machine = receiver()
    machine.step(r.ItemArrived(0, 1), 0.0)
    effects = machine.step(r.ItemArrived(sequence, 1), 0.0)
    assert isinstance(effects[0], r.SendCancel)
    assert effects[1:] == [r.Unbind()]
    assert machine.ready
    machine.step(r.Taken(), 0.0)
    assert machine.state is r.ReceiverState.ENDED
    assert machine.end is not None
    assert machine.end.kind is EndKind.PROTOCOL


@pytest.mark.parametrize(
    "lengths", [(1, 1, 1, 1, 1), (50, 40, 11)], ids=["one item more", "one byte more"]
)
def test_more_than_was_credited_ends_it(lengths: tuple[int, ...]) -> None:
    machine = receiver()
    for sequence, nbytes in enumerate(lengths):
        assert machine.state is r.ReceiverState.ATTACHED
        machine.step(r.ItemArrived(sequence, nbytes), 0.0)
    assert machine.state is r.ReceiverState.DRAINING
    assert machine.buffered == len(lengths) - 1


def test_room_is_credited_by_quarters() -> None:
    machine = receiver(items=8, nbytes=1000)
    for sequence in range(8):
        machine.step(r.ItemArrived(sequence, 1), 0.0)
    assert machine.step(r.Taken(), 0.0) == []
    assert machine.step(r.Taken(), 0.0) == [r.SendCredit(10, 1002)]
    assert machine.step(r.Taken(), 0.0) == []
    assert machine.step(r.Heartbeat(), 0.0) == [r.SendCredit(11, 1003)]


def test_a_staged_item_keeps_its_place_and_is_not_read_before_it_is_here() -> None:
    machine = receiver()
    assert machine.step(r.ItemArrived(0, 70, staged=True), 0.0) == [r.Fetch(0)]
    machine.step(r.ItemArrived(1, 1), 0.0)
    assert not machine.ready
    with pytest.raises(InternalError):
        machine.step(r.Taken(), 0.0)
    assert machine.step(r.TerminalArrived(NoteKind.FINALIZED, 2), 0.0) == []
    assert machine.step(r.Fetched(0), 0.0) == [r.SendFinished(), r.Unbind()]
    assert machine.ready
    machine.step(r.Taken(), 0.0)
    machine.step(r.Taken(), 0.0)
    assert machine.state is r.ReceiverState.ENDED


def test_a_lost_link_keeps_what_is_complete() -> None:
    machine = receiver()
    machine.step(r.ItemArrived(0, 1), 0.0)
    machine.step(r.ItemArrived(1, 70, staged=True), 0.0)
    machine.step(r.ItemArrived(2, 1), 0.0)
    assert machine.step(r.LinkLost("reset"), 0.0) == [r.Unbind()]
    assert (machine.buffered, machine.buffered_bytes) == (1, 1)
    assert machine.step(r.Fetched(1), 0.0) == []
    machine.step(r.Taken(), 0.0)
    assert machine.end is not None
    assert machine.end.kind is EndKind.LOST


def test_a_broken_item_ends_what_is_still_fetched_before_it_too() -> None:
    machine = receiver()
    machine.step(r.ItemArrived(0, 1), 0.0)
    machine.step(r.ItemArrived(1, 1, staged=True), 0.0)
    machine.step(r.ItemArrived(2, 1, staged=True), 0.0)
    assert machine.step(r.ItemBroken(2, "gone"), 0.0) == [r.SendCancel("gone"), r.Unbind()]
    assert (machine.buffered, machine.ready) == (1, True)
    machine.step(r.Taken(), 0.0)
    assert machine.state is r.ReceiverState.ENDED


def test_an_end_that_has_arrived_stands_whatever_becomes_of_the_link() -> None:
    machine = receiver()
    machine.step(r.ItemArrived(0, 1), 0.0)
    machine.step(r.TerminalArrived(NoteKind.FINALIZED, 1), 0.0)
    machine.step(r.LinkLost("reset"), 0.0)
    assert machine.end is not None
    assert machine.end.kind is EndKind.FINALIZED


def test_an_end_of_another_count_is_a_broken_rule() -> None:
    machine = receiver()
    machine.step(r.TerminalArrived(NoteKind.FINALIZED, 1), 0.0)
    assert machine.end is not None
    assert machine.end.kind is EndKind.PROTOCOL


def test_silence_is_noticed_after_three_heartbeats() -> None:
    machine = receiver()
    machine.step(r.Heartbeat(), 1.0)
    assert machine.on_deadline(3.0) == []
    assert machine.deadline == 4.0
    assert isinstance(machine.on_deadline(4.0)[0], r.SendCancel)
    assert machine.end is not None
    assert machine.end.kind is EndKind.LOST
    assert machine.deadline is None


def test_cancel_drops_what_is_buffered() -> None:
    machine = receiver()
    machine.step(r.ItemArrived(0, 1), 0.0)
    assert machine.step(r.Cancel(), 0.0) == [r.SendCancel(""), r.Unbind()]
    assert machine.buffered == 0
    assert machine.step(r.Cancel(), 0.0) == []


def test_the_window_of_the_snapshots_is_small() -> None:
    assert WINDOW.charge(51) == 50
