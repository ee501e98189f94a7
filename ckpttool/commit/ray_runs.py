"""A run directory of Ray Train's: which of its directories are checkpoints, and which of them Ray counts on.

Source: Ray 2.60, ray/train/v2: ``CheckpointManager`` (the snapshot: a run whose snapshot lists a checkpoint that is
gone refuses to start) and ``StorageContext.make_default_checkpoint_dir_name``.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.commit.manifest import is_commit, read_manifest
from ckpttool.errors import CkptError, LayoutError, StorageError
from ckpttool.storage import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.storage import Entry, Storage

PREFIX = "ckpttool_"
"""Begins the name of each directory that ckpttool makes in that of the run: one for every save."""
SNAPSHOT = "checkpoint_manager_snapshot.json"
"""What Ray Train knows of the run's checkpoints."""
MAX_BYTES = 1 << 28
"""A snapshot of a hundred thousand checkpoints is smaller."""
_OWN = re.compile(rf"{PREFIX}(\d+)_[0-9a-f]+")
_OF_RAY = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d+")


@dataclass(frozen=True, slots=True)
class RunCommit:
    """A checkpoint that was saved to its end."""

    name: str
    """Its directory in that of the run."""
    tag: str
    """The directory in that one."""
    path: str
    """Directory of the tag."""
    step: int
    """Steps of the engine."""
    committed: float
    """When the manifest was written, in seconds since 1970, by the storage's clock."""
    number: int = 0
    """As in the manifest; 0 where it was not looked at, as no other commit has this step."""


def directory_name(step: int, token: str) -> str:
    """What a save's directory is called; never used again, so that nothing old can lie in it.

    Args:
        step: Steps of the engine.
        token: Hexadecimal, another one for every save.
    """
    return f"{PREFIX}{step:08d}_{token}"


def is_checkpoint_name(name: str) -> bool:
    """Whether Ray Train, or ckpttool under it, gives checkpoints such names; they hold DeepSpeed's as a tag."""
    return bool(_OWN.fullmatch(name) or _OF_RAY.fullmatch(name))


def own_directories(storage: Storage, run: str) -> Iterator[tuple[int, Entry]]:
    """What ckpttool's saves have made in the directory of a run, and the step in each one's name.

    Raises:
        StorageError: The directory cannot be read.
    """
    for entry in storage.listing(run) if storage.is_dir(run) else []:
        match = _OWN.fullmatch(entry.name)
        if match is not None and entry.is_dir:
            yield int(match[1]), entry


def run_commits(storage: Storage, run: str) -> list[RunCommit]:
    """The commits in the directory of a run, the newest first: by step, and of one step in the order of commits.

    The time of a file only decides where manifests do not: those of releases that did not count.

    Raises:
        StorageError: A directory cannot be read.
    """
    storage.refresh([])
    directories = list(own_directories(storage, run))
    with contextlib.suppress(StorageError):  # only saves requests: what is wrong is seen below
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
            # Ray's controller has removed it meanwhile, by its CheckpointConfig
    steps = Counter(c.step for c in found)
    found = [replace(c, number=number_of(storage, c)) if steps[c.step] > 1 else c for c in found]
    return sorted(found, key=lambda c: (c.step, c.number, c.committed, c.name), reverse=True)


def number_of(storage: Storage, commit: RunCommit) -> int:
    """Which commit it is by its manifest; 0 if nothing tells."""
    try:
        return read_manifest(storage, commit.path).number
    except CkptError:
        return 0


def last_commit(storage: Storage, run: str) -> tuple[str, int]:
    """What the next commit of a run is to name as the one before it: attempt and number; "" and 0 if there is none.

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
    """The directories of a run that Ray's snapshot lists; empty where there is no snapshot.

    Raises:
        CkptError: The snapshot cannot be read.
    """
    listed, latest = _snapshot(storage, run)
    # A checkpoint may lie deeper.
    return frozenset(name.partition("/")[0] for name in [*listed, latest] if name)


def latest_of_ray(storage: Storage, run: str) -> str:
    """The checkpoint that Ray would go on from, by its name in the run's directory; "" if there is none.

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
        raise LayoutError(path, "is no snapshot of Ray Train's checkpoints", hint) from error


def _name(result: Any) -> str:
    name = posixpath.normpath(str(result["checkpoint_dir_name"]).strip("/"))
    if name.startswith("."):
        raise ValueError("a name leads out of the directory")
    return name
