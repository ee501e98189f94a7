"""List the checkpoints in the directories of runs: of a Hugging Face Trainer, of Accelerate, and of Ray Train.

Source: Ray 2.60, ray/train/v2: ``CheckpointManager`` (the snapshot: a run whose snapshot lists a checkpoint that is
gone refuses to start) and ``StorageContext.make_default_checkpoint_dir_name``.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from typing import TYPE_CHECKING, Any

from ckpttool.catalog.restore_order import Saved, candidates, newest_first
from ckpttool.errors import LayoutError, StorageError
from ckpttool.formats.scan import Found, last_number, scan
from ckpttool.storage import MANIFEST, is_gone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.storage import Storage

PREFIX = "ckpttool_"
"""Prefix of the directory that ckpttool creates in the run directory of Ray Train for each save."""
SNAPSHOT = "checkpoint_manager_snapshot.json"
"""File in which Ray Train lists the checkpoints of the run."""
MAX_BYTES = 1 << 28
"""Most bytes of a snapshot; one of a hundred thousand checkpoints is smaller."""
_OWN = re.compile(rf"{PREFIX}\d+_[0-9a-f]+")
_OF_RAY = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+")


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
            best = candidates(folder.storage, folder.path)[:1]
        except StorageError as error:
            if not is_gone(folder.storage, error):
                raise
            continue
        usable = [one for one in best if not one.committed or (one.manifest is not None and not one.thin)]
        found += [Saved.of(folder.path, last_number(folder.tag), one.manifest) for one in usable]
    return newest_first(found)


def directory_name(step: int, token: str) -> str:
    """Return the name of a save's directory; it is unique, so that the directory holds no old files.

    Args:
        step: Steps of the engine.
        token: Unique hexadecimal text.
    """
    return f"{PREFIX}{step:08d}_{token}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether Ray Train or ckpttool chooses such names for directories that hold a checkpoint as a tag."""
    return bool(_OWN.fullmatch(name) or _OF_RAY.fullmatch(name))


def ray_folders(storage: Storage, run: str) -> list[Found]:
    """Return the directories of ckpttool's saves in a run directory of Ray Train.

    Raises:
        StorageError: The directory cannot be read.
    """
    return [one for one in scan(storage, run, depth=1) if _OWN.fullmatch(one.tag)]


def run_commits(storage: Storage, run: str) -> list[Found]:
    """Return the commits in a run directory of Ray Train, newest first, as ``newest_first`` orders them.

    Raises:
        StorageError: A directory cannot be read.
    """
    storage.refresh([])
    folders = ray_folders(storage, run)
    with contextlib.suppress(StorageError):  # only saves requests: the code below reports errors
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


def _written(one: Found) -> float:
    return next((entry.modified or 0.0 for entry in one.entries if entry.name == MANIFEST), 0.0)


def last_commit(storage: Storage, run: str) -> tuple[str, int]:
    """Return attempt and number of the last commit of a run, the parent of the next; "" and 0 without one.

    Raises:
        StorageError: A directory cannot be read.
    """
    manifests = (one.manifest for one in run_commits(storage, run))
    return next(((found.attempt, found.number) for found in manifests if found is not None), ("", 0))


def listed_by_ray(storage: Storage, run: str) -> frozenset[str]:
    """Return the directories of a run that Ray's snapshot lists; empty without a snapshot.

    Raises:
        CkptError: The snapshot cannot be read.
    """
    listed, latest = _snapshot(storage, run)
    # The listed path may have several components.
    return frozenset(name.partition("/")[0] for name in [*listed, latest] if name)


def latest_of_ray(storage: Storage, run: str) -> str:
    """Return the checkpoint that Ray would resume from, by its name in the run directory; "" without one.

    Raises:
        CkptError: The snapshot cannot be read.
    """
    return _snapshot(storage, run)[1]


def _snapshot(storage: Storage, run: str) -> tuple[list[str], str]:
    path = posixpath.join(run, SNAPSHOT)
    if not storage.exists(path):
        return [], ""
    hint = "a run may be writing it: try again; or start that run with the Ray release that wrote it"
    try:
        with storage.open(path) as reader:
            if reader.nbytes > MAX_BYTES:
                raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large for a snapshot", hint)
            found = json.loads(reader.read(0, reader.nbytes))
        latest = found["latest_checkpoint_result"]
        return [_name(result) for result in found["checkpoint_results"]], _name(latest) if latest else ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(path, "is not a snapshot of Ray Train's checkpoints", hint) from error


def _name(result: Any) -> str:
    name = posixpath.normpath(str(result["checkpoint_dir_name"]).strip("/"))
    if name.startswith("."):
        raise ValueError("a name leads out of the directory")
    return name
