"""The contract of MessageLink as a suite that every wire passes, run by `check_message_link`.

The cases are in message_exchange_cases, message_credit_cases and message_ending_cases; what they
work with is in message_link_rig.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from .leftovers import nothing_left
from .message_credit_cases import CREDIT_CASES
from .message_ending_cases import ENDING_CASES
from .message_exchange_cases import EXCHANGE_CASES
from .message_link_rig import LinkEnd, LinkRig, MessageLinkCase, RigFactory

__all__ = ["MESSAGE_LINK_CASES", "LinkEnd", "LinkRig", "RigFactory", "check_message_link"]

MESSAGE_LINK_CASES: Final[Mapping[str, MessageLinkCase]] = {
    case.__name__: case for case in (*EXCHANGE_CASES, *CREDIT_CASES, *ENDING_CASES)
}


async def check_message_link(case: str, open_rig: RigFactory) -> None:
    """Run one of MESSAGE_LINK_CASES; afterwards nothing may be left. Raises AssertionError."""
    async with nothing_left():
        async with open_rig() as rig:
            await MESSAGE_LINK_CASES[case](rig)
            rig.check()
        await asyncio.sleep(0)
