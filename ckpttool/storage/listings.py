"""What fsspec's listings say, as entries of directories.

The key of an object is any text: its parts may be empty, "." or "..", which are no names of files. Such an object is
listed as one file with all of the rest of its key for a name, in the last directory that has a plain name.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ckpttool.storage.base import NO_NAMES, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def tree_of(root: str, infos: Iterable[Mapping[str, Any]]) -> dict[str, list[Entry]]:
    """The entries of a directory and of all below it, from a listing of its files.

    Args:
        root: The directory.
        infos: All files below it.
    """
    listed: dict[str, dict[tuple[str, bool], Entry]] = {root: {}}
    for info in infos:
        directory, name = _split(root, str(info["name"]))
        if name_of(info) == root or _is_marker(info):
            continue
        listed.setdefault(directory, {})[name, False] = replace(entry_of(info), name=name)
        while directory != root and len(directory) > len(root):
            above, base = posixpath.split(directory)
            listed.setdefault(above, {}).setdefault((base, True), Entry(base, is_dir=True, nbytes=0))
            directory = above
    return {directory: in_order(entries.values()) for directory, entries in listed.items()}


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries by name; where an object has the name of a directory, that comes first."""
    return sorted(entries, key=lambda e: (e.name, not e.is_dir))


def _split(root: str, key: str) -> tuple[str, str]:
    """The directory of a file below a root, and its name in it."""
    if key.startswith(f"{root}/"):
        parts = key[len(root) + 1 :].split("/")
        for number, part in enumerate(parts):
            if part in NO_NAMES:
                return "/".join([root, *parts[:number]]), "/".join(parts[number:])
    return posixpath.split(key)


def name_of(info: Mapping[str, Any]) -> str:
    """The path of a file or directory."""
    return str(info["name"]).rstrip("/")


def _is_marker(info: Mapping[str, Any]) -> bool:
    """Whether it is an empty object in a directory's place, as consoles leave them."""
    return str(info["name"]).endswith("/") and info["type"] != "directory" and not info["size"]


def entry_of(info: Mapping[str, Any]) -> Entry:
    """What fsspec tells of a file or directory."""
    is_dir = info["type"] == "directory"
    keys = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "mtime", "modified", "created")
    version = next((str(info[k]) for k in keys if info.get(k)), "")
    times = (info.get(k) for k in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"))
    modified = next((_seconds(t) for t in times if t), None)
    return Entry(
        posixpath.basename(name_of(info)), is_dir, 0 if is_dir else int(info["size"] or 0), version.strip('"'), modified
    )


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    return value.timestamp() if isinstance(value, datetime) else None
