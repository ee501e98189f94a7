"""Every link of a page leads to a page that exists, also if other extensions are removed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from docs.generators.extension_pages import target
from tests.docs.blocks import PAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = re.compile(r"(?:docs|ckpttool/extensions/\w+/docs)/")
LINK = re.compile(r"\{doc\}`(?:[^`<]*<)?([\w/.-]+)>?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_to_pages_of_the_core_and_of_its_own_extension(page: Path) -> None:
    folder = FOLDER.match(page.relative_to(ROOT).as_posix())
    if folder is not None:
        name = page.relative_to(ROOT / folder[0]).as_posix()
        linked = {target(name, link) for link in LINK.findall(page.read_text(encoding="utf-8"))}
        there = [ROOT / "docs", ROOT / folder[0]]
        assert [one for one in sorted(linked) if not any((place / f"{one}.md").is_file() for place in there)] == []


def test_links_are_found() -> None:
    assert sum(len(LINK.findall(page.read_text(encoding="utf-8"))) for page in PAGES) > 100
