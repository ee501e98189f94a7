"""Checkpoint -> consistency checks of its layout: each module copy must be the cast of its master.

At stages 1 and 2 a checkpoint holds both. If the layout is misread by one element, nearly all elements differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import castable, itemsize
from ckpttool.model.extents import single_runs
from ckpttool.plan import CHECK, ConsistencyChecks, SourceFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint, State

SAMPLE = 256
"""Elements compared at each end of every fragment, if only samples are."""
REMOTE_ROWS = 64
"""Rows compared on remote storage, where each costs a round trip."""


def full_checks(checkpoint: Checkpoint) -> ConsistencyChecks:
    """Compare every element."""
    return _checks(checkpoint, None)


def sample_checks(checkpoint: Checkpoint) -> ConsistencyChecks:
    """Compare the first and last elements of every fragment: a few kilobytes each, and every border is covered.

    On remote storage, where each costs a round trip, compare some of the fragments.
    """
    checks = _checks(checkpoint, SAMPLE)
    remote = any(source.storage.remote for source in checks.sources)
    if remote and len(checks.rows) > REMOTE_ROWS:
        evenly = np.linspace(0, len(checks.rows) - 1, REMOTE_ROWS).astype(np.int64)
        return replace(checks, rows=checks.rows[evenly])
    return checks


def _checks(checkpoint: Checkpoint, window: int | None) -> ConsistencyChecks:
    casts: dict[tuple[str, str], int] = {}
    names: list[str] = []
    guessed: set[int] = set()
    tables: list[NDArray[np.void]] = []
    for twin in checkpoint.replicas:
        if castable(twin.state.dtype, twin.copy.dtype):
            cast = casts.setdefault((twin.state.dtype, twin.copy.dtype), len(casts))
            tables.append(_rows(twin.state, twin.copy, window, cast, len(names)))
            guessed |= {len(names)} if twin.guessed else set()
            names.append(twin.name)
    rows = np.concatenate(tables) if tables else np.zeros(0, dtype=CHECK)
    return ConsistencyChecks(source_files(checkpoint), tuple(casts), tuple(names), rows, frozenset(guessed))


def source_files(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    """The files of a checkpoint as sources of a plan, by the same index."""
    return tuple(
        SourceFile(checkpoint.path(i), f.nbytes, f.version, f.storage or checkpoint.storage, f.records)
        for i, f in enumerate(checkpoint.files)
    )


def _rows(master: State, copy: State, window: int | None, cast: int, name: int) -> NDArray[np.void]:
    start, numel, left, right = _aligned(master, copy)
    skip = np.zeros(len(start), dtype=np.uint64)
    if window is not None:
        # Long fragments are compared at both ends, short ones whole.
        long = np.flatnonzero(numel > 2 * window)
        skip = np.concatenate([skip, numel[long] - np.uint64(window)])
        numel[long] = window
        left, right = np.concatenate([left, left[long]]), np.concatenate([right, right[long]])
        start = np.concatenate([start, start[long]])
        numel = np.concatenate([numel, np.full(len(long), window, dtype=np.uint64)])
    rows = np.zeros(len(start), dtype=CHECK)
    for side, at, state in ((left, "", master), (right, "copy_", copy)):
        rows[f"{at}source"] = side["file"]
        rows[f"{at}start"] = side["offset"] + (start + skip - side["start"]) * np.uint64(itemsize(state.dtype))
    rows["numel"], rows["cast"], rows["name"] = numel, cast, name
    return rows


def _aligned(
    master: State, copy: State
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.void], NDArray[np.void]]:
    """Cut two states at every border of either: (first element, elements, extent of master, extent of copy)."""
    sides = [single_runs(s.extents[s.extents["numel"] > 0], itemsize(s.dtype)) for s in (master, copy)]
    left, right = sides
    # The module's copy is nearly always contiguous.
    start = left["start"] if len(right) == 1 else np.union1d(left["start"], right["start"])
    numel = np.diff(start, append=np.uint64(master.numel))
    here, there = (side[np.searchsorted(side["start"], start, side="right") - 1] for side in sides)
    return start, numel, here, there
