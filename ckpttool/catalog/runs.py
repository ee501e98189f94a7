"""The checkpoints of a run in Ray's storage path and in the output of a trainer: their order."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import time
from typing import TYPE_CHECKING

from ckpttool.catalog.restore_order import SECOND_LOOK, Saved, candidates, newest_first, of_folder
from ckpttool.errors import LayoutError, StorageError
from ckpttool.formats.layouts import MARKED, OWN_OF_RAY, Place, is_named
from ckpttool.formats.scan import (
    Found,
    last_number,
    scan,
)
from ckpttool.storage import (
    MANIFEST,
    is_gone,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckpttool.storage import Storage

LOG = logging.getLogger(__name__)


def trainer_commits(folders: Iterable[Found]) -> list[Saved]:
    """Return the whole checkpoints of a trainer's run by the paths of their folders, as ``newest_first`` orders them.

    Tensor bytes are not read. Thin checkpoints, from which no run can resume, are left out, and so are folders that
    another process removes meanwhile, as Ray Train does with old checkpoints.

    Args:
        folders: The folders, as ``trainer_folders`` orders them.

    Raises:
        StorageError: A folder cannot be read.
    """
    found: list[Saved] = []
    for folder in folders:
        try:
            best = of_folder(folder.storage, folder.path)[:1]
        except StorageError as error:
            if not is_gone(folder.storage, error):
                raise
            continue
        usable = [one for one in best if not one.committed or (one.manifest is not None and not one.thin)]
        found += [Saved.of(folder.path, last_number(folder.tag), one.manifest) for one in usable]
    return newest_first(found)


def run_commits(storage: Storage, run: str) -> list[Found]:
    """Return the commits in a run directory of Ray Train, newest first, as ``newest_first`` orders them.

    Raises:
        StorageError: A directory cannot be read.
    """
    storage.refresh([])
    folders = Place(storage, run).reported
    with contextlib.suppress(StorageError):  # only to save requests: the code below reports errors
        storage.refresh([posixpath.join(folder.path, MANIFEST) for folder in folders])
    dated = []
    for folder in folders:
        try:
            dated += [(_written(one), one) for one in scan(storage, folder.path, depth=1) if one.committed]
        except StorageError:
            storage.refresh([])
            if storage.is_dir(folder.path):
                raise
            # Ray's controller has removed the directory meanwhile, by its CheckpointConfig
    dated.sort(key=lambda pair: (pair[0], pair[1].path), reverse=True)  # old manifests have no numbers
    found = {one.path: one for _, one in dated}
    return [found[saved.name] for saved in newest_first([Saved.of(p, o.step, o.manifest) for p, o in found.items()])]


def run_candidates(storage: Storage, run: str, reported: str, known: Collection[str]) -> list[str]:
    """Return the checkpoints to resume a run of Ray Train from, newest first: commits and others.

    Args:
        storage: Storage of the run.
        run: Its directory.
        reported: Path or URL of the checkpoint that Ray resumes from; "" without one.
        known: Names of the checkpoints that Ray knows; it has got all of them before ``reported``, or that one.

    Raises:
        LayoutError: The newest checkpoint is ``reported``, and contains nothing that ckpttool reads.
        StorageError: A directory cannot be read.
    """
    commits = run_commits(storage, run)
    name = posixpath.basename(reported)
    if is_named(name, OWN_OF_RAY) and name not in map(_folder, commits):
        time.sleep(SECOND_LOOK)
        commits = run_commits(storage, run)
        if name not in map(_folder, commits):
            first = _folder(commits[0]) if commits else "nothing"
            LOG.warning(
                "%s: Ray resumes from %s, which holds no finished checkpoint; resuming from %s", run, name, first
            )
    found = [one.path for one in commits]
    if not reported or is_named(name, OWN_OF_RAY) or any(one.root == reported for one in commits):
        return found
    others = checkpoints_of_ray(storage, reported)
    step = others[0].step if others and others[0].is_tag else -1
    written = _newest_file(storage, reported)

    def is_older(one: Found) -> bool:
        """Return whether Ray knows the commit; else it was saved by a worker that died, perhaps before ``reported``."""
        same = one.step == step or step < 0
        created = 0.0 if one.manifest is None else one.manifest.created
        return _folder(one) in known or one.step < step or (same and created <= written)

    place = next((n for n, one in enumerate(commits) if is_older(one)), len(commits))
    if not others and not place:
        problem = "is the checkpoint that Ray resumes from, and contains none that ckpttool reads"
        hint = "load it as the script that saved it does, or choose another name in RunConfig to start from scratch"
        raise LayoutError(reported, problem, hint)
    rest = [Saved.of(one.path, one.step, one.manifest) for one in commits[place:]]
    for name in sorted((name for name in known if not is_named(name, OWN_OF_RAY)), reverse=True):
        path = posixpath.join(run, name)
        if path != reported and storage.is_dir(path):
            newest = _newest_file(storage, path)
            rest += [Saved.of(one.path, one.step, None, written=newest) for one in checkpoints_of_ray(storage, path)]
    return [*found[:place], *(one.path for one in others), *(one.name for one in newest_first(rest))]


def _folder(commit: Found) -> str:
    """Return the name of the directory of a commit in the directory of the run."""
    return posixpath.basename(commit.root)


def _newest_file(storage: Storage, directory: str) -> float:
    """Return when the newest file below a directory was written, in seconds since 1970; 0 if it is unknown."""
    return max((entry.modified or 0.0 for _, entry in walk(storage, directory)), default=0.0)


def checkpoints_of_ray(storage: Storage, path: str) -> list[Found]:
    """Return the tags in a checkpoint of Ray Train, best first, or else the directory of another format, or of several.

    Raises:
        StorageError: A directory cannot be read.
    """
    if Place(storage, path).kind == MARKED:
        return [Found(storage, *posixpath.split(path.rstrip("/")))]
    if tags := candidates(storage, path):
        return tags
    below = [one.removeprefix(path).lstrip("/") for one in Place(storage, path).below()]
    inner = below[0] if len(below) == 1 else posixpath.commonpath(map(posixpath.dirname, below)) if below else None
    if inner is None:
        return []
    directory = posixpath.join(path, inner)
    return candidates(storage, directory) or [Found(storage, *posixpath.split(directory.rstrip("/")))]


def _written(one: Found) -> float:
    return next((entry.modified or 0.0 for entry in one.entries if entry.name == MANIFEST), 0.0)


def last_commit(storage: Storage, run: str) -> tuple[str, int]:
    """Return attempt and number of the last commit of a run, the parent of the next; "" and 0 without one.

    Raises:
        StorageError: A directory cannot be read.
    """
    manifests = (one.manifest for one in run_commits(storage, run))
    return next(((found.attempt, found.number) for found in manifests if found is not None), ("", 0))
