"""The credit book of one link and the ledger of one receive queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit.errors import InternalError, PeerProtocolError
from orbit.protocol.messaging.credits import (
    CONTROL_SLABS,
    REFILL_MAX,
    CreditBook,
    SlabLedger,
    Windows,
)
from orbit.protocol.messaging.packets import PacketKind, Returned, Window

MESSAGE, RESPONSE = PacketKind.MESSAGE, PacketKind.RESPONSE
GRANT, PING, PONG = PacketKind.GRANT, PacketKind.PING, PacketKind.PONG
GOODBYE, GOODBYE_ACK = PacketKind.GOODBYE, PacketKind.GOODBYE_ACK
REPLIES = (PacketKind.RESPONSE, PacketKind.ACK, PacketKind.EVENT, PacketKind.SHUTTING_DOWN)


class Pair:
    """Two books and nothing between them: a packet arrives as it is sent."""

    def __init__(self, windows: Windows, inbound_bytes_max: int = 1 << 20) -> None:
        self.a = CreditBook(windows, windows, inbound_bytes_max)
        self.b = CreditBook(windows, windows, inbound_bytes_max)

    def send(self, kind: int, nbytes: int = 0, *, back: bool = False) -> Returned:
        sender, receiver = (self.b, self.a) if back else (self.a, self.b)
        sender.take(kind)
        returned = sender.stamp()
        receiver.on_returned(returned)
        receiver.on_packet(kind, nbytes)
        return returned


@pytest.mark.parametrize(("messages", "replies"), [(0, 1), (1, 0), (5, 1), (64, 15)])
def test_windows_that_cannot_be(messages: int, replies: int) -> None:
    with pytest.raises(ValueError, match="windows"):
        Windows(messages, replies)


@pytest.mark.parametrize(
    ("messages", "slabs", "refill"),
    [(1, 7, 1), (4, 10, 1), (5, 12, 2), (64, 85, 16), (256, 325, 16)],
)
def test_what_windows_take(messages: int, slabs: int, refill: int) -> None:
    windows = Windows(messages, -(-messages // 4))
    assert (windows.slabs, windows.refill) == (slabs, refill)


# --- as the sender ---


def test_messages_are_paid_until_none_is_left() -> None:
    book = CreditBook(Windows(1, 1), Windows(2, 1), 100)
    for left in (2, 1):
        assert book.available(Window.MESSAGES) == left
        assert book.may_send(MESSAGE)
        book.take(MESSAGE)
    assert not book.may_send(MESSAGE)
    with pytest.raises(InternalError, match="without credit"):
        book.take(MESSAGE)
    assert book.may_send(RESPONSE)
    book.on_returned(Returned(credits=1))
    assert book.may_send(MESSAGE)


@pytest.mark.parametrize("kind", [MESSAGE, *REPLIES])
def test_try_take_is_may_send_and_take(kind: PacketKind) -> None:
    windows = Windows(8, 4)
    one, other = (CreditBook(windows, windows, 100) for _ in range(2))
    for _ in range(10):
        may = other.may_send(kind)
        assert one.try_take(kind) is may
        if may:
            other.take(kind)
        for window in Window:
            assert one.available(window) == other.available(window)
    assert not one.may_send(kind)


@pytest.mark.parametrize("kind", REPLIES)
def test_replies_share_their_own_window(kind: PacketKind) -> None:
    book = CreditBook(Windows(1, 1), Windows(1, 1), 100)
    book.take(kind)
    assert not any(book.may_send(other) for other in REPLIES)
    assert book.may_send(MESSAGE)


def test_each_control_kind_has_one_slab() -> None:
    book = CreditBook(Windows(1, 1), Windows(1, 1), 100)
    kinds = (GRANT, PING, GOODBYE, GOODBYE_ACK)
    for left, kind in zip((5, 4, 3, 2), kinds, strict=True):
        assert book.available(Window.CONTROL) == left
        book.take(kind)
        assert not book.may_send(kind)
    assert book.may_send(MESSAGE)


@pytest.mark.parametrize(
    "returned", [Returned(credits=1), Returned(replies=1), Returned(reports=1), Returned(1, 1, 31)]
)
def test_more_returned_than_taken(returned: Returned) -> None:
    with pytest.raises(PeerProtocolError):
        CreditBook(Windows(), Windows(), 100).on_returned(returned)


def test_a_report_of_the_wrong_kind() -> None:
    book = CreditBook(Windows(), Windows(), 100)
    book.take(GRANT)
    with pytest.raises(PeerProtocolError, match="0x02"):
        book.on_returned(Returned(reports=2))


def test_a_ping_goes_again_only_after_its_pong() -> None:
    pair = Pair(Windows(1, 1))
    pair.send(PING)
    pair.b.take(RESPONSE)  # whatever carries the report early
    pair.a.on_returned(pair.b.stamp())
    assert pair.a.available(Window.CONTROL) == CONTROL_SLABS
    assert not pair.a.may_send(PING)
    pair.send(PONG, back=True)
    assert pair.a.may_send(PING)


def test_a_pong_goes_only_for_a_ping() -> None:
    pair = Pair(Windows(1, 1))
    assert not pair.b.may_send(PONG)
    for _ in range(3):
        pair.send(PING)
        assert pair.b.may_send(PONG)
        pair.send(PONG, back=True)
        assert not pair.b.may_send(PONG)


# --- as the receiver ---


def test_a_peer_without_credit_is_caught() -> None:
    book = CreditBook(Windows(2, 1), Windows(), 100)
    book.on_packet(MESSAGE, 1)
    book.on_packet(MESSAGE, 1)
    with pytest.raises(PeerProtocolError, match="a message without credit"):
        book.on_packet(MESSAGE, 1)
    book.on_packet(RESPONSE, 0)
    with pytest.raises(PeerProtocolError, match="a reply without credit"):
        book.on_packet(PacketKind.EVENT, 0)


def test_control_packets_that_break_the_rules() -> None:
    book = CreditBook(Windows(), Windows(), 100)
    book.on_packet(GRANT, 0)
    with pytest.raises(PeerProtocolError, match="before its slab was reported"):
        book.on_packet(GRANT, 0)
    with pytest.raises(PeerProtocolError, match="a pong without a ping"):
        book.on_packet(PONG, 0)
    book.on_packet(PING, 0)
    book.stamp()
    with pytest.raises(PeerProtocolError, match="before the last one was answered"):
        book.on_packet(PING, 0)


def test_a_stamp_returns_everything_once() -> None:
    book = CreditBook(Windows(4, 4), Windows(), 100)
    book.on_packet(MESSAGE, 10)
    book.on_packet(RESPONSE, 0)
    book.on_packet(RESPONSE, 0)
    book.on_packet(GOODBYE, 0)
    assert [book.owed(window) for window in Window] == [1, 2, 1]
    assert book.stamp() == Returned(1, 2, 8)
    assert [book.owed(window) for window in Window] == [0, 0, 0]
    assert book.stamp() is book.stamp()
    assert book.stamp() == Returned()


def test_at_the_bound_message_credit_is_withheld_and_nothing_else() -> None:
    book = CreditBook(Windows(4, 4), Windows(), 100)
    book.on_packet(MESSAGE, 99)
    assert not book.withholding
    book.on_packet(MESSAGE, 1)
    book.on_packet(RESPONSE, 0)
    book.on_packet(GRANT, 0)
    assert book.withholding
    assert book.stamp() == Returned(0, 1, 1)
    assert book.due(starving=True) is None
    book.on_consumed(1)
    assert not book.withholding
    assert book.due() is GRANT
    assert book.stamp() == Returned(2, 0, 0)


def test_consumed_more_than_arrived() -> None:
    book = CreditBook(Windows(), Windows(), 100)
    book.on_packet(MESSAGE, 5)
    book.on_consumed(5)
    with pytest.raises(InternalError):
        book.on_consumed(1)


def test_a_debt_over_255_takes_several_packets() -> None:
    book = CreditBook(Windows(600, 300), Windows(), 1 << 20)
    for _ in range(600):
        book.on_packet(MESSAGE, 0)
    for _ in range(300):
        book.on_packet(RESPONSE, 0)
    assert [book.stamp()[:2] for _ in range(4)] == [(255, 255), (255, 45), (90, 0), (0, 0)]


# --- what is due ---


@pytest.mark.parametrize(("messages", "batch"), [(1, 1), (4, 1), (5, 2), (64, 16), (1000, 16)])
def test_a_grant_is_due_at_a_batch_of_messages(messages: int, batch: int) -> None:
    book = CreditBook(Windows(messages, messages), Windows(), 100)
    for _ in range(batch - 1):
        book.on_packet(MESSAGE, 0)
    assert book.due() is None
    book.on_packet(MESSAGE, 0)
    assert book.due() is GRANT


@pytest.mark.parametrize(("replies", "batch"), [(1, 1), (2, 2), (4, 3), (16, 12)])
def test_a_grant_is_due_when_few_reply_credits_are_left(replies: int, batch: int) -> None:
    book = CreditBook(Windows(1, replies), Windows(), 100)
    for _ in range(batch - 1):
        book.on_packet(RESPONSE, 0)
    assert book.due() is None
    book.on_packet(RESPONSE, 0)
    assert book.due() is GRANT


def test_one_credit_is_due_for_who_starves() -> None:
    book = CreditBook(Windows(64, 16), Windows(), 100)
    assert book.due(starving=True) is None
    book.on_packet(RESPONSE, 0)
    assert book.due() is None
    assert book.due(starving=True) is GRANT


def test_reports_alone_are_never_due() -> None:
    book = CreditBook(Windows(1, 1), Windows(), 100)
    for kind in (GRANT, PING, GOODBYE):
        book.on_packet(kind, 0)
    assert book.due() is None
    assert book.due(starving=True) is None


def test_a_ping_carries_what_no_grant_can() -> None:
    pair = Pair(Windows(4, 1))
    for _ in range(4):  # all of them left before the first grant came
        pair.a.take(MESSAGE)
    for kind in (GRANT, PING):
        pair.b.on_packet(MESSAGE, 0)
        assert pair.b.due() is kind
        pair.send(kind, back=True)
    pair.b.on_packet(MESSAGE, 0)
    assert pair.b.due() is None  # both are out; the pong will report both
    pair.send(PONG)
    assert pair.b.due() is GRANT


def test_a_pong_frees_grant_and_ping_at_once() -> None:
    pair = Pair(Windows(1, 1))
    pair.send(GRANT)
    pair.send(PING)
    assert pair.send(PONG, back=True).reports == 0b11
    assert pair.a.may_send(GRANT)
    assert pair.a.may_send(PING)


# --- idle ---


def test_a_ping_brings_every_credit_home() -> None:
    pair = Pair(Windows(64, 16))
    for _ in range(3):
        pair.send(MESSAGE, 10)
        pair.send(RESPONSE, back=True)
        pair.send(MESSAGE, 10, back=True)
    pair.send(RESPONSE)
    pair.a.on_consumed(30)
    pair.b.on_consumed(30)
    assert not pair.a.idle
    pair.send(PING)
    pair.send(PONG, back=True)
    assert pair.a.idle
    assert pair.b.idle


def test_unconsumed_bytes_are_not_idle() -> None:
    book = CreditBook(Windows(), Windows(), 100)
    book.on_packet(MESSAGE, 7)
    assert (book.unconsumed_bytes, book.idle) == (7, False)
    book.on_consumed(7)
    assert book.idle


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["m", "r", "c", "d"])), max_size=80))
def test_credits_are_conserved(steps: list[tuple[bool, str]]) -> None:
    windows = Windows(6, 2)
    pair = Pair(windows, inbound_bytes_max=30)
    for back, step in steps:
        sender, other = (pair.b, pair.a) if back else (pair.a, pair.b)
        if step in "mr":
            kind = MESSAGE if step == "m" else RESPONSE
            if sender.may_send(kind):
                pair.send(kind, 10 if step == "m" else 0, back=back)
        elif step == "c" and sender.unconsumed_bytes:
            sender.on_consumed(10)
        elif step == "d" and (due := sender.due()) is not None:
            pair.send(due, back=back)
        for one, two in ((sender, other), (other, sender)):
            assert one.available(Window.MESSAGES) + two.owed(Window.MESSAGES) == windows.messages
            assert one.available(Window.REPLIES) + two.owed(Window.REPLIES) == windows.replies
            assert one.available(Window.CONTROL) + two.owed(Window.CONTROL) == CONTROL_SLABS
            assert one.unconsumed_bytes < 30 + 10 * windows.messages


# --- the ledger ---


def test_the_default_depth_holds_eleven_full_peers_and_two_smaller_ones() -> None:
    ledger = SlabLedger(1024)
    given = []
    while (windows := ledger.promise(Windows())) is not None:
        given.append((windows.messages, windows.replies))
    assert given == [(64, 16)] * 11 + [(32, 8), (16, 4)]
    assert ledger.free == 3


def test_windows_are_halved_down_to_one() -> None:
    ledger = SlabLedger(REFILL_MAX + 7)
    assert ledger.promise(Windows(64, 64)) == Windows(1, 1)
    assert ledger.free == 0
    assert ledger.promise(Windows(1, 1)) is None
    ledger.take_back(Windows(1, 1))
    assert ledger.promise(Windows(1, 1)) == Windows(1, 1)


def test_replies_never_fall_under_a_quarter() -> None:
    ledger = SlabLedger(REFILL_MAX + 30)
    assert ledger.promise(Windows(50, 13)) == Windows(12, 3)


@pytest.mark.parametrize("depth", [0, 1, REFILL_MAX, REFILL_MAX + 6])
def test_a_queue_too_small_for_anyone(depth: int) -> None:
    ledger = SlabLedger(depth)
    assert ledger.free == max(depth - REFILL_MAX, 0)
    assert ledger.promise(Windows(1, 1)) is None


def test_taken_back_twice() -> None:
    ledger = SlabLedger(1024)
    windows = ledger.promise(Windows())
    assert windows is not None
    ledger.take_back(windows)
    with pytest.raises(InternalError):
        ledger.take_back(windows)


@given(st.integers(32, 2000), st.lists(st.integers(1, 300), max_size=40))
def test_promises_never_exceed_the_depth(depth: int, wanted: list[int]) -> None:
    ledger = SlabLedger(depth)
    promised = []
    for messages in wanted:
        windows = ledger.promise(Windows(messages, -(-messages // 4)))
        if windows is not None:
            assert windows.messages <= messages
            promised.append(windows)
        assert sum(each.slabs for each in promised) + REFILL_MAX <= depth or not promised
    for windows in promised:
        ledger.take_back(windows)
    assert ledger.free == depth - REFILL_MAX
