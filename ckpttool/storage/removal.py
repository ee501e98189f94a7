"""Remove a directory so that readers refuse the remaining files after a failure."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

from ckpttool.errors import CkptError, StorageError
from ckpttool.storage.base import MARK, find_text, walk
from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.posix import sync_directory

if TYPE_CHECKING:
    from ckpttool.storage.base import Storage, WritableStorage


REMOVED = ".removed"
"""Suffix of a directory that is being removed; its name also gets the prefix "."."""


MAX_NAME_BYTES = 255
REMOVAL_MARK = '{"key": "removed", "files": []}'
"""Content of the in-progress marker in a remote directory that is being removed."""
HALF_REMOVED = "half removed by a run that was killed"
"""Error message for such a directory."""


def is_half_removed(storage: Storage, path: str) -> bool:
    """Return whether a killed run has removed only a part of a directory.

    Raises:
        StorageError: The directory cannot be read.
    """
    if not storage.remote:
        return _is_aside(os.path.basename(path))
    # A save may commit and delete its marker between the two requests.
    return any(e.name == MARK for e in storage.listing(path)) and find_text(storage, f"{path}/{MARK}") == REMOVAL_MARK


def is_gone(storage: Storage, error: CkptError) -> bool:
    """Return whether an error is about a path that does not exist, or not any more."""
    return not storage.exists(error.path) and not storage.is_dir(error.path)


def _is_aside(name: str) -> bool:
    """Return whether a name is one of ``_aside_name``."""
    return name.startswith(".") and name.endswith(REMOVED) and len(name) > len(f".{REMOVED}")


def _aside_name(name: str) -> str:
    """Return the name of a directory during its removal."""
    aside = f".{name}{REMOVED}"
    if len(os.fsencode(aside)) <= MAX_NAME_BYTES:
        return aside
    return f".{zlib.crc32(os.fsencode(name)):08x}{REMOVED}"


def remove_tree(path: str) -> None:
    """Remove a directory on local disk and all below it."""
    import shutil  # importing it takes longer than listing a checkpoint

    shutil.rmtree(path)


def remove_local(path: str) -> None:
    """Rename a directory on local disk, then remove it.

    Raises:
        StorageError: The directory cannot be removed.
    """
    above, name = os.path.split(path)
    if os.path.islink(path):
        raise StorageError(path, "is a link, and ckpttool does not remove its target", "remove the link by hand")
    aside = path if _is_aside(name) else os.path.join(above, _aside_name(name))
    if os.path.islink(aside):
        aside = os.path.join(above, _aside_name(f"{zlib.crc32(os.fsencode(name)):08x}.{os.urandom(4).hex()}"))
    with translate_os_errors(path):
        if aside != path:
            if os.path.isdir(aside):
                remove_tree(aside)  # left by a killed run
            os.rename(path, aside)
            sync_directory(above)  # otherwise a power failure might bring back some files under the old name
        remove_tree(aside)


def remove_remote(storage: WritableStorage, path: str) -> None:
    """Remove all files below a remote path; write the marker that makes readers refuse it first, delete it last.

    Raises:
        StorageError: A file cannot be removed.
    """
    names = [name for name, _ in walk(storage, path)]
    storage.put(f"{path}/{MARK}", REMOVAL_MARK.encode())
    storage.delete([f"{path}/{name}" for name in names if name != MARK])
    storage.delete([f"{path}/{MARK}"])
