"""What two transfer engines tell each other before the first transfer: limits and policies.

Facts without authority. Fields and defaults follow the rules of `messages`; this module knows no
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from .messages import Message

ENGINE_PROTOCOL: Final = 1


@dataclass(frozen=True, slots=True)
class EngineHelloRequest(Message):
    """Asks what the engine there is like. `protocol`: the newest one that the asker knows."""

    METHOD: ClassVar[str] = "_engine_hello"
    protocol: int = ENGINE_PROTOCOL


@dataclass(frozen=True, slots=True)
class EngineHelloReply(Message):
    """`protocol`: what that engine speaks (0: it does not say). `host_memory`: "staged" when what
    its peers reach is private memory, for which arrays have to be private, too. `grants_max` and
    `slices_max` 0: no limit of its own.
    """

    protocol: int = 0
    host_memory: str = "direct"
    grants_max: int = 0
    slices_max: int = 0
