"""Read checkpoints on local disk without following symbolic links out of their root.

A checkpoint from an untrusted source may contain a link to any file of this user; a command would show that file, or
copy it to a place where others can read it. This storage follows links inside the checkpoint's root, and links of a
Hugging Face cache from anywhere below ``snapshots`` to its sibling directory ``blobs``.

Source: huggingface_hub 1.0, ``file_download.py`` (``_create_symlink``): ``models--ORG--NAME/snapshots/REVISION/FILE``
is a link to ``../../blobs/ETAG``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LinkError, StorageError
from ckpttool.storage.base import FOLLOW_LINKS, LATEST, LATEST_UNIVERSAL
from ckpttool.storage.local import LOCAL, LocalStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.storage.base import Entry, Storage
    from ckpttool.storage.local_reader import LocalReader


def local_storage(paths: Sequence[str], *, follow_links: bool) -> LocalStorage:
    """Return the storage for checkpoints on local disk.

    Args:
        paths: Directories of the checkpoints.
        follow_links: Whether to follow links that leave the root.
    """
    if follow_links:
        return LOCAL
    return ConfinedStorage(tuple(map(os.path.abspath, paths)))


def confined(storage: Storage, root: str, *, follow_links: bool) -> Storage:
    """Return the storage for reading the checkpoints of a root: ``storage``, or a confined one on local disk.

    Args:
        storage: Storage of the root.
        root: Directory of the checkpoints.
        follow_links: Whether to follow links that leave the root.
    """
    return storage if storage is not LOCAL else local_storage([root], follow_links=follow_links)


def leads_out(storage: Storage, path: str) -> bool:
    """Return whether a path passes a link that the storage does not follow."""
    return isinstance(storage, ConfinedStorage) and not storage.holds(path)


class ConfinedStorage(LocalStorage):
    """Local disk without links that leave the directories of some checkpoints.

    Args:
        bases: Absolute paths of directories or files. The paths to them may contain links. Siblings of a base (a tag's
            directory) must not be links.
    """

    def __init__(self, bases: tuple[str, ...]) -> None:
        self.bases = bases
        """Absolute paths; the resolved paths may differ between nodes."""

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its arguments."""
        return ConfinedStorage, (self.bases,)

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name.

        Raises:
            StorageError: The directory does not exist or cannot be read.
            LinkError: The directory is reached through a link that leaves the checkpoint's root.
        """
        self._check(path, os.path.realpath(path))
        return super().listing(path)

    def open(self, path: str, *, ahead: bool = False) -> LocalReader:
        """Open a file for reading ranges.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
            LinkError: The file is reached through a link that leaves the checkpoint's root.
        """
        self._check(path, os.path.realpath(path))
        reader = super().open(path, ahead=ahead)
        try:  # another process may have replaced a parent directory by a link meanwhile
            self._check(path, os.readlink(f"/proc/self/fd/{reader.fd}"))
        except OSError:
            pass  # not Linux
        except StorageError:
            reader.close()
            raise
        return reader

    def holds(self, path: str) -> bool:
        """Return whether the resolved path is in an allowed directory."""
        real = os.path.realpath(path)
        return any(_is_within(real, base) for base in self._allowed(os.path.abspath(path)))

    def _check(self, path: str, real: str) -> None:
        """Refuse a path whose resolved path is outside the allowed directories."""
        full = os.path.abspath(path)
        if not any(_is_within(real, base) for base in self._allowed(full)):
            problem, hint = (
                "is reached through a link that leaves the checkpoint's root",
                "copy it here, or pass follow_links=True",
            )
            raise LinkError(path, problem, hint, (FOLLOW_LINKS,))

    def _allowed(self, full: str) -> list[str]:
        """Return the directories that may contain the resolved path of ``full``."""
        found: list[str] = []
        for base in self.bases:
            above = os.path.dirname(base)
            if _is_within(full, base):
                found += _link_targets(base)
                if any(os.path.isfile(os.path.join(above, name)) for name in (LATEST, LATEST_UNIVERSAL)):
                    found.append(os.path.realpath(above))
        # The parent of a tag's directory contains sidecar files and other tags.
        return found or _link_targets(os.path.dirname(full))


def _link_targets(base: str) -> list[str]:
    """Return a directory and, in a Hugging Face cache, the directory ``blobs`` of its links' targets.

    The directory may be a snapshot or any directory in one: only the paths above it decide.
    """
    real = os.path.realpath(base)
    above = real if os.path.isdir(real) else os.path.realpath(os.path.dirname(base))
    while (up := os.path.dirname(above)) != above:
        if os.path.basename(up) == "snapshots":
            return [real, os.path.join(os.path.dirname(up), "blobs")]
        above = up
    return [real]


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
