"""Configuration of the documentation: ``make docs`` builds it, strictly and without a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.project import Project
from sphinx.util import inspect
from sphinx.util.inspect import stringify_signature

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ckpttool import __version__  # noqa: E402
from docs.generators import (  # noqa: E402
    drawings,
    error_pages,
    extension_pages,
    growth,
    json_fields,
    summaries,
    support_matrix,
)

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "ckpttool"
author = "the authors of ckpttool"
copyright = "the authors of ckpttool"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated/*.md", "generators"]
html_theme = "furo"
html_static_path = ["_static"]
html_title = f"ckpttool {release}"
html_theme_options = {"navigation_with_keys": True}
myst_enable_extensions = ["deflist", "colon_fence", "substitution"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# The environment of the documentation does not hold these.
autodoc_mock_imports = ["accelerate", "deepspeed", "lightning", "pyarrow", "ray", "torch", "transformers"]
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [
    # Types in signatures that are documented elsewhere, or are plain aliases. Links that a page writes by hand
    # (functions, methods, labels, files) must all resolve.
    (r"py:(class|obj|exc|data)", r"(?!ckpttool\.[a-z]+$).*"),
]


def _generate(app: Sphinx) -> None:
    """Write the pages and drawings that come from the source and from the fixtures."""
    out = HERE / "_generated"
    out.mkdir(exist_ok=True)
    extension_pages.write(out / "extensions")
    error_pages.write(out / "errors")
    summaries.write(out)
    json_fields.write(out / "json.md")
    drawings.write(out)
    growth.write(out)
    if not ((out / "matrix.md").exists() and os.environ.get("DOCS_KEEP_MATRIX")):  # it takes most of the time
        support_matrix.write(out)


def _page(project: Project, path: Any, path2doc: Any = Project.path2doc) -> str | None:
    """The name of a page: of an extension as if it were beside the pages of the core."""
    name = path2doc(project, path)
    return name and extension_pages.COPIES.sub("", name)


def _complete(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the parts and entries of extensions into a page, before it is read."""
    source[0] = extension_pages.completed(name, source[0])


def _signature(app: Sphinx, what: str, name: str, thing: Any, *others: Any) -> tuple[str, str] | None:
    """The signature of ``__init__``: for a class derived from a mocked one, Sphinx finds the signature of the mock."""
    if what != "class" or not any(base.__module__.startswith("sphinx.") for base in thing.__mro__):
        return None
    own = inspect.signature(thing.__init__, bound_method=True)
    return stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), ""


def setup(app: Sphinx) -> None:
    """Register what runs before the pages are read, and while they are."""
    Project.path2doc = _page
    app.add_config_value("pages_of_extensions", [name for name, _ in extension_pages.files()], "env")
    app.connect("builder-inited", _generate)
    app.connect("source-read", _complete)
    app.connect("autodoc-process-signature", _signature)
