"""`python -m orbit`: the command line, for where the script is not on PATH."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
