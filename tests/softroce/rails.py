"""Which rail each device of the lab is, looked for once: thousands of GID rows cost seconds on an
emulated processor.

What was found holds as long as the ports' states and the devices that may be opened are the same; a
test that changes either sees what there is then.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from orbit.protocol.messages import RailHint
from orbit.verbs import opening
from orbit.verbs.discovery import Discovery, discover
from orbit.verbs.rail_choice import Pins, choose_rails

_DEVICES = Path("/sys/class/infiniband")
_NODES = Path("/dev/infiniband")


def discovered() -> Discovery:
    """As `discover`, at the first time that these things were as they are."""
    states = {str(file): file.read_text() for file in _DEVICES.glob("*/ports/*/state")}
    mine = [str(node) for node in _NODES.iterdir() if os.access(node, os.R_OK | os.W_OK)]
    return _discovered(tuple(sorted(states.items())), tuple(sorted(mine)))


@functools.cache
def _discovered(states: tuple[tuple[str, str], ...], nodes: tuple[str, ...]) -> Discovery:
    return discover()


def rail_of(device: str) -> RailHint:
    (choice,) = choose_rails(discovered(), Pins(device=device)).rails
    return choice.rail


def look_once() -> None:
    """Every node that this process opens, and its children's, takes what was found."""
    opening.discover = discovered
