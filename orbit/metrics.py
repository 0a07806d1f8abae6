"""A node's counts and gauges for Prometheus, its engine's beside them, and the one door to
prometheus_client.

Everything is read from `statistics` when it is asked for; nothing is kept here and nothing costs
anything between two scrapes. What each series means stands in one table; a count that is not
in it is exported all the same.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol
from wsgiref.simple_server import WSGIServer

try:
    import prometheus_client
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("orbit.metrics needs prometheus_client: install orbit[metrics]") from error

from .errors import ClosedError, DeadlineExceeded
from .events import DURATION_BOUNDS_S
from .node import NodeStatistics
from .runtime.engine.core import EngineStatistics
from .runtime.messaging.dispatch import HandlerStatistics
from .runtime.retained import Retained

COLLECT_TIMEOUT_S: Final = 5.0  # for the node's event loop to answer a scrape
UNDESCRIBED: Final = "Not described."

# Series -> its help text. Counters end in _total, histograms in _seconds without it.
HELP: Final[dict[str, str]] = {
    # rendezvous
    "orbit_rendezvous_rdma_path_total": "Routing decisions, by side, path and reason.",
    "orbit_rendezvous_rdma_leases_reaped_total": "Leases that ended because nobody renewed them.",
    "orbit_rendezvous_leases_ended_total": "Leases that ended at this owner, by how.",
    "orbit_rendezvous_fallbacks_total": "Fetches that gave up the RDMA path for TCP, by reason.",
    "orbit_rendezvous_fetched_bytes_total": "Payload bytes fetched, by path.",
    "orbit_rendezvous_active_slots": "Slots whose memory is not free.",
    "orbit_rendezvous_leases_held": "Leases that consumers hold on this owner's slots.",
    "orbit_rendezvous_leases_held_here": "Leases that this node holds as a consumer.",
    "orbit_rendezvous_leases_unquiesced": "Leases whose end of access could not be proven.",
    "orbit_rendezvous_rdma_get_duration_seconds": "READs of whole payloads, without the acquire.",
    "orbit_rendezvous_leases": "Leases that consumers hold on this owner's slots, by path.",
    "orbit_rendezvous_leases_armed": "Of these, those with a deadline.",
    "orbit_rendezvous_staged_bytes": "Payload bytes of slots whose memory is not free.",
    "orbit_rendezvous_leased_bytes": "Of these, those that a lease may reach.",
    "orbit_rendezvous_slots_expired_total": "Slots that went by their time to live.",
    # registered memory
    "orbit_rdma_registered_bytes": "Bytes that are registered, arenas and regions, by whole pages.",
    "orbit_rdma_registered_bytes_budget": "What may be registered: rdma.pool's knob of that name.",
    "orbit_rdma_registrations_total": "Registrations, by kind: arena or external.",
    "orbit_rdma_live_regions": "Regions of callers that are registered.",
    "orbit_rdma_arenas": "Arenas that are mapped.",
    "orbit_rdma_arena_bytes": "Their bytes.",
    "orbit_rdma_arena_utilization": "The part of them that is in use, 0 to 1.",
    "orbit_memory_retained_bytes": "Bytes kept for want of a proof that nothing uses them.",
    "orbit_retained_bytes_total": "Bytes that this node could not give back, ever.",
    # the RDMA path
    "orbit_rdma_grants_total": "Grants that consumers asked this owner for.",
    "orbit_rdma_grants_active": "Grants of this owner that have not ended.",
    "orbit_rdma_binds_total": "Binds of memory windows that were posted.",
    "orbit_rdma_binds_completed_total": "Those that completed.",
    "orbit_rdma_bind_seconds_total": "Time from the post of a bind to its completion.",
    "orbit_rdma_receipts_total": "Receipts of consumers that this owner got.",
    "orbit_rdma_receipts_sent_total": "Receipts that this consumer sent.",
    "orbit_rdma_receipt_seconds_total": "Time from a last byte to its receipt's completion.",
    "orbit_rdma_aborts_total": "Bulk queue pairs that were killed, on either side.",
    "orbit_rdma_connects_total": "Bulk queue pairs that were connected.",
    "orbit_rdma_connect_failures_total": "Bulk queue pairs that could not be connected.",
    "orbit_rdma_queue_pairs": "Bulk and message queue pairs that exist.",
    "orbit_rdma_windows_parked": "Windows that wait to be bound.",
    "orbit_rdma_key_rollovers_total": "Fresh protection domains, opened as window keys ran out.",
    "orbit_rdma_key_rollovers_failed_total": "Those that could not be opened or filled.",
    "orbit_rdma_window_keys_used": "Window keys that were used up.",
    "orbit_rdma_window_keys_remaining": "Window keys that the scarcest device has left.",
    "orbit_rdma_pulls_total": "Transfers into this consumer by READ.",
    "orbit_rdma_pulls_failed_total": "Those that failed.",
    "orbit_rdma_pushes_total": "Transfers from this consumer by WRITE.",
    "orbit_rdma_pushes_failed_total": "Those that failed.",
    "orbit_rdma_reads_total": "READs that were posted.",
    "orbit_rdma_read_bytes_total": "Their bytes.",
    "orbit_rdma_writes_total": "WRITEs that were posted.",
    "orbit_rdma_written_bytes_total": "Their bytes.",
    "orbit_rdma_targets_direct_total": "Pieces of transfers that were registered already.",
    "orbit_rdma_targets_registered_total": "Pieces that were registered for one transfer.",
    "orbit_rdma_targets_copied_total": "Pieces that went through the pool, with one copy.",
    "orbit_rdma_unknown_completions_total": "Late or doubled completions of bulk queue pairs.",
    "orbit_rdma_crossings_total": "Calls into the helper.",
    "orbit_rdma_retained_bytes": "Bytes that no device has let go of provably.",
    # the transfer engine
    "orbit_engine_regions": "Regions of an engine that are not released.",
    "orbit_engine_requests_running": "Requests of an engine that are not over.",
    "orbit_engine_requests_total": "Requests that are over, by how they ended.",
    "orbit_engine_moved_bytes_total": "Bytes of requests that succeeded.",
    "orbit_engine_in_flight_bytes": "Bytes that are charged to rails.",
    "orbit_engine_budget_in_use": "What is in use of each budget.",
    "orbit_engine_budget_limit": "What there is of each budget.",
    "orbit_engine_budget_waiting": "Requests that wait for each budget.",
    "orbit_engine_retained": "Pieces of memory kept for want of a proof since an engine opened.",
    "orbit_engine_retained_bytes": "Their bytes.",
    "orbit_engine_retained_age_seconds": "Since when the oldest of them is kept; 0 for none.",
    "orbit_engine_rail_active": "1 for a rail that carries transfers, 0 for a paused one.",
    "orbit_engine_rails_in_use": "What all rails use of each resource that they share.",
    "orbit_engine_rails_limit": "What there is of each of these resources.",
    "orbit_engine_monitor_ticks_total": "Times that the monitor looked at the rails.",
    "orbit_engine_route_queries_total": "Questions about ports that it asked devices.",
    "orbit_engine_route_recoveries_total": "Rails that serve again, or at last.",
    "orbit_engine_progress_recoveries_total": "Completion queues that were replaced.",
    # connections
    "orbit_sessions_opened_total": "Connections with peers that were opened, by direction.",
    "orbit_sessions_closed_total": "Connections with peers that ended, by direction.",
    "orbit_sessions": "Open connections with peers.",
    "orbit_tasks": "Background tasks of this node.",
    # message links
    "orbit_transport_links_opened_total": "Message links that were opened, by transport.",
    "orbit_transport_links_closed_total": "Message links that ended, by transport and how.",
    "orbit_transport_chosen_total": "What an epoch's messages go by, with the reason.",
    "orbit_transport_refused_total": "Transports that could not carry an epoch's messages.",
    "orbit_transport_rejections_total": "Received frames that were refused, by reason.",
    "orbit_transport_send_backpressure_total": "Sends that met a full queue.",
    "orbit_transport_idle_closes_total": "Goodbyes to peers of idle links, by outcome.",
    "orbit_transport_active_connections": "Open message links, by transport.",
    "orbit_transport_registered_peers": "Peers that something was sent to.",
    "orbit_transport_frames_total": "Frames, by transport and direction.",
    "orbit_transport_frame_bytes_total": "Bytes of frames, by transport and direction.",
    "orbit_transport_packets_total": "Packets, by transport and direction.",
    "orbit_transport_segmented_frames_total": "Sent frames that took several packets.",
    "orbit_transport_grants_total": "Packets that were sent only to return credit.",
    "orbit_transport_credit_stalls_total": "Times that a frame had to wait for credit.",
    "orbit_transport_credits": "Message credits at hand, over all links of a transport.",
    "orbit_transport_queued_frames": "Frames in the queues of links.",
    "orbit_transport_queued_bytes": "Bytes in the queues of links.",
    "orbit_transport_unconsumed_bytes": "Received bytes that no handler has finished.",
    # the devices of RDMA messages
    "orbit_rdma_messages_opened_total": "RC message links that became ready.",
    "orbit_rdma_messages_not_ready_total": "RC links that nothing crossed in time.",
    "orbit_rdma_messages_refused_total": "RC message links that could not be connected.",
    "orbit_rdma_messages_lost_total": "RC message links that ended by an error.",
    "orbit_rdma_messages_links": "Message queue pairs that exist.",
    "orbit_rdma_messages_completions_total": "Completions of message queue pairs.",
    "orbit_rdma_messages_passes_total": "Passes over message completion queues.",
    "orbit_rdma_messages_unknown_completions_total": "Late or doubled completions.",
    "orbit_rdma_messages_orphans_total": "Packets of queue pairs that were gone.",
    "orbit_rdma_messages_woken_by_backstop_total": "Passes that no event announced.",
    "orbit_rdma_messages_receives_posted_total": "Receives that were posted.",
    "orbit_rdma_messages_refills_total": "Batches of receives that were posted.",
    "orbit_rdma_messages_limit_hits_total": "Times that a receive queue reached its low mark.",
    "orbit_rdma_messages_receive_slabs_free": "Receive slabs not promised to any peer.",
    "orbit_rdma_messages_send_slabs_free": "Send slabs that are free.",
    "orbit_rdma_messages_registered_bytes": "Registered bytes of slabs.",
    # messenger
    "orbit_messenger_pending_responses": "Calls that wait for their answer.",
    "orbit_messenger_queued_frames": "Admitted sends that are not on the wire yet.",
    "orbit_messenger_queued_bytes": "Their bytes.",
    "orbit_messenger_waiting_sends": "Sends in line for admission.",
    "orbit_messenger_payloads_waiting": "Large payloads that peers have yet to fetch.",
    "orbit_messenger_sends_failed_total": "Sends that failed, by the code of their error.",
    "orbit_messenger_late_replies_total": "Answers to calls that had ended.",
    "orbit_messenger_replies_dropped_total": "Answers whose link had closed.",
    "orbit_messenger_response_slot_exhausted_total": "Calls refused: too many were outstanding.",
    "orbit_messenger_staged_payloads_total": "Payloads that were staged to go by rendezvous.",
    "orbit_messenger_staged_fetch_timeouts_total": "Fetches of them given up, by whose bound.",
    "orbit_messenger_staged_refusals_total": "Staged payloads this node had no room for.",
    "orbit_messenger_dispatch_failures_total": "Requests no handler answered well, by reason.",
    "orbit_messenger_handler_requests_total": "Requests taken on, by handler and mode.",
    "orbit_messenger_handler_failures_total": "Runs of a handler that raised.",
    "orbit_messenger_handler_rejected_total": "Requests refused because a lane was full.",
    "orbit_messenger_handler_in_flight": "Requests queued or running, by handler.",
    "orbit_messenger_handler_request_bytes_total": "Payload bytes of requests, by handler.",
    "orbit_messenger_handler_response_bytes_total": "Payload bytes of responses, by handler.",
    "orbit_messenger_handler_duration_seconds": "How long handlers ran.",
    "orbit_messenger_ordered_lanes": "Lanes, by handler.",
    "orbit_messenger_ordered_lane_depth": "Requests in lanes, by handler.",
    "orbit_messenger_ordered_lane_wait_seconds_total": "Time that requests spent in lanes' queues.",
    "orbit_messenger_ordered_lanes_created_total": "Lanes that were made.",
    "orbit_messenger_ordered_lanes_reaped_total": "Lanes that were forgotten as idle.",
    "orbit_messenger_draining": "1 while this node takes no new requests.",
    "orbit_messenger_guards": "Requests taken on and not answered.",
    "orbit_messenger_turned_away_total": "Requests that arrived while draining.",
    "orbit_messenger_dropped_total": "Requests that a shutdown gave up.",
    # streams
    "orbit_streaming_active_anchors": "Streams that this node receives.",
    "orbit_streaming_active_senders": "Streams that this node feeds.",
    "orbit_streaming_buffered_items": "Items that nobody has read yet.",
    "orbit_streaming_buffered_bytes": "Their bytes.",
    "orbit_streaming_promised_bytes": "Room that producers of this node's streams may fill.",
    "orbit_streaming_waiting_sends": "Items that wait for room at their receivers.",
    "orbit_streaming_attaches_total": "Attempts to attach to a stream, by outcome.",
    "orbit_streaming_ends_total": "Streams that ended, by side and kind.",
    "orbit_streaming_backpressure_total": "Stream sends that had to wait for credit.",
    "orbit_streaming_stray_notes_total": "Frames of streams that are not there any more.",
}

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\Z")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Reporting(Protocol):
    """orbit.Node and orbit.sync.Node."""

    def statistics(self) -> NodeStatistics: ...


class EngineReporting(Protocol):
    """orbit.TransferEngine and orbit.sync.TransferEngine, once open."""

    def statistics(self) -> EngineStatistics: ...

    def retained(self) -> tuple[Retained, ...]: ...


@dataclass(frozen=True, slots=True)
class _Report:
    """What one scrape is made of, read in one step."""

    node: NodeStatistics
    engine: EngineStatistics | None
    retained: tuple[Retained, ...]  # the engine's


class Exporter(Collector):
    """One node's series, and those of the engine on it. For an orbit.Node it must be made on the
    node's event loop: scrapes come from other threads, and the loop answers them.
    """

    def __init__(self, node: Reporting, *, engine: EngineReporting | None = None) -> None:
        self._node = node
        self._engine = engine
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._thread = threading.get_ident()

    def register(self, registry: CollectorRegistry | None = None) -> Exporter:
        """With `registry`, or the default one. Returns itself."""
        (prometheus_client.REGISTRY if registry is None else registry).register(self)
        return self

    def unregister(self, registry: CollectorRegistry | None = None) -> None:
        (prometheus_client.REGISTRY if registry is None else registry).unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of a scrape: registering must not wait for the loop."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets. Raises DeadlineExceeded when the node's loop does not answer, and
        ClosedError when it is gone.
        """
        sheet = _Sheet()
        report = self._report()
        _fill(sheet, report.node)
        if report.engine is not None:
            _fill_engine(sheet, report.engine, report.retained)
        yield from sheet.families()

    def _report(self) -> _Report:
        if self._loop is None or threading.get_ident() == self._thread:
            return self._read()
        answer: concurrent.futures.Future[_Report] = concurrent.futures.Future()

        def ask() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(self._read())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(ask)
        except RuntimeError as error:
            raise ClosedError("the node's event loop") from error
        if not concurrent.futures.wait((answer,), COLLECT_TIMEOUT_S).done:
            answer.cancel()
            raise DeadlineExceeded("a scrape of the node", COLLECT_TIMEOUT_S)
        return answer.result()

    def _read(self) -> _Report:
        node, engine = self._node.statistics(), self._engine
        if engine is None:
            return _Report(node, None, ())
        return _Report(node, engine.statistics(), engine.retained())


