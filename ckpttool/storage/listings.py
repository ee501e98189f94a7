"""Convert fsspec's listings to entries of directories.

The key of an object is any text: its components may be empty, "." or "..", which are not valid names of files. Such an
object becomes one file in the last directory with a valid name; its name is the rest of the key.
"""

from __future__ import annotations

import posixpath
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ckpttool.storage.base import NO_NAMES, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def tree_of(root: str, infos: Iterable[Mapping[str, Any]]) -> dict[str, list[Entry]]:
    """Build the entries of all directories of a tree from a listing of its files.

    Args:
        root: Key of the directory.
        infos: fsspec's infos of all files below it.
    """
    listed: dict[str, dict[tuple[str, bool], Entry]] = {root: {}}
    for info in infos:
        directory, name = _split(root, str(info["name"]))
        if name_of(info) == root or _is_marker(info):
            continue
        listed.setdefault(directory, {})[name, False] = entry_of(info)._replace(name=name)
        while directory != root and len(directory) > len(root):
            above, base = posixpath.split(directory)
            listed.setdefault(above, {}).setdefault((base, True), Entry(base, is_dir=True, nbytes=0))
            directory = above
    return {directory: in_order(entries.values()) for directory, entries in listed.items()}


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries by name; a directory comes before an object of the same name."""
    return sorted(entries, key=lambda e: (e.name, not e.is_dir))


def _split(root: str, key: str) -> tuple[str, str]:
    """Split the key of a file below a root into its directory and its name."""
    if key.startswith(f"{root}/"):
        parts = key[len(root) + 1 :].split("/")
        for number, part in enumerate(parts):
            if part in NO_NAMES:
                return "/".join([root, *parts[:number]]), "/".join(parts[number:])
    return posixpath.split(key)


def name_of(info: Mapping[str, Any]) -> str:
    """Return the key of a file or directory without a trailing slash."""
    return str(info["name"]).rstrip("/")


def _is_marker(info: Mapping[str, Any]) -> bool:
    """Return whether an info is an empty object that stands for a directory; web consoles create them."""
    return str(info["name"]).endswith("/") and info["type"] != "directory" and not info["size"]


def entry_of(info: Mapping[str, Any]) -> Entry:
    """Convert fsspec's info of a file or directory to an entry."""
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
