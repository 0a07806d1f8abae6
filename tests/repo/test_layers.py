"""Arrows point down only, foreign modules have one door each, machines are pure.

The table below is the layout. A new room is a new row here, decided and not slipped in.
"""

from __future__ import annotations

import ast

import pytest

from tests.repo.project import Source, sources

VALUES = {"errors", "model"}
FACTS = VALUES | {"config", "events"}
MACHINES = FACTS | {"protocol", "memory"}
SHELLS = MACHINES | {"transport"}

# room -> the rooms it may import. A room is a top-level module or folder of the package.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "config": VALUES,
    "events": VALUES,
    "memory": VALUES,
    "protocol": VALUES | {"memory"},
    "transport": MACHINES,
    "daemon_pool": set(),
    "verbs": SHELLS | {"daemon_pool"},
    "runtime": SHELLS,
    "softroce": FACTS,
    "testing": SHELLS | {"runtime"},
    "availability": FACTS | {"verbs"},
    "node": SHELLS | {"runtime", "verbs", "availability"},
    "engine": MACHINES | {"runtime", "node"},
    "loop_thread": VALUES,
    "logs": {"errors"},
    "sync": FACTS | {"loop_thread", "daemon_pool", "node", "engine", "runtime"},
    "metrics": FACTS | {"node", "runtime"},
    "bench": SHELLS | {"verbs", "runtime", "node", "engine", "availability", "testing"},
    "doctor": SHELLS | {"verbs", "runtime", "node", "engine", "availability"},
    "scraping": FACTS,
    "cli": FACTS
    | {"protocol", "transport", "node", "engine", "availability", "softroce", "testing"}
    | {"bench", "doctor", "metrics", "scraping", "logs"},
    # orbit/__init__.py: public names
    "": FACTS | {"transport", "node", "engine", "availability", "logs"},
    "__main__": {"cli"},
}

# foreign module -> the only places that import it (a path, or a folder ending in /)
DOORS: dict[str, tuple[str, ...]] = {
    "msgpack": ("orbit/protocol/codec.py",),
    "pyverbs": ("orbit/verbs/_pyverbs.py",),
    "prometheus_client": ("orbit/metrics/", "orbit/scraping.py"),
    "matplotlib": ("orbit/bench/plot.py",),
    "numpy": ("orbit/memory/range_table.py",),
    "ctypes": ("orbit/memory/buffer.py", "orbit/verbs/"),  # addresses of buffers; the C helper
    "click": ("orbit/cli/",),
    "rich": ("orbit/cli/",),
    "uvloop": ("orbit/cli/",),
}

# The lab's command hands its whole environment on to the guest; it reads no setting from it.
ENVIRONMENT_DOORS = ("orbit/config.py", "orbit/cli/softroce.py")

# What a machine may not touch: the world.
WORLD = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}

# The locks of a process' memory are asked from every thread, and a forked child begins anew.
WORLD_DOORS = {"orbit/memory/range_locks.py": {"os", "threading"}}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def is_at(source: Source, doors: tuple[str, ...]) -> bool:
    return any(
        source.name == door or (door[-1] == "/" and source.name.startswith(door)) for door in doors
    )


def every() -> list[object]:
    return [pytest.param(source, id=source.name) for source in sources()]


@pytest.mark.parametrize("source", every())
def test_arrows_point_down(source: Source) -> None:
    room = room_of(source.module)
    assert room in ROOMS, f"{source.name}: the room {room!r} has no row in the layer table"
    allowed = ROOMS[room] | {room}
    known_rooms = set(ROOMS)
    for module, line in source.imports():
        if module.split(".")[0] != "orbit":
            continue
        target = room_of(module)
        if target not in known_rooms:  # `from .. import name`: something of orbit/__init__.py
            target = ""
        assert target in allowed, f"{source.name}:{line}: {room or 'orbit'} imports {module}"


@pytest.mark.parametrize("source", every())
def test_foreign_modules_have_one_door(source: Source) -> None:
    for module, line in source.imports():
        foreign = module.split(".")[0]
        doors = DOORS.get(foreign)
        if doors is not None:
            assert is_at(source, doors), f"{source.name}:{line}: {foreign} belongs to {doors}"


@pytest.mark.parametrize("source", every())
def test_the_environment_is_read_in_one_place(source: Source) -> None:
    if source.name in ENVIRONMENT_DOORS:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            raise AssertionError(f"{source.name}:{node.lineno}: os.{node.attr} outside config.py")


@pytest.mark.parametrize(
    "source",
    [p for p in every() if room_of(p.values[0].module) in ("protocol", "memory")],  # type: ignore[attr-defined]
)
def test_machines_are_pure(source: Source) -> None:
    world = WORLD - WORLD_DOORS.get(source.name, set())
    for module, line in source.imports():
        assert module.split(".")[0] not in world, f"{source.name}:{line}: imports {module}"
    for node in ast.walk(source.tree):
        waits = isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        assert not waits, f"{source.name}:{node.lineno}: a machine does not wait"  # type: ignore[attr-defined]


def test_the_table_has_no_cycle() -> None:
    """What makes "down" mean something: the rooms can be put in one order."""
    remaining = {room: set(below) for room, below in ROOMS.items()}
    while remaining:
        free = [room for room, below in remaining.items() if not below & remaining.keys()]
        assert free, f"a cycle among {sorted(remaining)}"
        for room in free:
            del remaining[room]
