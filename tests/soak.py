"""Whether this run takes the cases' own counts (`make soak`) or CI's, and whether it is in the lab:
on an emulated processor CI's are smaller still.
"""

from __future__ import annotations

import os

SOAK = os.environ.get("ORBIT_SOAK") == "1"
IN_LAB = os.environ.get("ORBIT_LAB") == "1"
