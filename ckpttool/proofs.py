"""Checkpoint -> the comparisons that prove its layout: the module's copy must be the cast of the master.

At stages 1 and 2 a checkpoint holds both. A layout misread by one element makes nearly all of them differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpttool.casts import castable
from ckpttool.dtypes import itemsize
from ckpttool.model import MASTER, MODULE
from ckpttool.plan import PROOF, Proofs, SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint, State

SAMPLE = 256
"""Elements compared at each end of every fragment when not all of them are."""


def full_proofs(checkpoint: Checkpoint) -> Proofs:
    """Compare every element."""
    return _proofs(checkpoint, None)


def sample_proofs(checkpoint: Checkpoint) -> Proofs:
    """Compare the first and last elements of every fragment: a few kilobytes for each, and every border is seen."""
    return _proofs(checkpoint, SAMPLE)


def _proofs(checkpoint: Checkpoint, window: int | None) -> Proofs:
    casts: dict[tuple[str, str], int] = {}
    names: list[str] = []
    tables: list[NDArray[np.void]] = []
    for name, master, copy in _pairs(checkpoint):
        # The module keeps a parameter in one piece wherever it keeps it at all.
        if len(copy.extents) == 1 and castable(master.dtype, copy.dtype):
            cast = casts.setdefault((master.dtype, copy.dtype), len(casts))
            tables.append(_rows(master, copy, window, cast, len(names)))
            names.append(name)
    rows = np.concatenate(tables) if tables else np.zeros(0, dtype=PROOF)
    return Proofs(source_files(checkpoint), tuple(casts), tuple(names), rows)


def source_files(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    """The files of a checkpoint as sources of a plan, by the same index."""
    return tuple(SourceFile(checkpoint.path(i), f.nbytes, f.version) for i, f in enumerate(checkpoint.files))


def _pairs(checkpoint: Checkpoint) -> Iterator[tuple[str, State, State]]:
    """(name, what counts, a copy of it) of everything that is stored twice."""
    stored: dict[str, State] = {}
    for parameter in checkpoint.parameters:
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODULE)
        if master is not None and copy is not None:
            yield parameter.name, master, copy
        stored[parameter.name] = next(iter(parameter.states.values()))
    for alias, copy in checkpoint.duplicates.items():
        if checkpoint.aliases[alias] in stored:
            yield alias, stored[checkpoint.aliases[alias]], copy


def _rows(master: State, copy: State, window: int | None, cast: int, name: int) -> NDArray[np.void]:
    extents = master.extents[master.extents["numel"] > 0]
    skip = np.zeros(len(extents), dtype=np.uint64)
    numel = extents["numel"]
    if window is not None:
        # Long fragments are looked at from both ends, short ones whole.
        long = extents["numel"] > 2 * window
        ends = extents[long]
        skip = np.concatenate([skip, ends["numel"] - np.uint64(window)])
        numel = np.concatenate([np.where(long, window, numel), np.full(len(ends), window)]).astype(np.uint64)
        extents = np.concatenate([extents, ends])
    rows = np.zeros(len(extents), dtype=PROOF)
    rows["source"] = extents["file"]
    rows["start"] = extents["offset"] + skip * np.uint64(itemsize(master.dtype))
    rows["copy_source"] = copy.extents["file"][0]
    rows["copy_start"] = copy.extents["offset"][0] + (extents["start"] + skip) * np.uint64(itemsize(copy.dtype))
    rows["numel"], rows["cast"], rows["name"] = numel, cast, name
    return rows
