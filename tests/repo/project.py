"""What the repository gates look at: the project's files, parsed once.

Knows the layout of the checkout and nothing about what any gate asserts.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "orbit"
# Programs of the VM: they run under the guest's interpreter and import nothing of orbit.
GUEST = PACKAGE / "softroce" / "guest"


@dataclass(frozen=True, slots=True)
class Source:
    """One Python module of the package."""

    path: Path
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @property
    def name(self) -> str:
        """Path under the checkout, with forward slashes: orbit/protocol/codec.py."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """What a relative import of level 1 is relative to."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every module that is imported anywhere in the file, absolute, with its line.

        `from x import y` yields x.y, which may name a module or something in it.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.package.split(".")
        base = ".".join(parts[: len(parts) - (node.level - 1)])
        return f"{base}.{node.module}" if node.module else base


@cache
def sources() -> tuple[Source, ...]:
    """Every module of the package, without the VM's own programs."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if GUEST in path.parents:
            continue
        text = path.read_text(encoding="utf-8")
        found.append(Source(path, text, ast.parse(text, str(path))))
    return tuple(found)


@cache
def tracked_files() -> tuple[Path, ...]:
    """What belongs to the project: tracked files, and new ones that git does not ignore."""
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", *"ls-files -z -c -o --exclude-standard".split()],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    paths = (ROOT / name for name in listing.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())
