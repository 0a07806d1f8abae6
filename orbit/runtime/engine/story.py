"""How one request went, for people: seconds by phase, rails and why, what it waited for.

It is written while the request runs and read at any time. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """`phases`: seconds by name, those of parents that ran beside each other summed. `reasons`: one
    for each rail that there was, chosen or not. `state`: as of now ("running" until it is over).
    """

    op: str
    transport: str
    nbytes: int
    state: str
    phases: Mapping[str, float]
    rails: tuple[str, ...]
    reasons: tuple[str, ...]
    parents: int
    grants: int
    error: str = ""

    def __str__(self) -> str:
        lines = [f"{self.op} of {self.nbytes} bytes by {self.transport}: {self.state}"]
        if self.error:
            lines.append(f"  why: {self.error}")
        lines += [f"  {name}: {seconds * 1e3:.3f} ms" for name, seconds in self.phases.items()]
        if self.transport == "rdma":
            lines.append(f"  grants reserved: {self.grants}, in {self.parents} leases")
            lines += [f"  {reason}" for reason in self.reasons]
        return "\n".join(lines)


class Story:
    """Of one request; its parents write into the same one."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.rails: dict[str, None] = {}
        self.reasons: dict[str, None] = {}
        self.parents = 0
        self.grants = 0

    def phase(self, name: str) -> _Phase:
        """What is done within takes its time under that name."""
        return _Phase(self, name)

    def add(self, name: str, seconds: float) -> None:
        """That much more under that name."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    def chose(self, devices: Iterable[str], reasons: Iterable[str]) -> None:
        """The rails of a parent, and why."""
        self.rails.update(dict.fromkeys(devices))
        self.reasons.update(dict.fromkeys(reasons))


class _Phase:
    """One stretch of a request: made for every step, so it is no generator."""

    __slots__ = ("_name", "_started", "_story")

    def __init__(self, story: Story, name: str) -> None:
        self._story = story
        self._name = name
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._story.add(self._name, time.perf_counter() - self._started)
