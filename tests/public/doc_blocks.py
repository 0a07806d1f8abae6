"""The fenced blocks of a Markdown page, with what each is marked as and what it prints.

The info string of a fence is its language and a mark: a file name keeps a program for later blocks,
`run` runs lines in a shell, another mark says why nothing runs them here. A `text` block right
below shows the output, in which `...` stands for anything.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(.*)\n((?s:.*?))^```\n?", re.MULTILINE)
_OUTPUT = "text"


@dataclass(frozen=True, slots=True)
class Block:
    """`line`: of the page, from 1. `shown`: the output that the page shows, if it does."""

    line: int
    language: str
    mark: str
    body: str
    shown: str | None

    def shows(self, printed: str) -> bool:
        """Whether that output is the one shown."""
        if self.shown is None:
            return True
        parts = (re.escape(part) for part in self.shown.strip().split("..."))
        return re.fullmatch("(?s:.*?)".join(parts), printed.strip()) is not None


def blocks_of(page: Path) -> list[Block]:
    """All but those that show an output, in the page's order."""
    return list(_blocks(page.read_text("utf-8")))


def _blocks(text: str) -> Iterator[Block]:
    for fence, following in itertools.pairwise([*_FENCE.finditer(text), None]):
        assert fence is not None  # the None comes last
        language, _, mark = fence[1].partition(" ")
        if language == _OUTPUT:
            continue
        shown = None
        if following is not None and following[1] == _OUTPUT:
            between = text[fence.end() : following.start()]
            shown = following[2] if not between.strip() else None
        line = text.count("\n", 0, fence.start()) + 1
        yield Block(line, language, mark, fence[2], shown)
