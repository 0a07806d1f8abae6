"""Whether this run takes the cases' own counts (`make soak`) or CI's."""

from __future__ import annotations

import os

SOAK = os.environ.get("ORBIT_SOAK") == "1"
