"""Permissions of the output: those that all sources have in common."""

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
"""Permissions of a file without local sources, before the umask."""
DIRECTORY = 0o777
"""Permissions of a directory without local sources, before the umask."""


def with_permissions(plan: CopyPlan) -> tuple[CopyPlan, int]:
    """Give each target file the permissions that its sources share.

    A copied file keeps the permissions of its source. A file with bytes of the plan itself (a header, a pickle made of
    many files) gets the permissions that all sources of the plan share.

    Returns:
        The plan with permissions, and the permissions of the output directory, before the umask.
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
    if not file.literals and len(numbers) == 1:  # a copy keeps the execute permission too
        return modes.get(min(numbers), FILE)
    return shared


def mode_of(checkpoint: Checkpoint) -> int:
    """Return the permissions that all files of a checkpoint share."""
    if checkpoint.storage.remote:
        return FILE
    paths = (checkpoint.path(n) for n in range(len(checkpoint.files)))
    return _intersection(permissions(path) for path in paths if _is_there(path))


def mode_of_file(storage: Storage, path: str) -> int:
    """Return the permissions of one file; FILE where the storage has none."""
    if storage.remote or not _is_there(path):
        return FILE
    return permissions(path)


def mode_of_directory(storage: Storage, path: str) -> int:
    """Return the permissions of one directory; DIRECTORY where the storage has none."""
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
