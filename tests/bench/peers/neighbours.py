"""Imported for its effect: the modules of tests/bench can be imported after it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
