"""A node's statistics as samples."""

from __future__ import annotations

from collections.abc import Sequence

from ..node import NodeStatistics
from ..runtime.messaging.dispatch import HandlerStatistics
from ..runtime.retained import Retained
from .series import HELP
from .sheet import Sheet, parsed


def fill_node(sheet: Sheet, statistics: NodeStatistics) -> None:
    for text, count in statistics.counters.items():
        name, labels = parsed(text)
        sheet.add(name, count, **labels)
    slots = statistics.slots
    sheet.add("orbit_rendezvous_active_slots", slots.slots)
    sheet.add("orbit_rendezvous_leases_held", slots.leases_held)
    sheet.add("orbit_rendezvous_leases_held_here", statistics.leases_held)
    sheet.add("orbit_rendezvous_leases_unquiesced", slots.leases_unquiesced)
    sheet.add("orbit_rendezvous_leases_armed", slots.leases_armed)
    for path, count in slots.leases_by_path.items():
        sheet.add("orbit_rendezvous_leases", count, path=path.value)
    sheet.add("orbit_rendezvous_staged_bytes", slots.staged_bytes)
    sheet.add("orbit_rendezvous_leased_bytes", slots.leased_bytes)
    sheet.add("orbit_rendezvous_slots_expired_total", slots.slots_expired)
    gets = statistics.rdma_get_seconds
    sheet.add_histogram("orbit_rendezvous_rdma_get_duration_seconds", gets.buckets, gets.seconds)
    fill_retained(sheet, "orbit_memory", statistics.retained)
    sheet.add("orbit_sessions", statistics.sessions)
    sheet.add("orbit_tasks", statistics.tasks)
    _fill_memory(sheet, statistics)
    _fill_rdma(sheet, statistics)
    _fill_links(sheet, statistics)
    _fill_messenger(sheet, statistics)
    _fill_streams(sheet, statistics)
    for handler in statistics.dispatch.handlers:
        _fill_handler(sheet, handler)


def fill_retained(sheet: Sheet, prefix: str, retained: Sequence[Retained]) -> None:
    """How many pieces, their bytes, and the age of the oldest."""
    sheet.add(f"{prefix}_retained", len(retained))
    sheet.add(f"{prefix}_retained_bytes", sum(entry.nbytes for entry in retained))
    oldest_s = max((entry.age_s for entry in retained), default=0.0)
    sheet.add(f"{prefix}_retained_age_seconds", oldest_s)


def _fill_memory(sheet: Sheet, statistics: NodeStatistics) -> None:
    memory = statistics.memory
    sheet.add("orbit_rdma_registered_bytes", statistics.registered_bytes)
    sheet.add("orbit_rdma_registered_bytes_budget", memory.budget_bytes)
    for kind, count in memory.registrations.items():
        sheet.add("orbit_rdma_registrations_total", count, kind=kind)
    sheet.add("orbit_rdma_live_regions", memory.regions)
    sheet.add("orbit_rdma_arenas", memory.arenas)
    sheet.add("orbit_rdma_arena_bytes", memory.arena_bytes)
    used = memory.arena_bytes_used / memory.arena_bytes if memory.arena_bytes else 0.0
    sheet.add("orbit_rdma_arena_utilization", used)


def _fill_rdma(sheet: Sheet, statistics: NodeStatistics) -> None:
    rdma = statistics.rdma
    if rdma is None:
        return
    for name, count in rdma.counts.items():
        sheet.add(f"orbit_rdma_{name}_total", count)
    sheet.add("orbit_rdma_bind_seconds_total", rdma.bind_s)
    sheet.add("orbit_rdma_receipt_seconds_total", rdma.receipt_s)
    sheet.add("orbit_rdma_grants_active", rdma.grants_active)
    sheet.add("orbit_rdma_grant_age_seconds", rdma.grant_age_s)
    sheet.add("orbit_rdma_queue_pairs", rdma.queue_pairs)
    sheet.add("orbit_rdma_windows_parked", rdma.windows_parked)
    sheet.add("orbit_rdma_window_keys_used", rdma.window_keys_used)
    sheet.add("orbit_rdma_window_keys_remaining", rdma.window_keys_remaining)
    sheet.add("orbit_rdma_unknown_completions_total", rdma.unknown_completions)
    for device, (left, limit) in rdma.device_window_keys.items():
        sheet.add("orbit_rdma_device_window_keys_remaining", left, device=device)
        sheet.add("orbit_rdma_device_window_keys_limit", limit, device=device)
    sheet.add("orbit_rdma_crossings_total", rdma.crossings)
    sheet.add("orbit_rdma_retained_bytes", rdma.retained_bytes)