class MetricsServer:
    """Serves one node's series over HTTP until `close`."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


def start_http_server(
    node: Reporting,
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    engine: EngineReporting | None = None,
) -> MetricsServer:
    """Serve the series of this node and of the engine on it alone, at http://host:port/metrics,
    from a thread. Port 0: a free one. It listens on loopback unless told otherwise: the series name
    peers' behaviour.
    """
    registry = CollectorRegistry()
    Exporter(node, engine=engine).register(registry)
    server, thread = prometheus_client.start_http_server(port, host, registry)
    return MetricsServer(server, thread)


class _Sheet:
    """Samples, gathered into families."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, series: str, value: float, **labels: str) -> None:
        """A counter when `series` ends in _total, else a gauge."""
        kind, name = ("counter", series[:-6]) if series.endswith("_total") else ("gauge", series)
        self._family(series, name, kind).add_sample(series, labels, value)

    def add_histogram(
        self, series: str, buckets: Iterable[int], total: float, **labels: str
    ) -> None:
        """Counts between DURATION_BOUNDS_S, the last one above them all."""
        family = self._family(series, series, "histogram")
        count = 0
        for bound, inside in zip((*DURATION_BOUNDS_S, float("inf")), buckets, strict=True):
            count += inside
            text = "+Inf" if bound == float("inf") else str(bound)
            family.add_sample(f"{series}_bucket", {**labels, "le": text}, count)
        family.add_sample(f"{series}_count", labels, count)
        family.add_sample(f"{series}_sum", labels, total)

    def families(self) -> Iterable[Metric]:
        return self._families.values()

    def _family(self, series: str, name: str, kind: str) -> Metric:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Metric(name, HELP.get(series, UNDESCRIBED), kind)
        return family


