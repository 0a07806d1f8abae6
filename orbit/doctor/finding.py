"""One line of a diagnosis, and the whole of it. Pure values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Level(IntEnum):
    """How much it matters. SKIPPED: it was not looked at, and the text says why."""

    OK = 0
    SKIPPED = 1
    WARN = 2  # it works, less well or under a condition
    FAIL = 3  # what was asked for cannot work

    @property
    def word(self) -> str:
        return _WORDS[self]


_WORDS = {Level.OK: "ok", Level.SKIPPED: "skip", Level.WARN: "warn", Level.FAIL: "fail"}


@dataclass(frozen=True, slots=True)
class Finding:
    """`area` is the heading ("build", "device mlx5_0", "memory"); `code` names the finding for
    programs and is stable ("memlock_below_budget"); `fix` is what to do, empty where nothing is to
    be done; `data` has the figures behind it, as json writes them.
    """

    area: str
    code: str
    level: Level
    text: str
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "area": self.area,
            "code": self.code,
            "level": self.level.word,
            "text": self.text,
            "fix": self.fix,
            "data": dict(self.data),
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Diagnosis:
        return cls(tuple(findings))

    @property
    def level(self) -> Level:
        """The worst of all."""
        return max((one.level for one in self.findings), default=Level.OK)
