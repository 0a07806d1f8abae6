"""Draws what a command has printed as a picture of a terminal.

FORCE_COLOR=1 COLUMNS=110 orbit doctor | python docs/images/make_screen.py "orbit doctor" out.svg
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(title: str, out: str) -> None:
    text = Text.from_ansi(sys.stdin.read().rstrip("\n"))
    width = max(line.cell_len for line in text.split("\n"))
    console = Console(record=True, width=width + 1, file=io.StringIO(), highlight=False)
    console.print(text, soft_wrap=True)
    draw(console, title, out)


def draw(console: Console, title: str, out: str) -> None:
    """What `console` has recorded."""
    drawn = console.export_svg(title=title)
    # Not every renderer keeps the width of spaces at the ends of a text otherwise.
    drawn = drawn.replace("&#160;", " ").replace("<text ", '<text xml:space="preserve" ')
    Path(out).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
