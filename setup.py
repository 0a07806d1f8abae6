"""Builds the C helper's two libraries; everything else about the package is in pyproject.toml.

`_native` needs the verbs headers and nothing else of rdma-core; `_scripted` needs a C compiler.
Neither is a Python extension module: they export plain C functions that ctypes calls, so they carry
no ABI tag and link only libc.

Environment: CC (also a cross compiler), CFLAGS, ORBIT_VERBS_INCLUDE (where infiniband/verbs.h is,
if not on the compiler's own path) and ORBIT_WITHOUT_VERBS=1 (TCP only: the scripted device alone is
built).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
TURN = "orbit/verbs/_turn"
NATIVE = Extension(
    "orbit.verbs._turn._native",
    [f"{TURN}/{name}.c" for name in ("native", "poller", "wake")],
    depends=[f"{TURN}/turn.h"],
)
SCRIPTED = Extension(
    "orbit.verbs._turn._scripted",
    [
        f"{TURN}/{name}.c"
        for name in (
            *("scripted", "scripted_calls", "scripted_execute", "scripted_receives"),
            *("scripted_events", "scripted_rules", "poller", "wake"),
        )
    ],
    depends=[f"{TURN}/{name}.h" for name in ("turn", "scripted", "scripted_state")],
)

NO_HEADER = """
orbit needs the header infiniband/verbs.h to build its verbs helper, and the C compiler
({compiler}) does not find it.

  Debian, Ubuntu:       apt-get install libibverbs-dev
  Fedora, RHEL, SUSE:   dnf install rdma-core-devel
  elsewhere:            ORBIT_VERBS_INCLUDE=DIRECTORY, the one that holds infiniband/verbs.h
  without RDMA at all:  ORBIT_WITHOUT_VERBS=1 builds a TCP-only orbit
"""


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def include_directories() -> list[str]:
    given = os.environ.get("ORBIT_VERBS_INCLUDE")
    return [given] if given else []


def has_verbs_header() -> bool:
    """Asks the compiler itself, so that a cross compiler answers for its own sysroot."""
    command = [*compiler(), *(f"-I{path}" for path in include_directories()), "-E", "-xc", "-"]
    source = "#include <infiniband/verbs.h>\n"
    try:
        done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    except OSError as error:
        sys.exit(f"orbit: the C compiler {command[0]!r} cannot be run: {error.strerror}")
    return done.returncode == 0


def without_verbs() -> bool:
    return os.environ.get("ORBIT_WITHOUT_VERBS", "").lower() in {"1", "true", "yes", "on"}


class BuildTurn(build_ext):
    """Compiles with the compiler's plain flags: the interpreter's own may not suit a cross
    compiler."""

    def run(self) -> None:
        if not without_verbs() and not has_verbs_header():
            sys.exit(NO_HEADER.format(compiler=" ".join(compiler())))
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        sources = [HERE / source for source in ext.sources]
        fresh = target.with_suffix(".new")
        command = [
            *compiler(),
            *("-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-pthread", "-fPIC", "-shared"),
            *shlex.split(os.environ.get("CFLAGS", "")),
            *(f"-I{path}" for path in include_directories()),
            *(str(source) for source in sources),
            *("-o", str(fresh)),
        ]
        # The command is part of what was built: another CC or CFLAGS builds again.
        stamp = Path(self.build_temp) / f"{target.stem}.command"
        newest = max(path.stat().st_mtime for path in [*sources, *(HERE / d for d in ext.depends)])
        if (
            not self.force
            and target.exists()
            and target.stat().st_mtime >= newest
            and stamp.exists()
            and stamp.read_text() == shlex.join(command)
        ):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        print(shlex.join(command), flush=True)
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"orbit: building {ext.name} failed; the compiler's words are above")
        fresh.replace(target)  # a process that has the old one mapped keeps it
        stamp.write_text(shlex.join(command))

    def get_ext_filename(self, fullname: str) -> str:
        """No ABI tag: not a Python extension module."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))


setup(
    ext_modules=[SCRIPTED] if without_verbs() else [NATIVE, SCRIPTED],
    cmdclass={"build_ext": BuildTurn},
)
