"""How checks see the host: the roots of its trees and what a process asks of itself.

The defaults are the real host; tests give a folder and answers of their own. Nothing here judges.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from ..config import diagnostic_environment
from ..transport.tcp_bind import bind
from ..verbs.gid_ranking import Netdev
from ..verbs.libraries import VerbsFacts, ask_verbs
from ..verbs.netdevs import read_netdevs

Limits = tuple[int, int]  # soft and hard, in bytes; resource.RLIM_INFINITY for none


def _memlock() -> Limits:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)


def _try_to_listen(host: str, port: int) -> None:
    for sock in bind(host, port, 1):
        sock.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host, real or made up. A question that is None was not asked: its findings are skipped.
    A root that does not exist reads as a host without those files.
    """

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")
    etc: Path = Path("/etc")
    usr: Path = Path("/usr")
    nodes: Path | None = Path("/dev/infiniband")  # None: not known
    modules: Path = Path("/lib/modules")
    packages: Path = Path("/var/lib/dpkg/status")
    memlock: Callable[[], Limits | None] = _memlock
    netdevs: Callable[[], Mapping[str, Netdev]] = read_netdevs
    environment: Mapping[str, str] = field(default_factory=diagnostic_environment)
    verbs: Callable[[], VerbsFacts] | None = ask_verbs
    listen: Callable[[str, int], None] | None = _try_to_listen  # raises ConfigError, closes again

    @classmethod
    def at(cls, root: Path) -> Self:
        """The host whose sys, proc, etc, usr and dev/infiniband lie below `root`, copied or made
        up; of a folder that holds `class` it is the sysfs alone. No process and no library is
        asked, the environment is empty, and without a dev folder the device nodes are not known.
        """
        sysfs = root if (root / "class").is_dir() else root / "sys"
        return cls(
            sysfs=sysfs,
            proc=root / "proc",
            etc=root / "etc",
            usr=root / "usr",
            nodes=root / "dev/infiniband" if (root / "dev").is_dir() else None,
            modules=root / "lib/modules",
            packages=root / "var/lib/dpkg/status",
            memlock=partial(_limits_in, root / "proc/self/limits"),
            netdevs=partial(_netdevs_in, sysfs),
            environment={},
            verbs=None,
            listen=None,
        )

    def read(self, path: Path) -> str:
        """The stripped text of a small file; empty if it cannot be read."""
        try:
            return path.read_text("utf-8", "replace").strip()
        except OSError:
            return ""

    def number(self, path: Path) -> int | None:
        """The first word of a file as a number; None where there is none."""
        words = self.read(path).split()
        return int(words[0]) if words and words[0].isdigit() else None

    def names(self, folder: Path) -> tuple[str, ...]:
        """What a folder holds, in order; nothing where it cannot be read."""
        try:
            return tuple(sorted(entry.name for entry in folder.iterdir()))
        except OSError:
            return ()

    def status(self, field_name: str) -> str:
        """One line of /proc/self/status, without its name; empty where there is none."""
        for line in self.read(self.proc / "self/status").splitlines():
            name, _, value = line.partition(":")
            if name == field_name:
                return value.strip()
        return ""


def _limits_in(file: Path) -> Limits | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max locked memory"):
            soft, hard = line.split()[3:5]
            return _limit(soft), _limit(hard)
    return None


def _limit(text: str) -> int:
    return resource.RLIM_INFINITY if text == "unlimited" else int(text)


def _netdevs_in(sysfs: Path) -> dict[str, Netdev]:
    """Without addresses: sysfs has none."""
    found: dict[str, Netdev] = {}
    folder = sysfs / "class/net"
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            up = (entry / "operstate").read_text().strip() in ("up", "unknown")
            found[entry.name] = Netdev(up, mtu=int((entry / "mtu").read_text()))
        except (OSError, ValueError):
            continue
    return found
