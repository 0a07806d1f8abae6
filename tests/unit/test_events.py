"""Events are counted under the seeds' series names, and a failing sink harms nobody."""

from __future__ import annotations

import pytest

from orbit import events
from orbit.events import Counters, Event, FellBack, LeaseEnded, PathDecided, Recorder, Side
from orbit.model import Handle, LeaseEnd, LeaseId, PathName, PathReason, SlotId, WorkerId

HANDLE = Handle(WorkerId(1), SlotId(1))


def test_counters_sum_over_the_labels_that_are_not_asked_for() -> None:
    counters = Counters()
    counters.add("x", path="rdma", reason="ok")
    counters.add("x", 2, path="tcp", reason="ok")
    counters.add("y", 5)
    assert counters.value("x") == 3
    assert counters.value("x", path="tcp") == 2
    assert counters.value("x", path="tcp", reason="budget") == 0
    assert counters.snapshot() == {
        'x{path="rdma",reason="ok"}': 1,
        'x{path="tcp",reason="ok"}': 2,
        "y": 5,
    }


def test_a_decision_counts_once_under_the_seeds_series() -> None:
    recorder = Recorder()
    recorder.record(PathDecided(Side.OWNER, PathName.TCP, PathReason.NO_OFFER))
    value = recorder.counters.value("orbit_rendezvous_rdma_path_total", path="tcp")
    assert value == 1


def test_reaped_leases_have_their_own_series() -> None:
    recorder = Recorder()
    for how in (LeaseEnd.REAPED, LeaseEnd.RELEASED):
        recorder.record(LeaseEnded(HANDLE, LeaseId(1), how))
    assert recorder.counters.value("orbit_rendezvous_rdma_leases_reaped_total") == 1
    assert recorder.counters.value(events.LEASES_ENDED_TOTAL) == 2


def test_the_sink_sees_every_event_and_cannot_break_the_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Event] = []

    def sink(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("exporter is down")

    recorder = Recorder(sink)
    event = FellBack(WorkerId(7), PathReason.GET_FAILED)
    recorder.record(event)
    assert seen == [event]
    assert recorder.counters.value(events.FALLBACKS_TOTAL, reason="get_failed") == 1
    assert "exporter is down" in caplog.text


def test_events_of_messaging_are_counted() -> None:
    recorder = Recorder()
    peer, tcp = WorkerId(7), PathName.TCP
    recorder.record(events.MessageLinkOpened(peer, tcp))
    recorder.record(events.MessageLinkClosed(peer, tcp, "reset"))
    recorder.record(events.MessageLinkClosed(peer, tcp, ""))
    recorder.record(events.TransportRefused(peer, PathName.RDMA, PathReason.NOT_READY))
    recorder.record(events.TransportChosen(peer, tcp, PathReason.NOT_READY))
    recorder.record(events.SendRejected(peer, "not_admitted"))
    assert recorder.counters.snapshot() == {
        'orbit_messenger_sends_failed_total{reason="not_admitted"}': 1,
        'orbit_transport_chosen_total{reason="not_ready",transport="tcp"}': 1,
        'orbit_transport_links_closed_total{how="agreed",transport="tcp"}': 1,
        'orbit_transport_links_closed_total{how="lost",transport="tcp"}': 1,
        'orbit_transport_links_opened_total{transport="tcp"}': 1,
        'orbit_transport_refused_total{reason="not_ready",transport="rdma"}': 1,
    }
