"""From what the user typed to the directory of one tag."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError, StorageError
from ckpttool.formats.zero_names import parse_name

if TYPE_CHECKING:
    from ckpttool.storage import LocalStorage

LATEST = "latest"
"""The file beside the tags that names the newest one."""


@dataclass(frozen=True, slots=True)
class Location:
    """One checkpoint on a storage."""

    root: str
    """Directory that holds the tag."""
    directory: str
    """Directory of the tag."""
    tag: str
    """Its name."""


def locate(storage: LocalStorage, src: str, tag: str | None) -> Location:
    """Find the tag that is meant.

    ``src`` is a checkpoint root with ``latest`` (a Hugging Face Trainer's ``checkpoint-N`` is one), or a tag's
    directory.

    Raises:
        LayoutError: There is no checkpoint, there are several to choose from, or ``latest`` names what is not there.
        StorageError: It cannot be read.
    """
    src = src.rstrip("/") or src
    if not storage.exists(src):
        raise StorageError(src, "does not exist", "check the path")
    if not storage.is_dir(src):
        raise StorageError(src, "is not a directory", "pass a checkpoint root or a tag's directory")
    entries = storage.list(src)
    if any(parse_name(e.name) for e in entries if not e.is_dir):
        name = posixpath.basename(posixpath.abspath(src))
        if tag is not None and tag != name:
            raise LayoutError(
                src, f"is the directory of tag {name}, not of {tag}", f"pass {posixpath.dirname(src) or '.'}"
            )
        return Location(posixpath.dirname(src) or ".", src, name)
    tags = sorted(
        (e.name for e in entries if e.is_dir and _is_tag(storage, posixpath.join(src, e.name))), key=natural_order
    )
    if tag is None and any(e.name == LATEST and not e.is_dir for e in entries):
        tag = _read_latest(storage, posixpath.join(src, LATEST), tags)
    elif tag is None and len(tags) == 1:
        tag = tags[0]
    elif tag is None and tags:
        raise LayoutError(
            src, f"holds {len(tags)} checkpoints and no latest", f"choose one with --tag: {', '.join(tags)}"
        )
    elif tag is None:
        nested = [e.name for e in entries if e.is_dir and e.name.startswith("checkpoint-")]
        inside = (
            f"pass one of its checkpoints: {', '.join(sorted(nested, key=natural_order))}"
            if nested
            else ("pass a checkpoint root (with a file named latest) or a tag's directory")
        )
        raise LayoutError(src, "holds no DeepSpeed checkpoint", inside)
    elif tag not in tags and not _is_closed(storage, posixpath.join(src, tag)):
        raise LayoutError(src, f"holds no checkpoint of tag {tag!r:.200}", _choose(tags))
    return Location(src, posixpath.join(src, tag), tag)


def _read_latest(storage: LocalStorage, path: str, tags: list[str]) -> str:
    tag = storage.read_text(path).strip()
    if not tag or "/" in tag or tag in {".", ".."} or not tag.isprintable():
        raise LayoutError(path, "does not name a tag", _choose(tags))
    if tag not in tags and not _is_closed(storage, posixpath.join(posixpath.dirname(path), tag)):
        raise LayoutError(path, f"names {tag!r:.200}, which is not there", _choose(tags))
    return tag


def _choose(tags: list[str]) -> str:
    return (
        f"choose one with --tag: {', '.join(tags)}" if tags else "no other checkpoint is there: restore it from a copy"
    )


def _is_tag(storage: LocalStorage, directory: str) -> bool:
    try:
        return any(parse_name(e.name) for e in storage.list(directory) if not e.is_dir)
    except StorageError:
        return False  # a directory that may not be listed is not what the user asked for


def _is_closed(storage: LocalStorage, directory: str) -> bool:
    """A directory that may not be listed. Where it was asked for, reading it will say so."""
    try:
        if storage.is_dir(directory):
            storage.list(directory)
    except StorageError:
        return True
    return False


def natural_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort global_step9 before global_step10."""
    parts: list[tuple[int, int | str]] = []
    digits = ""
    for c in name + "\0":
        if c.isdecimal():
            digits += c
            continue
        if digits:
            parts.append((0, int(digits)))
            digits = ""
        parts.append((1, c))
    return tuple(parts)
