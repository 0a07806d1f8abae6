"""Which verbs libraries this process can load, and which of them it has loaded.

For a diagnosis only: it loads the helper and pyverbs as opening a device would, opens none, and
tells what stood in the way as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import DeviceError
from .turn import Turn, library_path

_MAPS = Path("/proc/self/maps")
# Auditwheel puts a hash behind the name: libibverbs-3f2a1c.so.1.14.44.0
_LIBRARY = re.compile(r"(libibverbs|libmlx5|libmlx4|libefa|librdmacm)(-[0-9a-f]+)?\.so[.0-9]*")


@dataclass(frozen=True, slots=True)
class VerbsFacts:
    """A problem is one line, empty where there is none. `devices` are the names that the verbs
    library lists; None: it could not be asked. `loaded` has the paths by library.
    """

    helper: str = ""
    helper_problem: str = ""
    helper_hint: str = ""
    pyverbs: str = ""  # its folder; empty: not installed
    pyverbs_problem: str = ""
    devices: tuple[str, ...] | None = None
    loaded: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def usable(self) -> bool:
        return self.devices is not None


def ask_verbs() -> VerbsFacts:
    """Loads the libraries into this process. Never raises."""
    helper, problem, hint = "", "", ""
    try:
        path = library_path("native")
        helper = str(path)
        Turn(path)
    except DeviceError as error:
        problem, hint = str(error), error.hint
    found = find_spec("pyverbs")
    if found is None:
        return VerbsFacts(helper, problem, hint, loaded=loaded_libraries(_maps()))
    folder = str(Path(found.origin or "").parent)
    devices, refusal = _listed_devices()
    if problem:
        devices, refusal = None, ""
    loaded = loaded_libraries(_maps())
    return VerbsFacts(helper, problem, hint, folder, refusal, devices, loaded)


def _listed_devices() -> tuple[tuple[str, ...] | None, str]:
    from ._pyverbs import PyverbsProvider

    try:
        return tuple(PyverbsProvider().devices()), ""
    except DeviceError as error:
        return None, str(error)


def loaded_libraries(maps: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(name, paths) of each verbs library among the lines of /proc/PID/maps."""
    found: dict[str, set[str]] = {}
    for line in maps:
        path = line.split(maxsplit=5)[5] if line.count(" ") >= 5 and "/" in line else ""
        path = path.removesuffix(" (deleted)").strip()
        if match := _LIBRARY.fullmatch(path.rpartition("/")[2]):
            found.setdefault(match[1], set()).add(path)
    return tuple((name, tuple(sorted(paths))) for name, paths in sorted(found.items()))


def _maps() -> list[str]:
    try:
        return _MAPS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
