"""Size budgets: what no longer fits one head is split before it grows on."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator

import pytest

from tests.repo.project import ROOT, Source, sources

FILE_LINES_MAX = 600
FILE_LINES_MEDIAN = 150
FUNCTION_LINES_MAX = 70
CLASS_METHODS_MAX = 25
INIT_FIELDS_MAX = 15
LINE_COLUMNS_MAX = 100
# A docstring that names the owner of a module fits in a few lines; more belongs to docs/.
BANNED_NAMES = {"utils", "common", "helpers", "base", "misc"}

MODULES = [pytest.param(source, id=source.name) for source in sources()]


@pytest.mark.parametrize("source", MODULES)
def test_lines(source: Source) -> None:
    lines = source.text.splitlines()
    assert len(lines) <= FILE_LINES_MAX
    wide = [n for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX]
    assert not wide, f"lines over {LINE_COLUMNS_MAX} columns: {wide}"


def test_the_median_file_is_small() -> None:
    lengths = [len(s.text.splitlines()) for s in sources() if s.text.strip()]
    assert statistics.median(lengths) <= FILE_LINES_MEDIAN, sorted(lengths)


@pytest.mark.parametrize("source", MODULES)
def test_functions(source: Source) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} (line {node.lineno}): {length} lines"


@pytest.mark.parametrize("source", MODULES)
def test_classes(source: Source) -> None:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            methods = [
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            assert len(methods) <= CLASS_METHODS_MAX, f"{node.name}: {len(methods)} methods"
            fields = {name for m in methods if m.name == "__init__" for name in own_fields(m)}
            assert len(fields) <= INIT_FIELDS_MAX, f"{node.name}: {len(fields)} fields in __init__"


def own_fields(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


@pytest.mark.parametrize("source", MODULES)
def test_names_and_docstrings(source: Source) -> None:
    assert source.path.stem not in BANNED_NAMES
    if source.text.strip():
        assert ast.get_docstring(source.tree), "the module says in a docstring what it owns"


def test_top_level_of_the_checkout() -> None:
    wanted = "README.md ARCHITECTURE.md CONTRIBUTING.md LICENSE Makefile pyproject.toml .ci/run"
    missing = [name for name in wanted.split() if not (ROOT / name).is_file()]
    assert not missing