def _fill(sheet: _Sheet, statistics: NodeStatistics) -> None:
    for text, count in statistics.counters.items():
        name, labels = _parsed(text)
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
    sheet.add("orbit_memory_retained_bytes", sum(entry.nbytes for entry in statistics.retained))
    sheet.add("orbit_sessions", statistics.sessions)
    sheet.add("orbit_tasks", statistics.tasks)
    _fill_memory(sheet, statistics)
    _fill_rdma(sheet, statistics)
    _fill_links(sheet, statistics)
    _fill_messenger(sheet, statistics)
    _fill_streams(sheet, statistics)
    for handler in statistics.dispatch.handlers:
        _fill_handler(sheet, handler)


def _fill_memory(sheet: _Sheet, statistics: NodeStatistics) -> None:
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


def _fill_rdma(sheet: _Sheet, statistics: NodeStatistics) -> None:
    rdma = statistics.rdma
    if rdma is None:
        return
    for name, count in rdma.counts.items():
        sheet.add(f"orbit_rdma_{name}_total", count)
    sheet.add("orbit_rdma_bind_seconds_total", rdma.bind_s)
    sheet.add("orbit_rdma_receipt_seconds_total", rdma.receipt_s)
    sheet.add("orbit_rdma_grants_active", rdma.grants_active)
    sheet.add("orbit_rdma_queue_pairs", rdma.queue_pairs)
    sheet.add("orbit_rdma_windows_parked", rdma.windows_parked)
    sheet.add("orbit_rdma_window_keys_used", rdma.window_keys_used)
    sheet.add("orbit_rdma_window_keys_remaining", rdma.window_keys_remaining)
    sheet.add("orbit_rdma_unknown_completions_total", rdma.unknown_completions)
    sheet.add("orbit_rdma_crossings_total", rdma.crossings)
    sheet.add("orbit_rdma_retained_bytes", rdma.retained_bytes)


