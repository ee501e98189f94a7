"""Pages of extensions: read under the addresses of the pages beside them; a removed extension has no pages.

``ckpttool/extensions/NAME/docs`` has the structure of ``docs``. A file with the name of a page there is a part of that
page: its text is put at the line ``PARTS``, or else at the end. All others are pages. A page begins with a line for the
index of its directory, which names the page of the core after which it is listed:
``<!-- after train-loop: one callback -->``.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.registry import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS_FOLDER = ROOT / "ckpttool" / "extensions"
PARTS = "<!-- parts of extensions -->\n"
LINK = re.compile(r"\{page\}`([\w/.-]+)`")
COPIES = re.compile(r"^_generated/extensions/\w+/")
"""Where ``write`` puts copies; relative paths from there to files outside of ``docs`` are the same."""


def files() -> Iterator[tuple[str, Path]]:
    """Yield each file with its name as a page, such as "howto/average", in the order of the rows."""
    for row in EXTENSIONS:
        folder = EXTENSIONS_FOLDER / row.name / "docs"
        for path in sorted(folder.rglob("*.md")):
            yield path.relative_to(folder).with_suffix("").as_posix(), path


def is_part(name: str) -> bool:
    """Return whether a file of an extension is a part of a page of the core."""
    return (ROOT / "docs" / f"{name}.md").exists()


def write(out: Path) -> None:
    """Copy the pages to where Sphinx finds them."""
    shutil.rmtree(out, ignore_errors=True)
    for name, path in files():
        if not is_part(name):
            copy = out / path.relative_to(EXTENSIONS_FOLDER).parts[0] / f"{name}.md"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


def completed(name: str, text: str) -> str:
    """Return the text of a page with its parts, its entries if it is the index, and its links to pages of extensions.

    A link is written as "{page}`NAME`". Of an extension that is removed it is the name alone.
    """
    pages = dict(files())
    before, _, after = text.partition(PARTS)
    text = "\n".join([before, *(part.read_text("utf-8") for page, part in files() if page == name), after])
    for page, path in reversed(pages.items()):
        if name == posixpath.join(posixpath.dirname(page), "index") and not is_part(page):
            text = _listed(text, posixpath.basename(page), path)

    def link(found: re.Match[str]) -> str:
        return f"{{doc}}`{found[1]}`" if target(name, found[1]) in pages else posixpath.basename(found[1])

    return LINK.sub(link, text)


def target(name: str, link: str) -> str:
    """Return the name of the page to which a page links."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def _listed(index: str, name: str, path: Path) -> str:
    """Return the index with the entry of a page in its list, if it has one, and in its table of contents."""
    for after, told in re.findall(r"\A<!-- after (\S+): (.+) -->\n", path.read_text("utf-8")):
        index = re.sub(rf"(?m)^- {{doc}}`{after}`.*\n", rf"\g<0>- {{doc}}`{name}`: {told}\n", index)
        index = re.sub(rf"(?m)^{after}\n", rf"\g<0>{name}\n", index)
    return index
