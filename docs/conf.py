"""How Sphinx builds the documents: `make docs`.

The pages are the Markdown files of the checkout, as they are read on a forge; what only Sphinx
needs is made here. The navigation is the index page's own list of links, so that there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import orbit  # noqa: E402  the package of this checkout, wherever Sphinx was started

project = "orbit"
author = "the orbit authors"
copyright = author
version = release = orbit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.mermaid"]

# The source directory is the checkout, because pages link to each other across its folders.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "hardware/*.md"]
exclude_patterns = ["build", "dist", ".*", "tests", "orbit"]

myst_heading_anchors = 4  # links name headings the way forges do
myst_fence_as_directive = ["mermaid"]
highlight_language = "none"
smartquotes = False  # docstrings quote code
default_role = "code"  # docstrings write names in single backticks
nitpicky = True

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"orbit {version}"
html_extra_path = ["html"]
html_copy_source = False

# Types that have no page here: those of other projects, which are not looked up over the network,
# and names that annotations have for type checkers alone.
nitpick_ignore_regex = [
    ("py:.*", r"(?:_asyncio|asyncio|collections|logging|os|pathlib|ssl|types|typing|wsgiref)\..*"),
    ("py:.*", r"(?:prometheus_client)\..*"),
    ("py:class", r"\w+|(?:str \| )?tuple\[str|.*\.(?:\w+T|Function|Sending)"),
    ("py:class", r"orbit\.model\.(?:WorkerId|Incarnation|SlotId|LeaseId)"),
]

INDEX_ENTRY = re.compile(r"\]\(([\w./-]+)\.md\)")
INTERNAL_NAME = re.compile(r"\borbit\.(?!model|events)[\w.]+\.(\w+)")
INDEX_GROUP = re.compile(r"^\*\*([\w ]+)\.\*\*(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Behind the index page, a hidden table of contents for each of its groups."""
    if docname != root_doc:
        return
    for caption, links in INDEX_GROUP.findall(source[0]):
        pages = "\n".join("/" + page_of(link) for link in INDEX_ENTRY.findall(links))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def page_of(link: str) -> str:
    """A link of the index page as a document of the checkout."""
    return str((ROOT / "docs" / f"{link}.md").resolve().relative_to(ROOT).with_suffix(""))


def resolve_public_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Any
) -> Any:
    """Annotations name the module that a class is made in; the reference has its public name."""
    module, _, name = str(node.get("reftarget", "")).rpartition(".")
    for public in ("orbit", "orbit.metrics"):
        if module.startswith(f"{public}."):
            domain, page, target = env.get_domain("py"), node["refdoc"], f"{public}.{name}"
            found = domain.resolve_xref(env, page, app.builder, "obj", target, node, content)
            if found is not None:
                return found
    return None


def hide_constructor(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Of classes that only orbit makes: their parameters are of types that nobody else has."""
    internal = INTERNAL_NAME.findall(signature or "") if what == "class" else []
    if any(found not in orbit.__all__ for found in internal):
        return "", ""
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("missing-reference", resolve_public_name)
    return {"parallel_read_safe": True}
