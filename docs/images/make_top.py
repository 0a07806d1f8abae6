"""Draws docs/images/top.svg: a screen of `orbit top` as it is now at an endpoint.

python docs/images/make_top.py 127.0.0.1:9464 docs/images/top.svg
"""

from __future__ import annotations

import io
import sys
import time

from make_screen import draw
from rich.console import Console

from orbit.cli.top_facts import facts_of
from orbit.cli.top_screen import WIDE, screen
from orbit.scraping import scrape

INTERVAL_S = 2.0


def main(endpoint: str, out: str) -> None:
    before = scrape(endpoint)
    time.sleep(INTERVAL_S)
    facts = facts_of(scrape(endpoint), before)
    console = Console(record=True, width=WIDE + 2, file=io.StringIO(), highlight=False)
    console.print(screen(facts, endpoint, console.width))
    draw(console, "orbit top", out)


if __name__ == "__main__":
    main(*sys.argv[1:])
