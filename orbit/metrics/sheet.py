"""Samples, gathered into the families that prometheus_client prints."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client.core import Metric

from ..events import DURATION_BOUNDS_S
from .series import HELP, UNDESCRIBED

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\Z")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Sheet:
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


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """A key of `NodeStatistics.counters`."""
    match = _SERIES.match(text)
    if match is None:
        return re.sub(r"[^a-zA-Z0-9_:]", "_", text), {}
    return match[1], dict(_LABEL.findall(match[2] or ""))
