"""One node, and the engine on it, as a collector of prometheus_client.

Everything is read from `statistics` when it is asked for; nothing is kept here and nothing costs
anything between two scrapes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Final, Protocol

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..errors import ClosedError, DeadlineExceeded
from ..model import PeerIdentity
from ..node import NodeStatistics
from ..runtime.engine.core import EngineStatistics
from ..runtime.retained import Retained
from .engine_series import fill_engine
from .node_series import fill_node
from .sheet import Sheet

COLLECT_TIMEOUT_S: Final = 5.0  # for the node's event loop to answer a scrape


class Reporting(Protocol):
    """orbit.Node and orbit.sync.Node."""

    @property
    def identity(self) -> PeerIdentity: ...

    def statistics(self) -> NodeStatistics: ...


class EngineReporting(Protocol):
    """orbit.TransferEngine and orbit.sync.TransferEngine, once open."""

    def statistics(self) -> EngineStatistics: ...

    def retained(self) -> tuple[Retained, ...]: ...


@dataclass(frozen=True, slots=True)
class _Report:
    """What one scrape is made of, read in one step."""

    who: str
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
        sheet = Sheet()
        report = self._report()
        reason = report.node.rdma_reason.value
        sheet.add("orbit_node_info", 1, node=report.who, version=_version(), rdma=reason)
        fill_node(sheet, report.node)
        if report.engine is not None:
            fill_engine(sheet, report.engine, report.retained)
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
        who = f"{self._node.identity.worker_id:016x}"
        node, engine = self._node.statistics(), self._engine
        if engine is not None:
            with contextlib.suppress(ClosedError):  # it ends before its node, which says how it is
                return _Report(who, node, engine.statistics(), engine.retained())
        return _Report(who, node, None, ())


@cache
def _version() -> str:
    try:
        return metadata.version("orbit")
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
