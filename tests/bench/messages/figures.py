"""What every end of the message benchmark reports, as one line of JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence


def report(seconds: Sequence[float], messages_per_s: float, **more: object) -> None:
    """`seconds` of the round trips, and the rate of messages that nobody answers."""
    ordered = sorted(seconds)
    figures = {
        "p50_us": statistics.median(ordered) * 1e6,
        "p99_us": ordered[len(ordered) * 99 // 100] * 1e6,
        "messages_s": messages_per_s,
    }
    print(json.dumps({**figures, **more}), flush=True)


def parse_words(line: str) -> dict[str, float]:
    """`name value name value` of the C program."""
    words = line.split()
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))
