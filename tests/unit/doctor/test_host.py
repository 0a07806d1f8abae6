"""What the checks ask of a real host, and the page that has a row for each of their codes."""

from __future__ import annotations

import ast
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from orbit.config import NodeConfig, diagnostic_environment
from orbit.doctor.checks import host_findings
from orbit.doctor.finding import Level
from orbit.doctor.host import Host
from orbit.verbs.libraries import ask_verbs, loaded_libraries
from tests.repo.project import PACKAGE, ROOT


def test_a_port_that_somebody_has_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = NodeConfig(listen=f"127.0.0.1:{port}", transport="tcp")
        found = {f.code: f for f in host_findings(Host(), config)}
    assert found["listen_refused"].level is Level.FAIL
    assert str(port) in found["listen_refused"].text
    assert "listen_ok" not in found
    again = {f.code for f in host_findings(Host(), config)}
    assert "listen_ok" in again
    assert "listen_refused" not in again


def test_this_host_answers_without_an_exception() -> None:
    found = host_findings(Host(), NodeConfig())
    assert {"build", "devices", "container", "tcp", "addresses"} <= {f.area for f in found}
    assert all(f.fix for f in found if f.level >= Level.WARN)
    assert "unreadable" not in {f.code for f in found}


def test_the_libraries_of_this_process_are_seen() -> None:
    facts = ask_verbs()
    assert all(Path(path).exists() for _, paths in facts.loaded for path in paths)
    assert facts.usable == bool(dict(facts.loaded).get("libibverbs") and facts.helper)


def test_copies_in_the_maps_of_a_process() -> None:
    lines = """\
7f0-7f1 r-xp 00000000 08:01 11                         /usr/lib/libibverbs.so.1.14.44.0
7f1-7f2 r--p 00001000 08:01 11                         /usr/lib/libibverbs.so.1.14.44.0
7f2-7f3 r-xp 00000000 08:01 12                         /a b/x.libs/libibverbs-3f2a1c.so.1.14.44.0
7f3-7f4 r-xp 00000000 08:01 13                         /usr/lib/libmlx5.so.1 (deleted)
7f4-7f5 r-xp 00000000 08:01 14                         /usr/lib/libibverbs/libmlx5-rdmav34.so
7f5-7f6 rw-p 00000000 00:00 0                          [heap]
7f6-7f7 rw-p 00000000 00:00 0
""".splitlines()
    assert loaded_libraries(lines) == (
        (
            "libibverbs",
            ("/a b/x.libs/libibverbs-3f2a1c.so.1.14.44.0", "/usr/lib/libibverbs.so.1.14.44.0"),
        ),
        ("libmlx5", ("/usr/lib/libmlx5.so.1",)),
    )


def test_a_copied_tree_is_read_and_no_process_asked(tmp_path: Path) -> None:
    for file, text in {
        "sys/class/net/eth0/mtu": "1500",
        "sys/class/net/eth0/operstate": "up",
        "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\n"
        "Max locked memory         8388608              unlimited            bytes",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    host = Host.at(tmp_path)
    assert host.memlock() == (8 << 20, resource.RLIM_INFINITY)
    assert host.netdevs()["eth0"].mtu == 1500
    assert Host.at(tmp_path / "sys").sysfs == tmp_path / "sys"
    codes = {f.code: f.level for f in host_findings(host, NodeConfig())}
    assert codes["libraries_not_asked"] is codes["listen_untried"] is Level.SKIPPED


def test_the_environment_shows_only_what_matters() -> None:
    given = {"ORBIT_DEVICE": "x", "IBV_FORK_SAFE": "1", "HOME": "/root", "AWS_SECRET": "s"}
    assert diagnostic_environment(given) == {"ORBIT_DEVICE": "x", "IBV_FORK_SAFE": "1"}


def test_the_guide_has_a_row_for_every_warning_and_failure() -> None:
    page = (ROOT / "docs/guides/failures.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    modules = [ast.parse(file.read_text("utf-8")) for file in (PACKAGE / "doctor").glob("*.py")]
    codes = {code for module in modules for code in _codes(module)}
    assert codes - rows == set()
    assert rows - codes == set()
    assert len(codes) > 60


def _codes(module: ast.Module) -> Iterator[str]:
    """Of findings that need a fix: given to the call, or kept in a name that says code."""
    places = {"warn": 0, "fail": 0, "at": 1}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            place = places.get(node.func.attr, len(node.args))
            yield from _texts(node.args[place : place + 1])
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                target, value = target.elts[0], value.elts[0]
            if isinstance(target, ast.Name) and "code" in target.id.lower():
                yield from _texts([value])


def _texts(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Dict(values=values):
                yield from _texts(values)
            case ast.IfExp(orelse=bad):  # the first one is what is said when all is well
                yield from _texts([bad])
            case ast.Call(args=[_, default]):
                yield from _texts([default])
