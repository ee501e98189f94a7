"""``pin`` and ``unpin``: keep a checkpoint from every retention rule."""

from __future__ import annotations

import posixpath
import time
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError, PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.commit.pins import Pin
    from ckpttool.formats import Source
    from ckpttool.storage import WritableStorage


def pin(
    src: Source, *, why: str, tag: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Pin:  # fmt: skip
    """Pin a checkpoint: no rule of ``prune``, ``CheckpointManager`` or a trainer's rotation removes or thins it.

    The pin is a small file in its directory. It replaces an earlier pin, and goes with the directory: a save that
    replaces the checkpoint removes it.

    Args:
        src: As for ``inspect``; one directory.
        why: The reason, for people.
        tag: As for ``inspect``.
        storage_options: As for ``inspect``.

    Raises:
        CkptError: There is no sound checkpoint, the reason is empty, or the pin cannot be written.
    """
    from ckpttool.commit.pins import Pin, write_pin

    if not why.strip():
        raise ArgumentError("why", "is empty", "say why the checkpoint is to be kept")
    storage, directory = _find(src, tag, storage_options)
    made = Pin(_who(), time.time(), why.strip())
    write_pin(storage, directory, made)
    return made


def unpin(src: Source, *, tag: str | None = None, storage_options: Mapping[str, Any] | None = None) -> Pin:
    """Remove the pin of a checkpoint; return it.

    Args:
        src: As for ``pin``.
        tag: As for ``inspect``.
        storage_options: As for ``inspect``.

    Raises:
        PlanError: The checkpoint is not pinned.
        CkptError: There is no checkpoint, or the pin cannot be removed.
    """
    from ckpttool.commit.pins import find_pin
    from ckpttool.storage import PIN

    storage, directory = _find(src, tag, storage_options)
    found = find_pin(storage, directory)
    if found is None:
        raise PlanError(directory, "is not pinned", "ls shows which checkpoints are")
    storage.delete([posixpath.join(directory, PIN)])
    return found


def _find(src: Source, tag: str | None, storage_options: Mapping[str, Any] | None) -> tuple[WritableStorage, str]:
    """Return the storage and the directory of a checkpoint; a pinned directory need not be sound."""
    from ckpttool.formats import open_checkpoint, source_paths
    from ckpttool.storage import PIN, local_path, open_storage, without_credentials

    paths = source_paths(src)
    if len(paths) > 1:
        raise ArgumentError("src", "names several directories", "pass one of them")
    storage = open_storage(paths[0], storage_options)
    path = without_credentials(local_path(paths[0])).rstrip("/") or paths[0]
    if tag is None and storage.is_dir(path) and storage.exists(posixpath.join(path, PIN)):
        return storage, path
    return storage, open_checkpoint(paths[0], tag=tag, options=storage_options).location


def _who() -> str:
    """Return user and host."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container without an entry for the user
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