def _fill_links(sheet: Sheet, statistics: NodeStatistics) -> None:
    messaging = statistics.messaging
    for carried in messaging.traffic:
        transport = carried.transport.value
        for direction, frames, nbytes, packets in (
            ("out", carried.frames_sent, carried.bytes_sent, carried.packets_sent),
            ("in", carried.frames_received, carried.bytes_received, carried.packets_received),
        ):
            labels = {"transport": transport, "direction": direction}
            sheet.add("orbit_transport_frames_total", frames, **labels)
            sheet.add("orbit_transport_frame_bytes_total", nbytes, **labels)
            sheet.add("orbit_transport_packets_total", packets, **labels)
        segmented, stalls = carried.segmented_sent, carried.credit_stalls
        sheet.add("orbit_transport_segmented_frames_total", segmented, transport=transport)
        sheet.add("orbit_transport_grants_total", carried.grants_sent, transport=transport)
        sheet.add("orbit_transport_credit_stalls_total", stalls, transport=transport)
    for name, count in messaging.devices.items():
        gauge = f"orbit_rdma_messages_{name}"
        sheet.add(gauge if gauge in HELP else f"{gauge}_total", count)
    for transport in sorted({link.transport.value for link in messaging.links}):
        counts = [link.counts for link in messaging.links if link.transport.value == transport]
        for series, value in (
            ("orbit_transport_active_connections", len(counts)),
            ("orbit_transport_credits", sum(c.credits for c in counts)),
            ("orbit_transport_queued_frames", sum(c.queued_frames for c in counts)),
            ("orbit_transport_queued_bytes", sum(c.queued_bytes for c in counts)),
            ("orbit_transport_unconsumed_bytes", sum(c.unconsumed_bytes for c in counts)),
        ):
            sheet.add(series, value, transport=transport)


def _fill_messenger(sheet: Sheet, statistics: NodeStatistics) -> None:
    messaging, dispatch = statistics.messaging, statistics.dispatch
    sheet.add("orbit_transport_registered_peers", messaging.peers)
    sheet.add("orbit_messenger_pending_responses", messaging.pending_calls)
    sheet.add("orbit_messenger_queued_frames", messaging.queued_frames)
    sheet.add("orbit_messenger_queued_bytes", messaging.queued_bytes)
    sheet.add("orbit_messenger_waiting_sends", messaging.waiting_sends)
    sheet.add("orbit_messenger_payloads_waiting", messaging.staged_payloads)
    sheet.add("orbit_messenger_draining", int(dispatch.draining))
    sheet.add("orbit_messenger_guards", dispatch.guards)
    sheet.add("orbit_messenger_turned_away_total", dispatch.turned_away)
    sheet.add("orbit_messenger_dropped_total", dispatch.dropped)


def _fill_streams(sheet: Sheet, statistics: NodeStatistics) -> None:
    streams = statistics.streams
    sheet.add("orbit_streaming_active_anchors", streams.inboxes)
    sheet.add("orbit_streaming_active_senders", streams.senders)
    sheet.add("orbit_streaming_buffered_items", streams.buffered_items)
    sheet.add("orbit_streaming_buffered_bytes", streams.buffered_bytes)
    sheet.add("orbit_streaming_promised_bytes", streams.promised_bytes)
    sheet.add("orbit_streaming_waiting_sends", streams.waiting_sends)


def _fill_handler(sheet: Sheet, handler: HandlerStatistics) -> None:
    lanes = handler.lanes
    prefix = "orbit_messenger_"
    for series, value in (
        ("handler_requests_total", handler.requests),
        ("handler_failures_total", handler.failures),
        ("handler_rejected_total", handler.rejected),
        ("handler_in_flight", handler.in_flight),
        ("handler_request_bytes_total", handler.request_bytes),
        ("handler_response_bytes_total", handler.response_bytes),
        ("ordered_lanes", lanes.lanes),
        ("ordered_lane_depth", lanes.depth),
        ("ordered_lane_wait_seconds_total", lanes.wait_seconds),
        ("ordered_lanes_created_total", lanes.created),
        ("ordered_lanes_reaped_total", lanes.reaped),
    ):
        sheet.add(prefix + series, value, handler=handler.name, mode=handler.mode)
    sheet.add_histogram(
        prefix + "handler_duration_seconds",
        handler.buckets,
        handler.seconds,
        handler=handler.name,
        mode=handler.mode,
    )
