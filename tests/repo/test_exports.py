"""The public face: `orbit.__all__` is what is there, and importing it does nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import orbit
from tests.repo.project import PACKAGE, ROOT, sources

# Loaded by a command or by a path when it is wanted, never by `import orbit`.
LAZY = ("numpy", "pyverbs", "click", "rich", "uvloop", "Cython", "orbit.verbs._pyverbs")

PROBE = """
import json, logging, os, signal, sys, threading
def facts():
    return {
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "handlers": len(logging.getLogger().handlers),
        "level": logging.getLogger().level,
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "environment": sorted(os.environ),
        "children": os.path.exists("/proc/self/task") and len(os.listdir("/proc/self/task")),
    }
before = facts()
import orbit
after = facts()
native = []
if os.path.exists("/proc/self/maps"):
    with open("/proc/self/maps") as maps:
        native = sorted({l.split()[-1] for l in maps if "ibverbs" in l or "_turn" in l})
modules = sorted(sys.modules)
print(json.dumps({"before": before, "after": after, "modules": modules, "native": native}))
"""


def imported() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


def test_all_is_what_is_there() -> None:
    names = orbit.__all__
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(orbit, name)]
    assert not missing
    assert all(not name.startswith("_") or name == "__version__" for name in names)


def test_all_holds_the_first_page() -> None:
    """What the README and the first guide lean on."""
    assert {"Node", "NodeConfig", "Handle", "Lease", "OrbitError", "available"} <= set(
        orbit.__all__
    )


def test_every_error_is_public() -> None:
    tree = next(s.tree for s in sources() if s.module == "orbit.errors")
    errors = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert errors <= set(orbit.__all__), sorted(errors - set(orbit.__all__))


def test_import_has_no_side_effect() -> None:
    facts = imported()
    assert facts["before"] == facts["after"]


def test_import_loads_nothing_heavy() -> None:
    facts = imported()
    modules = facts["modules"]
    assert isinstance(modules, list)
    assert [name for name in LAZY if name in modules] == []
    assert facts["native"] == []


def test_import_works_where_nothing_is_installed() -> None:
    """No pyverbs, no C helper, no numpy, no command line packages, not even ctypes or fcntl."""
    blocked = ("pyverbs", "numpy", "click", "rich", "uvloop", "fcntl", "termios", "grp", "pwd")
    program = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\nimport orbit\n"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
