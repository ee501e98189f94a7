"""Removes a directory so that what is left of it if that fails is not taken for whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zlib
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.base import MARK, walk
from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.posix import sync_directory

if TYPE_CHECKING:
    from ckpttool.storage.base import Storage, WritableStorage


REMOVED = ".removed"
"""What a directory that is being removed is called: its name with a dot before it and this behind it."""


MAX_NAME_BYTES = 255
_ASIDE = re.compile(rf"\..+{re.escape(REMOVED)}")
REMOVAL_MARK = '{"key": "removed", "files": []}'
"""What the mark in a bucket says where a directory is being removed."""
HALF_REMOVED = "half removed by a run that was killed"
"""What is wrong with such a directory."""


def is_half_removed(storage: Storage, path: str) -> bool:
    """Whether a run that was killed has left a directory that it was removing.

    Raises:
        StorageError: It cannot be looked at.
    """
    if not storage.remote:
        return _ASIDE.fullmatch(os.path.basename(path)) is not None
    mark = f"{path}/{MARK}"
    return any(e.name == MARK for e in storage.listing(path)) and storage.read_text(mark) == REMOVAL_MARK


def _aside_name(name: str) -> str:
    """What a directory is called while it is being removed."""
    aside = f".{name}{REMOVED}"
    if len(os.fsencode(aside)) <= MAX_NAME_BYTES:
        return aside
    return f".{zlib.crc32(os.fsencode(name)):08x}{REMOVED}"


def remove_local(path: str) -> None:
    """Remove a directory on local disk.

    Raises:
        StorageError: It cannot be removed.
    """
    above, name = os.path.split(path)
    if os.path.islink(path):
        raise StorageError(path, "is a link, and what it leads to is not removed", "remove the link by hand")
    aside = path if _ASIDE.fullmatch(name) else os.path.join(above, _aside_name(name))
    if os.path.islink(aside):
        aside = os.path.join(above, _aside_name(f"{zlib.crc32(os.fsencode(name)):08x}.{secrets.token_hex(4)}"))
    with translate_os_errors(path):
        if aside != path:
            if os.path.isdir(aside):
                shutil.rmtree(aside)  # a run before this one was killed
            os.rename(path, aside)
            sync_directory(above)  # or after a power failure some of it might be back under its name
        shutil.rmtree(aside)


def remove_remote(storage: WritableStorage, path: str) -> None:
    """Remove all objects below a path; the mark that makes readers refuse it first comes, and goes last.

    Raises:
        StorageError: One cannot be removed.
    """
    names = [name for name, _ in walk(storage, path)]
    storage.put(f"{path}/{MARK}", REMOVAL_MARK.encode())
    storage.delete([f"{path}/{name}" for name in names if name != MARK])
    storage.delete([f"{path}/{MARK}"])
