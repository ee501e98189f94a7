"""Find checkpoints of other runs below a checkpoint: a removal of the directory would take them along."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.commit.marks import own_directories
from ckpttool.errors import CkptError
from ckpttool.formats import open_every
from ckpttool.formats.scan import has_files_of_tag
from ckpttool.messages import printable
from ckpttool.storage import MANIFEST

if TYPE_CHECKING:
    from ckpttool.storage import Storage


def others_below(storage: Storage, path: str) -> list[str]:
    """Return the checkpoints below the directory of a checkpoint that are not its own, relative to it.

    Its own are those that a reader opens at the path: of a trainer's folder, or of each of several engines. If it
    cannot be opened, the ones nearest to the path are.

    Raises:
        StorageError: A directory cannot be listed.
    """
    holding = [
        directory.removeprefix(path).strip("/")
        for directory, entries in own_directories(storage, path)
        if has_files_of_tag(entries) or any(entry.name == MANIFEST for entry in entries)
    ]
    below = [name for name in holding if name]
    if not below:
        return []
    try:
        own = {one.location.removeprefix(path).strip("/") for one in open_every(storage, path)}
    except CkptError:
        nearest = min(name.count("/") if name else -1 for name in holding)
        own = {name for name in holding if (name.count("/") if name else -1) == nearest}
    above = {part for name in own for part in _prefixes(name)}  # the manifest of several engines is above them
    return sorted(name for name in below if name not in own | above)


def _prefixes(name: str) -> list[str]:
    found = []
    while name := posixpath.dirname(name):
        found.append(name)
    return found


def why_kept(storage: Storage, path: str) -> str | None:
    """Return why the directory of a checkpoint must not be removed; None without other checkpoints below it.

    Raises:
        StorageError: A directory cannot be listed.
    """
    others = others_below(storage, path)
    more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
    return printable(f"contains checkpoints: {', '.join(others[:3])}{more}") if others else None