def _fill_engine(
    sheet: _Sheet, statistics: EngineStatistics, retained: tuple[Retained, ...]
) -> None:
    sheet.add("orbit_engine_regions", statistics.regions)
    sheet.add("orbit_engine_requests_running", statistics.running)
    for state, count in statistics.outcomes.items():
        sheet.add("orbit_engine_requests_total", count, state=state)
    sheet.add("orbit_engine_moved_bytes_total", statistics.bytes_moved)
    sheet.add("orbit_engine_in_flight_bytes", statistics.in_flight_bytes)
    for name, (used, limit) in statistics.budgets.items():
        sheet.add("orbit_engine_budget_in_use", used, budget=name)
        sheet.add("orbit_engine_budget_limit", limit, budget=name)
    for name, count in statistics.waiting.items():
        sheet.add("orbit_engine_budget_waiting", count, budget=name)
    sheet.add("orbit_engine_retained", len(retained))
    sheet.add("orbit_engine_retained_bytes", sum(entry.nbytes for entry in retained))
    oldest_s = max((entry.age_s for entry in retained), default=0.0)
    sheet.add("orbit_engine_retained_age_seconds", oldest_s)
    _fill_rails(sheet, statistics)


def _fill_rails(sheet: _Sheet, statistics: EngineStatistics) -> None:
    rails = statistics.rails
    if rails is None:
        return
    for rail in rails.rails:
        labels = {"device": rail.device, "port": str(rail.port), "nic": str(rail.nic)}
        sheet.add("orbit_engine_rail_active", int(rail.active), **labels)
    for resource, (used, limit) in rails.budgets.items():
        sheet.add("orbit_engine_rails_in_use", used, resource=resource)
        sheet.add("orbit_engine_rails_limit", limit, resource=resource)
    sheet.add("orbit_engine_monitor_ticks_total", rails.monitor_ticks)
    sheet.add("orbit_engine_route_queries_total", rails.route_queries)
    sheet.add("orbit_engine_route_recoveries_total", rails.route_recoveries)
    sheet.add("orbit_engine_progress_recoveries_total", rails.progress_recoveries)


def _fill_links(sheet: _Sheet, statistics: NodeStatistics) -> None:
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


def _fill_messenger(sheet: _Sheet, statistics: NodeStatistics) -> None:
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


def _fill_streams(sheet: _Sheet, statistics: NodeStatistics) -> None:
    streams = statistics.streams
    sheet.add("orbit_streaming_active_anchors", streams.inboxes)
    sheet.add("orbit_streaming_active_senders", streams.senders)
    sheet.add("orbit_streaming_buffered_items", streams.buffered_items)
    sheet.add("orbit_streaming_buffered_bytes", streams.buffered_bytes)
    sheet.add("orbit_streaming_promised_bytes", streams.promised_bytes)
    sheet.add("orbit_streaming_waiting_sends", streams.waiting_sends)


def _fill_handler(sheet: _Sheet, handler: HandlerStatistics) -> None:
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


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    """A key of `NodeStatistics.counters`."""
    match = _SERIES.match(text)
    if match is None:
        return re.sub(r"[^a-zA-Z0-9_:]", "_", text), {}
    return match[1], dict(_LABEL.findall(match[2] or ""))
