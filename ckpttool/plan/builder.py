"""Build the rows of a plan from states: copies to target files, and comparisons of module copies with masters.

At stages 1 and 2 a checkpoint has masters and module copies, and each copy must be the cast of its master. If the
layout is misread by one element, nearly all elements differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import castable, itemsize
from ckpttool.model.extents import single_runs
from ckpttool.plan import CHECK, COPY, ConsistencyChecks, CopyPlan, Gather, SourceFile, TargetFile, merge_copies

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint, State


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A range of a state's elements, and its place in a target file."""

    state: State
    """The state."""
    dtype: str
    """Type to write."""
    target: int
    """First byte in the target file."""
    first: int = 0
    """First element."""
    numel: int | None = None
    """Number of elements; None for all from ``first``."""


class CopyBuilder:
    """Builds the copies of a plan whose sources are the files of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.sources = source_files(checkpoint)
        self._casts: dict[tuple[str, str], int] = {}

    @property
    def casts(self) -> tuple[tuple[str, str], ...]:
        """(source dtype, target dtype) pairs used so far."""
        return tuple(self._casts)

    def copies(self, pieces: Iterable[Placement]) -> tuple[NDArray[np.void], tuple[Gather, ...]]:
        """Return the copy rows of one target file, and the gathers for states that rows cannot express."""
        tables = []
        gathers = []
        for piece in pieces:
            numel = piece.state.numel - piece.first if piece.numel is None else piece.numel
            if numel == 0:
                continue
            if not piece.state.plain:
                gathers.append(Gather(piece.state, piece.dtype, piece.target, piece.first, numel))
                continue
            rows = piece.state.extents
            source, target = itemsize(piece.state.dtype), itemsize(piece.dtype)
            begin = np.maximum(rows["start"], piece.first)
            end = np.minimum(rows["start"] + rows["numel"], piece.first + numel)
            held = begin < end
            rows, begin, end = rows[held], begin[held], end[held]
            table = np.zeros(len(rows), dtype=COPY)
            table["source"], table["numel"] = rows["file"], end - begin
            table["start"] = rows["offset"] + (begin - rows["start"]) * np.uint64(source)
            table["target"] = piece.target + (begin - np.uint64(piece.first)) * np.uint64(target)
            pair = piece.state.dtype, piece.dtype
            table["cast"] = self._casts.setdefault(pair, len(self._casts))
            tables.append(table)
        everything = np.concatenate(tables) if tables else np.zeros(0, dtype=COPY)
        everything = everything[np.argsort(everything["target"], kind="stable")]
        return merge_copies(everything, self.casts), tuple(gathers)


ALIGNMENT = 64
"""Bytes: a multiple of every element's size."""


def pack(checkpoint: Checkpoint, ranges: Iterable[Placement]) -> tuple[CopyPlan, list[int]]:
    """Plan one file of ranges of states, one after another, each at a multiple of ``ALIGNMENT``.

    Args:
        checkpoint: The source.
        ranges: The ranges; their ``target`` does not count.

    Returns:
        A plan of one file, and the offset of each range in it.
    """
    placed, zeros, at = [], [], 0
    for one in ranges:
        placed.append(replace(one, target=at))
        numel = one.state.numel - one.first if one.numel is None else one.numel
        written = at + numel * itemsize(one.dtype)
        at = -(-written // ALIGNMENT) * ALIGNMENT
        zeros.append((written, at - written))
    builder = CopyBuilder(checkpoint)
    copies, gathers = builder.copies(placed)
    file = TargetFile("packed", at, (), copies, gathers, tuple(zeros))
    return CopyPlan(builder.sources, builder.casts, (file,)), [one.target for one in placed]


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
