"""Find checkpoints of other runs below a checkpoint: a removal of the directory would take them along."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.commit.marks import own_directories
from ckpttool.errors import CkptError
from ckpttool.formats import open_every
from ckpttool.formats.dcp import ACCELERATE_MODEL, ACCELERATE_OPTIMIZER, METADATA, SHARD
from ckpttool.formats.layouts import WEIGHTS, Place, is_below_step, is_part
from ckpttool.formats.zero.files import is_of_tag
from ckpttool.messages import printable
from ckpttool.storage.base import DAMAGED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


def others_below(storage: Storage, path: str) -> list[str]:
    """Return the checkpoints below the directory of a checkpoint that are not its own, relative to it.

    Its own are those that a reader opens at the path: of a trainer's folder, or of each of several engines. If it
    cannot be opened, the tags that ``latest`` names are, or else the ones nearest to the path. Weights alone are
    another checkpoint only below a directory that has the name of a step, or below a tag: trainers write adapters and
    parts of a model into subdirectories.

    Raises:
        StorageError: A directory cannot be listed.
    """
    files_of = {
        directory.removeprefix(path).strip("/"): {entry.name for entry in entries if not entry.is_dir}
        for directory, entries in own_directories(storage, path)
    }
    holding = [name for name, files in files_of.items() if any(map(is_part, files))]
    in_tag = any(is_of_tag(name) or name == METADATA or name.endswith(SHARD) for name in files_of[""])
    weights = [name for name, files in files_of.items() if any(map(WEIGHTS.fullmatch, files))]
    runs = [name for name in weights if name not in holding and (in_tag or is_below_step(name))]
    below = [name for name in (*holding, *runs) if name]
    if not below:
        return []
    try:
        own = {d.removeprefix(path).strip("/") for one in open_every(storage, path) for d in _directories(one)}
    except CkptError:
        tags = [name for name in holding if any(map(is_of_tag, files_of[name]))]
        own = _own_of_torn(Place(storage, path), tags or holding) | {ACCELERATE_MODEL, ACCELERATE_OPTIMIZER}
    above = {part for name in own for part in _prefixes(name)}  # the manifest of several engines is above them
    return sorted(name for name in below if name not in own | above)


def _own_of_torn(here: Place, holding: Sequence[str]) -> set[str]:
    """Return the directories of a checkpoint that cannot be opened: of the tags that are named, or else the nearest."""
    named = {*here.of_one_save, *([here.pointer.tag] if here.pointer is not None else [])} & {*holding}
    nearest = min((name.count("/") if name else -1 for name in holding), default=-1)
    return named or {name for name in holding if (name.count("/") if name else -1) == nearest}


def _directories(checkpoint: Checkpoint) -> set[str]:
    """Return the directories of a checkpoint's files, and its own."""
    files = {posixpath.join(checkpoint.location, posixpath.dirname(file.name)) for file in checkpoint.files}
    return {checkpoint.location, *(directory.rstrip("/") for directory in files)}


def _prefixes(name: str) -> list[str]:
    found = []
    while name := posixpath.dirname(name):
        found.append(name)
    return found


def why_kept(storage: Storage, path: str) -> str | None:
    """Return why the directory of a checkpoint must not be removed; None without other checkpoints below it.

    Raises:
        StorageError: A directory cannot be listed.
    """
    others = others_below(storage, path)
    more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
    skipped = bool(others) and all(storage.exists(posixpath.join(path, other, DAMAGED)) for other in others)
    hint = f": prune {path} --torn removes {'it' if len(others) == 1 else 'them'}" if skipped else ""
    return printable(f"contains checkpoints: {', '.join(others[:3])}{more}{hint}") if others else None
