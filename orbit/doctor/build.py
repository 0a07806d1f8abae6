"""What was built and installed: the helper, pyverbs, libibverbs and its drivers, and whether they
belong together.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..model import PathReason
from ..verbs.libraries import VerbsFacts
from ..verbs.turn import ABI
from .advice import INSTALL_DRIVERS, fix_for
from .finding import Area, Finding
from .host import Host
from .seen import Seen

_AREA = Area("build")
_RELEASE = re.compile(r"\.so\.\d+\.\d+\.(\d+)\.(\d+)\Z")  # libibverbs.so.1.14.44.0: rdma-core 44.0
_LEADING = re.compile(r"(\d+)\.(\d+)")
_SEARCHED = ("LD_PRELOAD", "LD_LIBRARY_PATH")
_REINSTALL = (
    "apt-get install --reinstall libibverbs1 ibverbs-providers python3-pyverbs;"
    " RHEL, Fedora: dnf reinstall libibverbs python3-pyverbs"
)


def build_findings(seen: Seen) -> list[Finding]:
    found = [_AREA.ok("python", f"orbit {_version()} on Python {platform.python_version()}")]
    if seen.verbs is None:
        text = "helper and verbs libraries: a folder stands for the host, no process was asked"
        return [*found, _AREA.skip("libraries_not_asked", text)]
    found.append(_helper(seen, seen.verbs))
    found.append(_pyverbs(seen, seen.verbs))
    found += _copies(seen.verbs, seen.host.environment)
    if seen.verbs.pyverbs and not seen.verbs.pyverbs_problem:
        found.append(_match(seen.host, seen.verbs))
        found.append(_drivers(seen, seen.verbs))
    return found


def _version() -> str:
    try:
        return version("orbit")
    except PackageNotFoundError:
        return "(not installed as a package)"


def _helper(seen: Seen, verbs: VerbsFacts) -> Finding:
    headers = (seen.host.usr / "include/infiniband/verbs.h").exists()
    if not verbs.helper_problem:
        rest = "" if headers else "; a rebuild would need libibverbs-dev"
        return _AREA.ok("helper_ok", f"helper {verbs.helper}, ABI {ABI}{rest}")
    if verbs.helper:
        text = f"the helper cannot be used: {verbs.helper_problem}"
        fix = verbs.helper_hint or fix_for(PathReason.NO_HELPER)
        return _AREA.at(seen.missing, "helper_unusable", text, fix, path=verbs.helper)
    text = f"RDMA is not built in: {verbs.helper_problem}"
    return _AREA.at(seen.missing, "helper_missing", text, fix_for(PathReason.NO_HELPER))


def _pyverbs(seen: Seen, verbs: VerbsFacts) -> Finding:
    if not verbs.pyverbs:
        text, fix = "pyverbs is not installed for this Python", fix_for(PathReason.NO_PYVERBS)
        return _AREA.at(seen.missing, "pyverbs_missing", text, fix)
    if verbs.pyverbs_problem:
        text = f"pyverbs in {verbs.pyverbs} cannot be loaded: {verbs.pyverbs_problem}"
        return _AREA.at(seen.missing, "pyverbs_broken", text, _REINSTALL)
    return _AREA.ok("pyverbs_ok", f"pyverbs in {verbs.pyverbs}")


def _copies(verbs: VerbsFacts, environment: Mapping[str, str]) -> list[Finding]:
    paths_set = [f"{n}={environment[n]}" for n in _SEARCHED if environment.get(n)]
    found = []
    for library, paths in verbs.loaded:
        if len(paths) > 1:
            text = f"this process has {len(paths)} copies of {library}: {', '.join(paths)}"
            if paths_set:
                text += f" ({', '.join(paths_set)})"
            fix = "keep one: uninstall the wheel that brings its own, or unset LD_PRELOAD and"
            fix += " LD_LIBRARY_PATH"
            found.append(_AREA.fail("library_twice", text, fix, paths=list(paths)))
    return found


def _match(host: Host, verbs: VerbsFacts) -> Finding:
    loaded = dict(verbs.loaded).get("libibverbs", ())
    if not loaded:
        return _AREA.skip("libibverbs_unknown", "no libibverbs is seen in this process")
    release = next((_release_of(path) for path in loaded if _release_of(path)), None)
    packaged = _package_version(host, "python3-pyverbs")
    if release is None or packaged is None or "dist-packages" not in verbs.pyverbs:
        known = f"{loaded[0]}" + (f" (rdma-core {release[0]}.{release[1]})" if release else "")
        text = f"libibverbs is {known}; whether pyverbs is of the same release is not recorded here"
        return _AREA.skip("libibverbs_unmatched", text)
    data = {"libibverbs": loaded[0], "pyverbs": packaged}
    text = f"rdma-core {release[0]}.{release[1]} in {loaded[0]}, pyverbs {packaged}"
    leading = _LEADING.match(packaged)
    if leading is None:  # a vendor's stack counts in its own way: 2410mlnx54-1
        text = f"{text}: whether they are of the same release cannot be told"
        return _AREA.skip("libibverbs_unmatched", text, **data)
    if (int(leading[1]), int(leading[2])) != release:
        text = f"pyverbs and libibverbs are of different releases: {text}"
        return _AREA.warn("pyverbs_mismatch", text, _REINSTALL, **data)
    return _AREA.ok("libibverbs_ok", text, **data)


def _release_of(path: str) -> tuple[int, int] | None:
    found = _RELEASE.search(path)
    return (int(found[1]), int(found[2])) if found else None


def _package_version(host: Host, package: str) -> str | None:
    text = host.read(host.packages)
    found = re.search(
        rf"^Package: {re.escape(package)}$(?:\n(?!\n).*)*?\nVersion: (\S+)", text, re.MULTILINE
    )
    return found[1] if found else None


def _drivers(seen: Seen, verbs: VerbsFacts) -> Finding:
    """The plug-ins of libibverbs: without one a device is listed by the kernel alone."""
    folders = [Path(path).parent / "libibverbs" for _, paths in verbs.loaded for path in paths]
    folders += [*seen.host.usr.glob("lib*/libibverbs"), *seen.host.usr.glob("lib/*/libibverbs")]
    for folder in dict.fromkeys(folders):
        names = [n for n in seen.host.names(folder) if n.endswith(".so")]
        if names:
            drivers = [name.removeprefix("lib").partition("-")[0] for name in names]
            text = f"{len(names)} drivers in {folder}"
            return _AREA.ok("drivers_ok", text, drivers=drivers)
    text = "libibverbs has no driver: every device would be left aside"
    return _AREA.at(seen.missing, "drivers_missing", text, INSTALL_DRIVERS)
