"""List the directories of a root that may be checkpoints.

All code that opens, lists, restores, rotates or removes checkpoints filters and sorts these records. The module is in
``formats`` because ``formats.locate`` and ``saving`` need it, which may not import ``catalog``.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ckpttool.commit import is_commit
from ckpttool.errors import CkptError, StorageError
from ckpttool.formats.zero.files import is_of_tag
from ckpttool.storage import LATEST, MARK, find_text, is_gone, is_link, is_linked, leading_nowhere
from ckpttool.storage.base import DAMAGED
from ckpttool.storage.confined import leads_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.commit.manifest import Manifest
    from ckpttool.storage import Entry, Storage

MAX_PARTS = 4
"""Most components of a tag."""
RELINK = "write the name of a tag into it, or pass tag to choose a checkpoint"
"""Hint for a link ``latest`` that leads nowhere."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Found:
    """A directory below a root that may be a checkpoint. Its properties are read on demand."""

    storage: Storage
    """Storage of the root."""
    root: str
    """Path or URL of the root."""
    tag: str
    """Path of the directory relative to the root."""
    modified: float | None = None
    """Modification time of the directory in seconds since 1970; None if the storage does not report one."""

    @property
    def path(self) -> str:
        """Path or URL of the directory."""
        return posixpath.join(self.root, self.tag)

    @property
    def hidden(self) -> bool:
        """Whether the name begins with a dot, such as the name of a directory of a killed removal."""
        return posixpath.basename(self.tag).startswith(".")

    @property
    def outside(self) -> bool:
        """Whether the directory is reached through a link that the storage does not follow."""
        return leads_out(self.storage, self.path)

    @property
    def link(self) -> str | None:
        """Resolved path of a directory that is reached through a link below the root; None for others."""
        return os.path.realpath(self.path) if is_linked(self.storage, self.root, self.path) else None

    @property
    def entries(self) -> list[Entry]:
        """The entries of the directory.

        Raises:
            StorageError: It cannot be listed; another process may have removed it.
        """
        return self.storage.listing(self.path)

    @property
    def is_tag(self) -> bool:
        """Whether it is the directory of a tag, not a root with files of ranks in it; False if it cannot be listed."""
        try:
            entries = self.entries
            if not has_files_of_tag(entries) or LATEST not in {entry.name for entry in entries}:
                return has_files_of_tag(entries)
            from ckpttool.formats.layouts import TAG, Place  # few tags contain latest

            return Place(self.storage, self.path).kind == TAG
        except StorageError:
            return False

    @property
    def marked(self) -> bool:
        """Whether the directory has an in-progress marker that counts: no other program has saved the tag since."""
        from ckpttool.formats.unfinished import saved_by_another  # few checkpoints have the marker

        return any(e.name == MARK for e in self.entries) and not saved_by_another(self.storage, self.path)

    @cached_property
    def damage(self) -> str | None:
        """Why a restore has skipped it, if a save has marked it so; None without a mark."""
        from ckpttool.commit.marks import damage_of  # few checkpoints have the mark

        return damage_of(self.storage, self.path) if any(entry.name == DAMAGED for entry in self.entries) else None

    @property
    def damaged(self) -> bool:
        """Whether it has the mark of a skipped checkpoint, and no file changed since the mark."""
        return self.damage is not None

    @cached_property
    def committed(self) -> bool:
        """Whether the directory is a commit."""
        return is_commit(self.storage, self.path)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of a commit, without the files; None if it cannot be read."""
        from ckpttool.commit.manifest import read_manifest  # most commands do not need it

        try:
            return replace(read_manifest(self.storage, self.path), files={}) if self.committed else None
        except CkptError:
            return None

    @property
    def thin(self) -> bool:
        """Whether it is a commit of a thin checkpoint."""
        return self.manifest is not None and bool(self.manifest.thin)

    @property
    def step(self) -> int:
        """The step of the manifest, or else the last number in the tag; -1 without a number."""
        return last_number(self.tag) if self.manifest is None else self.manifest.step


def scan(storage: Storage, root: str, *, depth: int = MAX_PARTS, above: str = "") -> list[Found]:
    """Return the directories below a root, also hidden ones and links, and those in directories without files.

    Args:
        storage: Storage of the root.
        root: The directory; if it does not exist, nothing is found.
        depth: Most components of a tag; with 1 the directories themselves are not listed.
        above: Return only the directories in this one, a path relative to the root.

    Raises:
        StorageError: A directory cannot be listed, and no other process has removed it.
    """
    directory = posixpath.join(root, above) if above else root
    found = []
    for entry in storage.listing(directory) if storage.is_dir(directory) else []:
        if not entry.is_dir or (entry.name == LATEST and is_link(storage, posixpath.join(directory, entry.name))):
            continue
        found.append(one := Found(storage, root, posixpath.join(above, entry.name), entry.modified))
        if depth > 1 and not one.hidden and not one.outside and _has_only_directories(one):
            found += scan(storage, root, depth=depth - 1, above=one.tag)
    return found


def _has_only_directories(one: Found) -> bool:
    try:
        entries = one.entries
    except StorageError as error:
        if not is_gone(one.storage, error):
            raise
        return False
    return bool(entries) and all(entry.is_dir for entry in entries)


def commits(found: Iterable[Found]) -> list[Found]:
    """Return the commits among the directories of a scan, without hidden and damaged ones."""
    return [one for one in found if not one.hidden and not one.outside and one.committed and not one.damaged]


def has_files_of_tag(entries: Iterable[Entry]) -> bool:
    """Return whether a directory with these entries is the directory of a tag."""
    return any(is_of_tag(entry.name) for entry in entries if not entry.is_dir)


def named_tag(storage: Storage, root: str, latest: str = LATEST) -> str:
    """Return the tag that the file ``latest`` of a root names, which may not exist; "" without one.

    A link ``latest`` to the directory of a tag names that tag.

    Raises:
        StorageError: The file cannot be read, or is a link that leads nowhere.
        LinkError: It is a link that the storage does not follow.
    """
    path = posixpath.join(root, latest)
    if is_link(storage, path):
        if not os.path.exists(path):
            raise StorageError(path, leading_nowhere(path), RELINK)
        if os.path.isdir(path):
            storage.listing(path)  # raises the LinkError
            return os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    return tag_in(find_text(storage, path) or "")


def tag_in(text: str) -> str:
    """Return the tag that the content of a ``latest`` file names, which may not exist; "" without one.

    DeepSpeed joins the text to the root, so that "./TAG/" means TAG; some editors prepend a byte order mark.
    """
    text = text.strip().removeprefix("\ufeff").strip()
    return "/".join(part for i, part in enumerate(text.rstrip("/").split("/")) if part != "." or i)


def natural_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts global_step9 before global_step10."""
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


def pattern_of(name: str) -> str:
    """Return a name with "#" for each number."""
    return _NUMBER.sub("#", name)


def last_number(name: str) -> int:
    """Return the last number in a name; -1 without one."""
    return next((int(value) for kind, value in reversed(natural_order(name)) if kind == 0), -1)
