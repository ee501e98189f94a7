"""Checkpoints on local disk whose symbolic links lead nowhere else.

A checkpoint from somebody else may hold a link to any file of this user, and a command would show it, or copy it to
where others read it. Links that stay inside the checkpoint's root are followed. So are those of a Hugging Face cache,
whose ``snapshots`` are links into the ``blobs`` beside them.

Source: huggingface_hub 1.0, ``file_download.py`` (``_create_symlink``): ``models--ORG--NAME/snapshots/REVISION/FILE``
is a link to ``../../blobs/ETAG``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LinkError, StorageError
from ckpttool.storage.base import FOLLOW_LINKS
from ckpttool.storage.local import LOCAL, LocalReader, LocalStorage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.storage.base import Entry, Storage

LATEST = ("latest", "latest_universal")
"""What lies in a checkpoint's root."""


def local_storage(paths: Sequence[str], options: Mapping[str, Any] | None) -> LocalStorage:
    """The storage of checkpoints on local disk.

    Args:
        paths: Their directories.
        options: With ``follow_links`` links may lead anywhere.
    """
    if options and options.get(FOLLOW_LINKS):
        return LOCAL
    return ConfinedStorage(tuple(map(os.path.abspath, paths)))


def confined(storage: Storage, root: str, options: Mapping[str, Any] | None) -> Storage:
    """The storage that a root's checkpoints are read from: the same, but for links that leave a root on local disk.

    Args:
        storage: Where the root lies.
        root: Its path.
        options: With ``follow_links`` links may lead anywhere.
    """
    return storage if storage is not LOCAL else local_storage([root], options)


def leads_out(storage: Storage, path: str) -> bool:
    """Whether a path goes through a link that the storage does not follow."""
    return isinstance(storage, ConfinedStorage) and not storage.holds(path)


class ConfinedStorage(LocalStorage):
    """Files on local disk, as far as they lie where their paths say.

    Args:
        bases: Directories, or files, by their full paths. They themselves may be reached through links. What lies
            beside one of them (a tag's directory) may be no link.
    """

    def __init__(self, bases: tuple[str, ...]) -> None:
        self.bases = bases
        """Full paths; what they really are may differ between nodes."""

    def listing(self, path: str) -> list[Entry]:
        """The names in a directory, sorted.

        Raises:
            StorageError: There is no such directory, or it cannot be read.
            LinkError: It is reached through a link that leaves the checkpoint's root.
        """
        self._check(path, os.path.realpath(path))
        return super().listing(path)

    def open(self, path: str, *, ahead: bool = False) -> LocalReader:
        """Open a file for reading ranges.

        Raises:
            StorageError: It is missing, not a file, or not permitted.
            LinkError: It is reached through a link that leaves the checkpoint's root.
        """
        self._check(path, os.path.realpath(path))
        reader = super().open(path, ahead=ahead)
        try:  # a directory above it may have been replaced by a link meanwhile
            self._check(path, os.readlink(f"/proc/self/fd/{reader.fd}"))
        except OSError:
            pass  # no Linux
        except StorageError:
            reader.close()
            raise
        return reader

    def holds(self, path: str) -> bool:
        """Whether a path leads nowhere else."""
        real = os.path.realpath(path)
        return any(_is_within(real, base) for base in self._allowed(os.path.abspath(path)))

    def _check(self, path: str, real: str) -> None:
        """Refuse a path that leads somewhere else."""
        full = os.path.abspath(path)
        if not any(_is_within(real, base) for base in self._allowed(full)):
            hint = "copy it here, or pass --follow-links (follow_links in storage_options)"
            raise LinkError(path, "is reached through a link that leaves the checkpoint's root", hint)

    def _allowed(self, full: str) -> list[str]:
        """The real directories in which something may lie that has a path."""
        found: list[str] = []
        for base in self.bases:
            above = os.path.dirname(base)
            if _is_within(full, base):
                found += _places(base)
                if any(os.path.isfile(os.path.join(above, name)) for name in LATEST):
                    found.append(os.path.realpath(above))
        # Beside a tag's directory lie small files that belong to it, and other tags.
        return found or _places(os.path.dirname(full))


def _places(base: str) -> list[str]:
    """A directory and, in a Hugging Face cache, where its links lead to."""
    real = os.path.realpath(base)
    places = [real]
    snapshots = os.path.dirname(real if os.path.isdir(real) else os.path.dirname(base))
    if os.path.basename(snapshots) == "snapshots":
        places.append(os.path.join(os.path.dirname(snapshots), "blobs"))
    return places


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
