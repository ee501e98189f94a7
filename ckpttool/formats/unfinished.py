"""Find saves that have begun and are not finished: neither committed, nor repeated by another program."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.commit import read_mark, split_directory
from ckpttool.commit.marks import below, is_uncommitted
from ckpttool.errors import CkptError
from ckpttool.formats.scan import last_number, named_tag, pattern_of, scan
from ckpttool.formats.series import has_optimizer
from ckpttool.storage import MARK, is_half_removed

if TYPE_CHECKING:
    from ckpttool.storage import Storage


def unfinished_below(storage: Storage, path: str) -> list[str]:
    """Return the directories at or below a path into which a save has begun that is not finished."""
    directories = dict.fromkeys(directory for directory, _ in below(storage, path, MARK))
    return [directory for directory in directories if is_unfinished(storage, directory)]


def is_unfinished(storage: Storage, directory: str) -> bool:
    """Return whether a save into a directory has begun and is not finished."""
    return is_uncommitted(storage, directory) and not saved_by_another(storage, directory)


def saved_by_another(storage: Storage, directory: str) -> bool:
    """Return whether another program, as DeepSpeed itself, has saved the tag of a killed save again.

    Such a program leaves the marker there. All files are whole then, and ``latest``, which a save writes after its
    manifest, names the tag and did not when the save began; or a checkpoint of a later step without a manifest is
    newer than the marker.
    """
    marked = storage.exists(posixpath.join(directory, MARK)) and not is_half_removed(storage, directory)
    if not marked or not is_uncommitted(storage, directory):
        return False
    from ckpttool.formats.opening import open_unfinished  # it refuses unfinished saves

    root, tag = split_directory(directory)
    try:
        if named_tag(storage, root) != tag or read_mark(storage, directory).get("latest", tag) == tag:
            began = _modified(storage, directory, MARK)
            later = (one for one in scan(storage, root, depth=1) if one.is_tag and _is_later(one.tag, tag))
            plain = (one for one in later if not (one.committed or one.damaged or is_uncommitted(storage, one.path)))
            if not any(_modified(storage, one.path) > began for one in plain):
                return False
        return all(has_optimizer(one) for one in open_unfinished(storage, directory))
    except CkptError:
        return False


def _is_later(other: str, tag: str) -> bool:
    return pattern_of(other) == pattern_of(tag) and last_number(other) > last_number(tag)


def _modified(storage: Storage, directory: str, name: str = "") -> float:
    """Return the time of the newest file in a directory, or of the one with a name; 0 if it is unknown."""
    entries = storage.listing(directory)
    return max((e.modified or 0.0 for e in entries if not e.is_dir and name in {"", e.name}), default=0.0)
