"""List the checkpoints in a run directory of Ray Train, and those that Ray's snapshot needs.

Source: Ray 2.60, ray/train/v2: ``CheckpointManager`` (the snapshot: a run whose snapshot lists a checkpoint that is
gone refuses to start) and ``StorageContext.make_default_checkpoint_dir_name``.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.commit import is_commit
from ckpttool.commit.manifest import Saved, newest_first, read_manifest
from ckpttool.errors import CkptError, LayoutError, StorageError
from ckpttool.storage import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.storage import Entry, Storage

PREFIX = "ckpttool_"
"""Prefix of the directory that ckpttool creates in the run directory for each save."""
SNAPSHOT = "checkpoint_manager_snapshot.json"
"""File in which Ray Train lists the checkpoints of the run."""
MAX_BYTES = 1 << 28
"""Most bytes of a snapshot; one of a hundred thousand checkpoints is smaller."""
_OWN = re.compile(rf"{PREFIX}(\d+)_[0-9a-f]+")
_OF_RAY = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+")


@dataclass(frozen=True, slots=True)
class RunCommit:
    """A committed checkpoint of a run."""

    name: str
    """Directory of the save in the run directory."""
    tag: str
    """Tag: the directory in that of the save."""
    path: str
    """Directory of the tag."""
    step: int
    """Steps of the engine."""
    committed: float
    """Modification time of the manifest in seconds since 1970, by the clock of the storage."""


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


def own_directories(storage: Storage, run: str) -> Iterator[tuple[int, Entry]]:
    """Yield the directories of ckpttool's saves in a run directory: the step in the name, and the entry.

    Raises:
        StorageError: The directory cannot be read.
    """
    for entry in storage.listing(run) if storage.is_dir(run) else []:
        match = _OWN.fullmatch(entry.name)
        if match is not None and entry.is_dir:
            yield int(match[1]), entry


def run_commits(storage: Storage, run: str) -> list[RunCommit]:
    """Return the commits in a run directory, newest first, as ``newest_first`` orders them.

    Raises:
        StorageError: A directory cannot be read.
    """
    storage.refresh([])
    directories = list(own_directories(storage, run))
    with contextlib.suppress(StorageError):  # only saves requests: the code below reports errors
        storage.refresh([posixpath.join(run, entry.name, MANIFEST) for _, entry in directories])
    found = []
    for step, entry in directories:
        directory = posixpath.join(run, entry.name)
        try:
            found += list(_commits_in(storage, directory, step))
        except StorageError:
            storage.refresh([])
            if storage.is_dir(directory):
                raise
            # Ray's controller has removed the directory meanwhile, by its CheckpointConfig
    by_path = {c.path: c for c in sorted(found, key=lambda c: c.name, reverse=True)}
    return [by_path[path] for path in newest_first([_saved(storage, c) for c in by_path.values()])]


def _saved(storage: Storage, commit: RunCommit) -> Saved:
    try:
        manifest = read_manifest(storage, commit.path)
    except CkptError:
        return Saved(commit.path, commit.step, modified=commit.committed)
    return Saved.of(commit.path, manifest, modified=commit.committed)


def last_commit(storage: Storage, run: str) -> tuple[str, int]:
    """Return attempt and number of the last commit of a run, the parent of the next; "" and 0 without one.

    Raises:
        StorageError: A directory cannot be read.
    """
    for commit in run_commits(storage, run):
        try:
            manifest = read_manifest(storage, commit.path)
        except CkptError:
            continue
        return manifest.attempt, manifest.number
    return "", 0


def _commits_in(storage: Storage, directory: str, step: int) -> Iterator[RunCommit]:
    for tag in (e.name for e in storage.listing(directory) if e.is_dir):
        path = posixpath.join(directory, tag)
        if is_commit(storage, path):
            committed = next((e.modified or 0.0 for e in storage.listing(path) if e.name == MANIFEST), 0.0)
            yield RunCommit(posixpath.basename(directory), tag, path, step, committed)


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
