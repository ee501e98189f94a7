"""What the documentation names exists: modules, functions and classes of the package, and files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "ckpttool"
TOP = {path.stem for path in PACKAGE.iterdir()}
PAGES = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if path.name != "CHANGELOG.md"]
NAME = re.compile(r"`(?:ckpttool\.)?([a-z_]+(?:\.[A-Za-z_0-9]+)+)`")
FILE = re.compile(r"\b(?:ckpttool|tests)/[A-Za-z_0-9/]+\.py\b")


def _exists(name: str) -> bool:
    """Whether a dotted name leads to a module, or to a name at the top of one."""
    place, parts = PACKAGE, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    is_module = parts and (place / f"{parts[0]}.py").is_file()
    path = place / (f"{parts.pop(0)}.py" if is_module else "__init__.py")
    if not parts:
        return True
    text = path.read_text(encoding="utf-8")
    return bool(re.search(rf"^(?:def|class) {parts[0]}\b|^{parts[0]}\b", text, re.MULTILINE))


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_modules_and_their_names_exist(page: str) -> None:
    named = {n for n in NAME.findall((ROOT / page).read_text(encoding="utf-8")) if n.split(".")[0] in TOP}
    assert [name for name in sorted(named) if not _exists(name)] == []
    assert page != "docs/architecture.md" or len(named) > 30


def test_a_name_that_does_not_exist_is_found() -> None:
    assert _exists("execution.copy.Copier")
    assert not _exists("execution.copy.Copied")
    assert not _exists("execution.local")


def test_files_exist() -> None:
    named = {(page.name, name) for page in PAGES for name in FILE.findall(page.read_text(encoding="utf-8"))}
    named = {(page, name) for page, name in named if "NAME" not in name}
    assert [one for one in sorted(named) if not (ROOT / one[1]).exists()] == []
    assert len(named) > 5
