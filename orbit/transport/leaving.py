"""What a callback raises to end the program (sys.exit, an interrupt), raised where it breaks off
nothing: by the event loop itself, after what is in progress.
"""

from __future__ import annotations

import asyncio


def raise_later(error: BaseException) -> None:
    """Out of the running loop's `run_forever`, in its next turn."""
    asyncio.get_running_loop().call_soon(_raise, error)


def _raise(error: BaseException) -> None:
    raise error
