"""What the documentation names exists: modules, functions and classes of the package, and files of the repository."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ckpttool"
TOP = {path.stem for path in PACKAGE.iterdir()}
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "fixtures/README.md")
]
PAGES += [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.relative_to(ROOT / "docs").parts[0][0] != "_"]
PAGES += sorted((PACKAGE / "extensions").glob("*/docs/**/*.md"))
SOURCES = sorted(PACKAGE.rglob("*.py"))
NAME = re.compile(r"`(?:ckpttool\.)?([a-z_]+(?:\.[A-Za-z_0-9]+)+)`")
FILE = re.compile(r"\b(?:ckpttool|tests|fixtures|docs|examples|benchmarks)/[A-Za-z_0-9/]+\.(?:py|md|js)\b")
QUOTED_FILE = re.compile(r"`([A-Za-z_0-9./]+\.(?:py|toml|md))`")
PLACEHOLDER = re.compile(r"NAME|/a/")
NAME_OF_FILE = re.compile(r"`(\w+)` (?:of|in) `(ckpttool/[\w/]+\.py)`")
NO_MODULE = re.compile(r"\.(?:pkl|safetensors|json|NAME)$|^(?:model|data)\.(?:safetensors|NAME)\b")
"""Files and keys of checkpoints that begin like a module."""


def _exists(name: str) -> bool:
    """Whether a dotted name leads to a module, to a name at the top of one, or to an attribute of a class there."""
    place, parts = PACKAGE, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    is_module = parts and (place / f"{parts[0]}.py").is_file()
    path = place / (f"{parts.pop(0)}.py" if is_module else "__init__.py")
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in parts:
        found = [node for node in body if part in _names(node)]
        if not found:
            return False
        body = found[0].body if isinstance(found[0], ast.ClassDef) else []
    return True


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module or class binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _missing(text: str) -> list[str]:
    """The names of modules, or of what is in them, that do not exist."""
    named = {name for name in NAME.findall(text) if name.split(".")[0] in TOP and not NO_MODULE.search(name)}
    return [name for name in sorted(named) if not _exists(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_and_their_names_exist(page: Path) -> None:
    assert _missing(page.read_text(encoding="utf-8")) == []


def test_docstrings_and_comments_name_what_exists() -> None:
    missing = {str(path.relative_to(ROOT)): _missing(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: names for path, names in missing.items() if names} == {}


def test_names_are_found() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(set(NAME.findall(text))) > 30


@pytest.mark.parametrize("name", ["execution.copy.Copied", "execution.local", "execution.copy.Copier.moves", "plan.no"])
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert _missing(f"see `execution.copy.Copier.split`, `{name}` and `model.safetensors`") == [name]


def test_files_exist() -> None:
    named = {(page.name, name) for page in PAGES for name in FILE.findall(page.read_text(encoding="utf-8"))}
    named = {(page, name) for page, name in named if not PLACEHOLDER.search(name)}
    assert [one for one in sorted(named) if not (ROOT / one[1]).exists()] == []
    assert len(named) > 20


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "tests/README.md"])
def test_files_that_a_page_for_developers_names_from_where_it_is_exist(page: str) -> None:
    named = {n for n in QUOTED_FILE.findall((ROOT / page).read_text(encoding="utf-8")) if not PLACEHOLDER.search(n)}
    above = [(ROOT / page).parent, ROOT, PACKAGE, *(ROOT / "tests").iterdir()]
    assert [name for name in sorted(named) if not any((place / name).exists() for place in above)] == []
    assert named


def test_contributing_names_what_is_in_its_files() -> None:
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    pairs = NAME_OF_FILE.findall(text)
    assert [p for p in pairs if not re.search(rf"\b{p[0]}\b", (ROOT / p[1]).read_text(encoding="utf-8"))] == []
    assert len(pairs) > 5
