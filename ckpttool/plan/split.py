"""Split the rows of a target file: by bytes, by elements, and by reads that a copy and a cast can share.

The 16-bit weights of a target are casts of masters that the target has too. Without shared reads a conversion reads a
third of its bytes twice; if the checkpoint is larger than memory, the second read is from disk again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ckpttool.plan import CopyPlan, Gather, TargetFile


def elements_in(target: int, numel: int, width: int, start: int, end: int) -> tuple[int, int]:
    """The elements of a run that have bytes in [start, end), as (first, one past the last).

    Args:
        target: First byte of the run.
        numel: Elements of the run.
        width: Bytes of an element.
        start: First byte of the range.
        end: Byte after the range.
    """
    return max(0, (start - target) // width), min(numel, -((target - end) // width))


class SortedRows:
    """The copy rows of one target file, sorted by target byte. Rows do not overlap, and are not empty.

    Args:
        casts: (source dtype, target dtype) pairs of the plan.
        copies: Rows of COPY.
    """

    def __init__(self, casts: Sequence[tuple[str, str]], copies: NDArray[np.void]) -> None:
        self._source_widths, self._widths = (
            np.array([itemsize(pair[side]) for pair in casts], dtype=np.int64) for side in (0, 1)
        )
        # Empty rows may be anywhere: with them the ends would not be sorted.
        rows = copies[copies["numel"] > 0]
        self.rows: NDArray[np.void] = rows[np.argsort(rows["target"], kind="stable")]
        self._targets = self.rows["target"].astype(np.int64)
        self._ends = self._targets + self.rows["numel"].astype(np.int64) * self._widths[self.rows["cast"]]

    def overlapping(self, start: int, end: int) -> NDArray[np.void]:
        """The rows that have bytes in [start, end), unclipped."""
        low = int(np.searchsorted(self._ends, start, side="right"))
        found: NDArray[np.void] = self.rows[low : max(low, int(np.searchsorted(self._targets, end, side="left")))]
        return found

    def beginning(self, start: int, end: int) -> NDArray[np.void]:
        """The elements whose first byte is in [start, end), as rows: adjacent ranges share no element."""
        rows = self.overlapping(start, end).copy()
        target, numel = rows["target"].astype(np.int64), rows["numel"].astype(np.int64)
        width = self._widths[rows["cast"]]
        first, last = (np.clip(-((target - byte) // width), 0, numel) for byte in (start, end))
        rows["start"] += (first * self._source_widths[rows["cast"]]).astype(np.uint64)
        rows["target"] += (first * width).astype(np.uint64)
        rows["numel"] = (last - first).astype(np.uint64)
        found: NDArray[np.void] = rows[rows["numel"] > 0]
        return found


class FileSplitter:
    """Splits one target file into parts that a worker can write without the rest of the plan.

    Each part has the file's name, size and offsets, and fewer rows.

    Args:
        casts: (source dtype, target dtype) pairs of the plan.
        file: The file.
    """

    def __init__(self, casts: Sequence[tuple[str, str]], file: TargetFile) -> None:
        self._file = file
        self._rows = SortedRows(casts, file.copies)

    def overlapping(self, start: int, end: int) -> TargetFile:
        """The rows that have bytes in [start, end), unclipped: for a worker that assembles these bytes in memory."""
        gathers = tuple(g for g in self._file.gathers if g.target < end and g.target + g.nbytes > start)
        return self._part(self._rows.overlapping(start, end).copy(), gathers, start, end)

    def beginning(self, start: int, end: int) -> TargetFile:
        """The elements whose first byte is in [start, end): no element is split between parts."""
        return self._part(self._rows.beginning(start, end), tuple(self._split_gathers(start, end)), start, end)

    def _split_gathers(self, start: int, end: int) -> Iterator[Gather]:
        for gather in self._file.gathers:
            width = itemsize(gather.dtype)
            first, last = (min(max(0, -((gather.target - byte) // width)), gather.numel) for byte in (start, end))
            if first < last:
                target = gather.target + first * width
                yield replace(gather, target=target, first=gather.first + first, numel=last - first)

    def _part(self, rows: NDArray[np.void], gathers: tuple[Gather, ...], start: int, end: int) -> TargetFile:
        literals = tuple(
            (max(offset, start), data[max(0, start - offset) : end - offset])
            for offset, data in self._file.literals
            if offset < end and offset + len(data) > start
        )
        zeros = tuple(
            (max(offset, start), min(offset + nbytes, end) - max(offset, start))
            for offset, nbytes in self._file.zeros
            if offset < end and offset + nbytes > start
        )
        return replace(self._file, literals=literals, copies=rows, gathers=gathers, zeros=zeros)


def short_rows(casts: Sequence[tuple[str, str]], copies: NDArray[np.void], limit: int) -> NDArray[np.void]:
    """Split rows of more than ``limit`` elements: a thread cannot be stopped in the middle of one."""
    if not len(copies):
        return copies
    pieces = -(-copies["numel"].astype(np.int64) // limit)
    rows = np.repeat(copies, pieces)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1, 2 within each row
    done = (number * limit).astype(np.uint64)
    source, target = (np.array([itemsize(pair[side]) for pair in casts], dtype=np.uint64) for side in (0, 1))
    rows["start"] += done * source[rows["cast"]]
    rows["target"] += done * target[rows["cast"]]
    rows["numel"] = np.minimum(rows["numel"] - done, np.uint64(limit))
    return rows


def runs_of(rows: NDArray[np.void], limit: int) -> Iterator[NDArray[np.void]]:
    """Consecutive rows in runs of about ``limit`` elements, so that threads share the work evenly."""
    if len(rows):
        bounds = np.flatnonzero(np.diff(np.cumsum(rows["numel"]) // np.uint64(limit))) + 1
        yield from np.split(rows, bounds)


SHARED_READ = np.dtype(
    [
        ("copy_target", "<u8"),  # first target byte of the copy that reads the values
        ("skip", "<u8"),  # bytes of that copy before the values
        ("numel", "<u8"),  # elements
        ("file", "<u4"),  # file to write the cast to: index into CopyPlan.files
        ("target", "<u8"),  # first byte there
        ("cast", "<u2"),  # index into CopyPlan.casts
    ]
)
"""One row: a run of elements to cast from the bytes that a copy reads."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedReads:
    """The rows of a plan, and the casts that share the read of a copy."""

    separate: Mapping[int, NDArray[np.void]]
    """By file: rows of COPY with a read of their own."""
    shared: Mapping[int, NDArray[np.void]]
    """By the file of the copy: rows of SHARED_READ, in the order of ``copy_target`` and ``skip``."""

    @property
    def files(self) -> set[int]:
        """The files that shared reads write to."""
        return {n for rows in self.shared.values() for n in rows["file"].tolist()}


