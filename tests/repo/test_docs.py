"""The documents are whole: links resolve, what they name exists, and nothing is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import orbit
import orbit.sync
from orbit import metrics
from orbit.cli.failures import ExitStatus
from orbit.cli.main import COMMANDS, cli
from orbit.config import KIB, MIB, EngineConfig, NodeConfig
from tests.repo.project import ROOT, sources, tracked_files

PAGES = [path for path in tracked_files() if path.suffix == ".md"]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
AUTODOC = re.compile(r"^\.\. auto(?:class|exception|function|module):: ([\w.]+)$", re.MULTILINE)
DECISION = re.compile(r"\bD(\d{1,2})\b")
MODULE = re.compile(r"`(orbit/[\w/]+\.(?:py|h|c|sh))`")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, as the usual renderers make them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_resolve(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{link}: no such file"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{link}: no such heading"


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    pages = {p for p in PAGES if ROOT / "docs" in p.parents and p.name != "index.md"}
    missing = [page_id(p) for p in pages if f"]({p.relative_to(ROOT / 'docs')})" not in index]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_named_modules_exist(path: Path) -> None:
    missing = [
        name for name in MODULE.findall(path.read_text("utf-8")) if not (ROOT / name).exists()
    ]
    assert not missing


def test_cited_decisions_exist() -> None:
    decisions = (ROOT / "docs/design/decisions.md").read_text("utf-8")
    written = {int(n) for n in re.findall(r"^## D(\d+) ", decisions, re.MULTILINE)}
    for source in sources():
        cited = {int(n) for n in DECISION.findall(source.text)}
        assert cited <= written, f"{source.name} cites {sorted(cited - written)}"


def api_entries() -> list[str]:
    """What the reference from docstrings has, by the names of autodoc's directives."""
    pages = (ROOT / "docs/reference/api").glob("*.md")
    texts = [page.read_text("utf-8") for page in pages]
    return [name for text in texts for name in AUTODOC.findall(text)]


def test_the_reference_has_every_public_name_once() -> None:
    entries = api_entries()
    assert len(entries) == len(set(entries))
    names = {f"orbit.{name}" for name in orbit.__all__ if name != "__version__"}
    names |= {f"orbit.sync.{name}" for name in orbit.sync.__all__}
    assert not names - set(entries)


@pytest.mark.parametrize("entry", api_entries())
def test_what_the_reference_names_exists(entry: str) -> None:
    module, _, name = entry.rpartition(".")
    assert hasattr(import_module(module), name) or import_module(entry)


def yaml_texts() -> list[object]:
    """Files, and blocks of pages."""
    found = []
    for path in tracked_files():
        if path.suffix in (".yml", ".yaml"):
            found.append(pytest.param(path.read_text("utf-8"), id=page_id(path)))
    for path in PAGES:
        for number, (language, text) in enumerate(FENCE.findall(path.read_text("utf-8")), 1):
            if language == "yaml":
                found.append(pytest.param(text, id=f"{page_id(path)}:{number}"))
    return found


@pytest.mark.parametrize("text", yaml_texts())
def test_yaml_parses(text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_reference_names_every_option(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    reference = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    assert f"## orbit {name}" in reference
    section = reference.split(f"## orbit {name}", 1)[1].split("\n## ", 1)[0]
    for option in options_of(command):
        assert f"`{option}" in section, f"{option} is not described"


def options_of(command: click.Command) -> set[str]:
    """Those of its subcommands, too."""
    found = {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in parameter.opts
    }
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return found.union(*map(options_of, below))


def test_every_exit_status_is_described() -> None:
    reference = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    for status in ExitStatus:
        assert f"| {status.value} |" in reference, f"{status!r} is not in the table"


def test_every_knob_is_described() -> None:
    reference = (ROOT / "docs/reference/configuration.md").read_text("utf-8")
    missing = [knob for knob in knobs(NodeConfig()) if f"`{knob}`" not in reference]
    assert not missing


@pytest.mark.parametrize("entry", fields(EngineConfig), ids=lambda entry: entry.name)
def test_every_knob_of_an_engine_is_described_with_its_default(entry: Field[Any]) -> None:
    """A budget in the guide, too: what happens at its limit stands there."""
    default = getattr(EngineConfig(), entry.name)
    row = f"| `engine.{entry.name}` | {shown(entry.name, default)} |"
    pages = ["docs/reference/configuration.md"]
    if entry.name.startswith("max_"):
        pages.append("docs/guides/engine.md")
    for page in pages:
        lines = (ROOT / page).read_text("utf-8").splitlines()
        assert [line for line in lines if line.startswith(row)], f"{page}: no row begins with {row}"


def shown(name: str, value: object) -> str:
    """A default, as tables write it."""
    if is_dataclass(value):
        return f"`{type(value).__name__}()`"
    if not isinstance(value, int | float):
        return f"`{value}`"
    if "bytes" in name:
        return f"{value // MIB:g} MiB" if value >= MIB else f"{value // KIB:g} KiB"
    return f"{value:g}" if value < 10_000 else f"{value:,}"


def knobs(tree: Any, above: str = "") -> Iterator[str]:
    """Every value of a configuration by its path: rdma.pool.initial_arena_bytes."""
    for entry in fields(tree):
        value = getattr(tree, entry.name)
        if is_dataclass(value):
            yield from knobs(value, f"{above}{entry.name}.")
        else:
            yield above + entry.name


def test_every_series_is_described() -> None:
    reference = (ROOT / "docs/reference/metrics.md").read_text("utf-8")
    rows = {f"| `{name}` | {text} |" for name, text in metrics.HELP.items()}
    assert rows <= set(reference.splitlines())
    listed = reference.split("## Every series", 1)[1]
    assert set(re.findall(r"`(orbit_\w+)`", listed)) == set(metrics.HELP)


@pytest.mark.parametrize(
    "word",
    """owner consumer source requester slot lease grant descriptor span region arena rail lane
    path link peer incarnation epoch handle node credit engine parent slice run array fence
tier endpoint address session acquire demand fallback pin helper provider monitor budget lab finding
plan baseline series""".split(),
)
def test_the_glossary_has_every_word(word: str) -> None:
    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    assert re.search(rf"^\| \*\*{word}\*\*", glossary, re.MULTILINE | re.IGNORECASE)
