"""Which permissions an output gets: those of what it is made of, as ``cp`` keeps them, and never more."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.plan import ranges_read
from ckpttool.storage.safe_files import permissions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage import Storage

FILE = 0o666
"""What a file gets that is made of no local file, before the umask."""
DIRECTORY = 0o777
"""The same of a directory."""


def with_permissions(plan: CopyPlan) -> tuple[CopyPlan, int]:
    """A plan whose files have the permissions that all of their sources have, and the permissions of the directory.

    A file that is copied has those of its source; one that also holds bytes of no single source (a header, a pickle
    made of many files) those that all sources of the plan have.

    Returns:
        The plan, and what the directory that holds its files may have, before the umask.
    """
    modes = {n: permissions(f.path) for n, f in enumerate(plan.sources) if not f.storage.remote and _is_there(f.path)}
    shared = _intersection(modes.values())
    files = tuple(replace(file, mode=_mode(plan, file, modes, shared)) for file in plan.files)
    above = {os.path.dirname(plan.sources[n].path) or "." for n in modes}
    directory = DIRECTORY
    for path in above:
        directory &= permissions(path)
    return replace(plan, files=files), directory


def _mode(plan: CopyPlan, file: TargetFile, modes: Mapping[int, int], shared: int) -> int:
    numbers = {number for number, _, _ in ranges_read(plan, file)}
    if not file.literals and len(numbers) == 1:  # a copy keeps the right to execute it, too
        return modes.get(min(numbers), FILE)
    return shared


def mode_of(checkpoint: Checkpoint) -> int:
    """The permissions that all files of a checkpoint have, for a file that is made of them."""
    if checkpoint.storage.remote:
        return FILE
    paths = (checkpoint.path(n) for n in range(len(checkpoint.files)))
    return _intersection(permissions(path) for path in paths if _is_there(path))


def mode_of_file(storage: Storage, path: str) -> int:
    """The permissions of one file; the usual ones where the storage has none."""
    if storage.remote or not _is_there(path):
        return FILE
    return permissions(path)


def mode_of_directory(storage: Storage, path: str) -> int:
    """The permissions of one directory; the usual ones where the storage has none."""
    if storage.remote or not _is_there(path):
        return DIRECTORY
    return permissions(path)


def _intersection(modes: Iterable[int]) -> int:
    shared = FILE
    for mode in modes:
        shared &= mode
    return shared | 0o600


def _is_there(path: str) -> bool:
    with contextlib.suppress(OSError):
        permissions(path)
        return True
    return False
