"""List and remove the checkpoints of a run of a Hugging Face Trainer or of Accelerate, by the names of their folders.

Source: transformers 5.23, trainer_utils.py (``PREFIX_CHECKPOINT_DIR``, ``rotate_checkpoints``): ``checkpoint-N``;
accelerate 1.15, accelerator.py (``save_state``): ``checkpoint_N``.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalog.cleanup import is_old, remove_unchanged
from ckpttool.catalog.restore_order import candidates
from ckpttool.commit import read_mark
from ckpttool.commit.manifest import Saved, newest_first, read_manifest
from ckpttool.commit.marks import is_alive, state_of, unfinished_below
from ckpttool.commit.pins import find_pin
from ckpttool.errors import CkptError, StorageError
from ckpttool.storage import is_gone, is_half_removed, is_linked, link_into, links_below, walk

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpttool.storage import Storage, WritableStorage

LOG = logging.getLogger("ckpttool")
_NAME = re.compile(r"checkpoint[-_](\d+)")


@dataclass(frozen=True, slots=True)
class TrainerCommit:
    """A whole checkpoint of a run."""

    number: int
    """``Manifest.number``; 0 for a plain save of the Trainer."""
    step: int
    """The number in the folder's name."""
    folder: str
    """Path or URL of the folder."""
    attempt: str
    """``Manifest.attempt``; "" for a plain save."""


def folder_name(step: int) -> str:
    """Return the name of a folder of the Trainer."""
    return f"checkpoint-{step}"


def step_of_folder(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def folders(storage: Storage, root: str) -> list[tuple[int, str]]:
    """Return number and path of all folders named ``checkpoint-N`` or ``checkpoint_N``, the last number first.

    Raises:
        StorageError: The root cannot be read.
    """
    storage.refresh([])
    entries = storage.listing(root) if storage.is_dir(root) else []
    steps = [(step_of_folder(entry.name), posixpath.join(root, entry.name)) for entry in entries if entry.is_dir]
    return sorted(((step, path) for step, path in steps if step is not None), reverse=True)


def trainer_commits(storage: Storage, root: str) -> list[TrainerCommit]:
    """Return the whole checkpoints of a run, oldest first, as ``newest_first`` orders them. Tensor bytes are not read.

    A folder that another process removes meanwhile, as Ray Train does with old checkpoints, is none of them.

    Raises:
        StorageError: A folder cannot be read.
    """
    found: dict[str, TrainerCommit] = {}
    saved = []
    for step, folder in folders(storage, root):
        try:
            best = candidates(storage, folder)[:1]
        except StorageError as error:
            if not is_gone(storage, error):
                raise
            continue
        for candidate in best:
            number, attempt, order = 0, "", Saved(folder, step)
            if candidate.committed:
                try:
                    manifest = read_manifest(storage, candidate.path)
                except CkptError:
                    continue
                if manifest.thin:
                    continue  # no run can resume from it; ``prune`` has decided to keep it
                number, attempt, order = manifest.number, manifest.attempt, Saved.of(folder, manifest)
            found[folder] = TrainerCommit(number, step, folder, attempt)
            saved.append(order)
    return [found[folder] for folder in reversed(newest_first(saved))]


def rotate(
    storage: WritableStorage, root: str, limit: int | None, *, keep: Collection[str], grace: float
) -> list[str]:  # fmt: skip
    """Remove the oldest checkpoints of a run, and what killed saves have left; return what was removed.

    Unlike the Trainer's own rotation it counts whole checkpoints only, so that an incomplete one never takes the place
    of a checkpoint that a run can resume from. Pinned and thin checkpoints stay, and are not counted.

    Args:
        storage: Storage of the run.
        root: The output directory.
        limit: Number of checkpoints to keep, pinned ones not counted; None or 0 for all.
        keep: Names of folders that stay.
        grace: Seconds after which the folder of a killed save is removed.

    Raises:
        StorageError: The root cannot be read.
    """
    seen = {}
    hidden = [posixpath.join(root, e.name) for e in storage.listing(root) if e.is_dir and e.name.startswith(".")]
    for path in [*(folder for _, folder in folders(storage, root)), *filter(partial(is_half_removed, storage), hidden)]:
        with contextlib.suppress(StorageError):  # it stays; another process may be removing it
            seen[path] = state_of(storage, path)
    every = trainer_commits(storage, root)
    pinned = {one.folder for one in every if find_pin(storage, one.folder) is not None}
    found = [one for one in every if one.folder not in pinned]
    spare = [one.folder for one in found if one != every[-1] and posixpath.basename(one.folder) not in keep]
    surplus = max(0, len(found) - limit) if limit else 0
    whole = {one.folder for one in every}
    doomed = spare[:surplus]
    doomed += [path for _, path in folders(storage, root) if path not in whole and _is_leftover(storage, path, grace)]
    doomed += [path for path in hidden if path in seen]
    removed = []
    links = links_below(root) if doomed else []
    for folder in doomed:
        if is_linked(storage, root, folder) or link_into(links, root, folder) is not None:
            continue
        try:
            why = remove_unchanged(storage, folder, seen.get(folder, ""))
        except CkptError as error:
            LOG.warning("an old checkpoint was not removed: %s", error)
            continue
        removed += [folder] if why is None else []
        LOG.info("removed %s" if why is None else f"%s stays: {why}", folder)
    return removed


def _is_leftover(storage: Storage, folder: str, grace: float) -> bool:
    """Return whether a folder has only an unfinished save of a process that does not run any more."""
    if is_half_removed(storage, folder):
        return True
    unfinished = unfinished_below(storage, folder)
    if not unfinished or any(is_alive(read_mark(storage, directory)) for directory in unfinished):
        return False
    newest = max((entry.modified or 0.0 for _, entry in walk(storage, folder)), default=0.0)
    return is_old(newest, grace)
