"""Checks of what callers of the handle API pass."""

from __future__ import annotations

from ..config import parse_transport
from ..errors import UsageError
from ..model import Handle, Transport


def checked_handle(handle: Handle) -> Handle:
    """Raises UsageError for what is no Handle."""
    if not isinstance(handle, Handle):
        raise UsageError(
            f"not a handle: {type(handle).__name__}", hint="Handle.parse reads the text form"
        )
    return handle


def checked_timeout(timeout: float | None) -> float | None:
    """Raises UsageError for what is no number of seconds above 0."""
    if timeout is not None and not 0 < timeout < float("inf"):
        raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0")
    return timeout


def chosen_transport(asked: Transport | str | None, default: Transport | str) -> Transport:
    """What this call goes by. Raises ConfigError naming the accepted values."""
    return parse_transport("transport", default if asked is None else asked)
