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


@dataclass(frozen=True, slots=True)
class Area:
    """Makes the findings of one heading. Further names become `data`."""

    name: str

    def ok(self, code: str, text: str, **data: Any) -> Finding:
        return Finding(self.name, code, Level.OK, text, data=data)

    def skip(self, code: str, text: str, **data: Any) -> Finding:
        return Finding(self.name, code, Level.SKIPPED, text, data=data)

    def warn(self, code: str, text: str, fix: str, **data: Any) -> Finding:
        return Finding(self.name, code, Level.WARN, text, fix, data)

    def fail(self, code: str, text: str, fix: str, **data: Any) -> Finding:
        return Finding(self.name, code, Level.FAIL, text, fix, data)

    def at(self, level: Level, code: str, text: str, fix: str, **data: Any) -> Finding:
        """For a finding whose weight depends on what was asked for."""
        return Finding(self.name, code, level, text, fix, data)