def find_shared_reads(plan: CopyPlan, copies: Mapping[int, NDArray[np.void]]) -> SharedReads:
    """Find casts all of whose source bytes are copied by other rows.

    Args:
        plan: The plan.
        copies: Rows of COPY of each file that is still to be written.
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
    # Neither the ends of a copy nor the ends of its chunks may split an element.
    whole = ((begin[by] - begin[of]) % width[of] == 0) & (rows["target"][by].astype(np.int64) % width[of] == 0)
    found = np.bincount(which, weights=np.where(whole, high - low, 0), minlength=len(casts)).astype(np.int64)
    served = found == end[casts] - begin[casts]
    keep = served[which]
    if not keep.any():
        return nothing
    by, of, low, high = by[keep], of[keep], low[keep], high[keep]
    targets = np.array([itemsize(b) for _, b in plan.casts], dtype=np.int64)[rows["cast"][of]]
    shared = np.zeros(len(by), dtype=SHARED_READ)
    shared["copy_target"] = rows["target"][by]
    shared["skip"] = low - begin[by]
    shared["numel"] = (high - low) // width[of]
    shared["file"] = files[of]
    shared["target"] = rows["target"][of].astype(np.int64) + (low - begin[of]) // width[of] * targets
    shared["cast"] = rows["cast"][of]
    order = np.lexsort((shared["skip"], shared["copy_target"], files[by]))
    shared, of_file = shared[order], files[by[order]].astype(np.int64)
    left = np.ones(len(rows), dtype=bool)
    left[casts[served]] = False
    ends = np.cumsum([len(r) for r in copies.values()])[:-1]
    alone = (r[k] for r, k in zip(np.split(rows, ends), np.split(left, ends), strict=True))
    # Not np.unique: it imports numpy.ma, which takes longer than all of this.
    starts = np.flatnonzero(np.diff(of_file, prepend=-1))
    carried = dict(zip(of_file[starts].tolist(), np.split(shared, starts[1:]), strict=True))
    return SharedReads(dict(zip(copies, alone, strict=True)), carried)


def _apart(begin: NDArray[np.int64], end: NDArray[np.int64], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """The rows, in the order of their first byte, without those that overlap an earlier row."""
    rows = rows[np.argsort(begin[rows], kind="stable")]
    reached = np.maximum.accumulate(end[rows])
    apart: NDArray[np.bool_] = np.concatenate([np.ones(min(1, len(rows)), bool), begin[rows][1:] >= reached[:-1]])
    result: NDArray[np.intp] = rows[apart]
    return result


def _overlaps(
    begin: NDArray[np.int64], end: NDArray[np.int64], copies: NDArray[np.intp], casts: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Pairs of a copy and a cast that overlap: (rows of copies, positions in ``casts``)."""
    first = np.searchsorted(end[copies], begin[casts], side="right")
    count = np.maximum(np.searchsorted(begin[copies], end[casts], side="left") - first, 0)
    which = np.repeat(np.arange(len(casts)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)  # 0, 1, 2 for each cast
    return copies[np.repeat(first, count) + number], which
