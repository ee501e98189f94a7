"""Which values that are cast into one file are copied into another as they are: both can be made of one reading.

The 16-bit weights of a checkpoint are casts of masters that are in it too. Without this a third of what a conversion
writes would be read twice, the second time from a disk where the checkpoint is larger than memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ckpttool.plan import CopyPlan

SHARED_READ = np.dtype(
    [
        ("copy_target", "<u8"),  # first byte that the copy which reads the values writes, in its own file
        ("skip", "<u8"),  # bytes of that copy before the values
        ("numel", "<u8"),  # elements
        ("file", "<u4"),  # where they are cast to: index into CopyPlan.files
        ("target", "<u8"),  # first byte there
        ("cast", "<u2"),  # index into CopyPlan.casts
    ]
)
"""One row: a run of elements that is cast on the way of a copy."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedReads:
    """The rows of a plan, with those casts told apart that need no reading of their own."""

    separate: Mapping[int, NDArray[np.void]]
    """By file: rows of COPY that read for themselves."""
    shared: Mapping[int, NDArray[np.void]]
    """By file whose copies carry them: rows of SHARED_READ, by carrier and skip."""

    @property
    def files(self) -> set[int]:
        """The files into which some are cast."""
        return {n for rows in self.shared.values() for n in rows["file"].tolist()}


def find_shared_reads(plan: CopyPlan, copies: Mapping[int, NDArray[np.void]]) -> SharedReads:
    """Find casts whose values other rows copy, all of them.

    Args:
        plan: What is written.
        copies: By file that is still to be written: its rows of COPY.
    """
    nothing = SharedReads(copies, {})
    same = np.array([a == b for a, b in plan.casts])
    if same.all() or not copies:
        return nothing
    files = np.repeat(list(copies), [len(rows) for rows in copies.values()]).astype(np.uint32)
    rows = np.concatenate(list(copies.values()))
    # One axis for the bytes of all sources.
    bases = np.cumsum([0, *(source.nbytes for source in plan.sources)], dtype=np.int64)
    width = np.array([itemsize(a) for a, _ in plan.casts], dtype=np.int64)[rows["cast"]]
    begin = bases[rows["source"]] + rows["start"].astype(np.int64)
    end = begin + rows["numel"].astype(np.int64) * width
    copied = same[rows["cast"]]

    casts = np.flatnonzero(~copied)
    by, which = _overlaps(begin, end, _apart(begin, end, np.flatnonzero(copied)), casts)
    of = casts[which]
    low, high = np.maximum(begin[by], begin[of]), np.minimum(end[by], end[of])
    # No element may be cut, neither by the ends of a copy nor by those of the pieces that it is made in.
    whole = ((begin[by] - begin[of]) % width[of] == 0) & (rows["target"][by].astype(np.int64) % width[of] == 0)
    found = np.bincount(which, weights=np.where(whole, high - low, 0), minlength=len(casts)).astype(np.int64)
    rides = found == end[casts] - begin[casts]
    keep = rides[which]
    if not keep.any():
        return nothing
    by, of, low, high = by[keep], of[keep], low[keep], high[keep]
    targets = np.array([itemsize(b) for _, b in plan.casts], dtype=np.int64)[rows["cast"][of]]
    riders = np.zeros(len(by), dtype=SHARED_READ)
    riders["copy_target"] = rows["target"][by]
    riders["skip"] = low - begin[by]
    riders["numel"] = (high - low) // width[of]
    riders["file"] = files[of]
    riders["target"] = rows["target"][of].astype(np.int64) + (low - begin[of]) // width[of] * targets
    riders["cast"] = rows["cast"][of]
    order = np.lexsort((riders["skip"], riders["copy_target"], files[by]))
    riders, of_file = riders[order], files[by[order]].astype(np.int64)
    left = np.ones(len(rows), dtype=bool)
    left[casts[rides]] = False
    ends = np.cumsum([len(r) for r in copies.values()])[:-1]
    alone = (r[k] for r, k in zip(np.split(rows, ends), np.split(left, ends), strict=True))
    # Not np.unique: it imports numpy.ma, which takes longer than all of this.
    starts = np.flatnonzero(np.diff(of_file, prepend=-1))
    carried = dict(zip(of_file[starts].tolist(), np.split(riders, starts[1:]), strict=True))
    return SharedReads(dict(zip(copies, alone, strict=True)), carried)


def _apart(begin: NDArray[np.int64], end: NDArray[np.int64], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those rows, by their first byte, that read nothing which a row before them has read: one reading is enough."""
    rows = rows[np.argsort(begin[rows], kind="stable")]
    reached = np.maximum.accumulate(end[rows])
    apart: NDArray[np.bool_] = np.concatenate([np.ones(min(1, len(rows)), bool), begin[rows][1:] >= reached[:-1]])
    result: NDArray[np.intp] = rows[apart]
    return result


def _overlaps(
    begin: NDArray[np.int64], end: NDArray[np.int64], carriers: NDArray[np.intp], casts: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Every carrier that reads bytes of a cast, and the place of that cast among ``casts``."""
    first = np.searchsorted(end[carriers], begin[casts], side="right")
    count = np.maximum(np.searchsorted(begin[carriers], end[casts], side="left") - first, 0)
    which = np.repeat(np.arange(len(casts)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)  # 0, 1, 2 for each cast
    return carriers[np.repeat(first, count) + number], which
