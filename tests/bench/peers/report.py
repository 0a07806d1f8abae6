"""The Markdown of one run: its tables, and what they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import neighbours  # noqa: F401
from contenders import ORBIT, OURS
from ends import size_name
from tables import Found, ahead_table, cost_table, rate_table


class Report:
    def __init__(
        self,
        found: Found,
        names: Mapping[str, str],
        limit: str,
        sizes: Sequence[int],
        about: dict[str, Any],
    ) -> None:
        measured = found.names()
        self.found, self.limit, self.sizes, self.about = found, limit, sizes, about
        self.names = {name: means for name, means in names.items() if name in measured}

    def lines(self) -> list[str]:
        return [
            *self.head(),
            *rate_table(self.found, self.names, self.limit, self.sizes),
            *self.ahead(),
            *self.costs(),
            *self.outcomes("Left out", self.found.failed),
            *self.outcomes("Asked for RDMA where there is no device", self.found.without),
        ]

    def head(self) -> list[str]:
        about = self.about
        versions = ", ".join(f"{who} {version}" for who, version in about["versions"].items())
        where = "one end on each of two processors"
        if about["network"] == "rdma":
            where = "two hosts of the SoftRoCE lab, one boot"
        elif about["placement"] == "same":
            where = "both ends on one processor"
        elif about["placement"] == "free":
            where = "ends wherever the kernel puts them"
        return [
            f"{about['network'].upper()}, {where}; {about['repeats']} interleaved repetitions, "
            f"seed {about['seed']}; median (lowest to highest). {about['processors']} processors "
            f"({about['processor']}), Linux {about['kernel']}, load before {about['load']}, "
            f"revision {about['revision']}.",
            "",
            f"Versions: {versions}.",
            "",
            f"Pulls, as a ratio to {self.limit} (more is faster)",
            "",
        ]

    def ahead(self) -> list[str]:
        lines = []
        others = [name for name in self.names if not name.startswith(OURS)]
        for one in ORBIT:
            if one.name not in self.names:
                continue
            sizes = [size for size in self.sizes if size <= one.largest]
            for whole in (False, True):
                if whole and not any(s.release_s for s in self.found.samples if s.who == one.name):
                    continue
                lease = ", the lease given back" if whole else ""
                lines += ["", f"{one.name}{lease}: times as fast as", ""]
                lines += ahead_table(self.found, one.name, others, sizes, whole=whole)
        return lines

    def costs(self) -> list[str]:
        chosen = [size for size in (1 << 20, 1 << 30) if size in self.sizes] or [self.sizes[-1]]
        title = (
            "CPU and idle cores of consumer + owner; "
            f"the consumer's memory at {size_name(max(self.sizes))}"
        )
        return ["", title, "", *cost_table(self.found, self.names, chosen)]

    @staticmethod
    def outcomes(title: str, told: dict[str, str]) -> list[str]:
        if not told:
            return []
        return ["", f"{title}", "", *(f"- {who}: {why}" for who, why in told.items())]
