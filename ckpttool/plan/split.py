"""Splits the rows of a target file by bytes and by elements."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.plan import Gather, TargetFile


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
    """The copy rows of one target file, sorted by target byte. Rows do not overlap, and none is empty.

    Args:
        casts: (source dtype, target dtype) pairs of the plan.
        copies: Rows of COPY.
    """

    def __init__(self, casts: Sequence[tuple[str, str]], copies: NDArray[np.void]) -> None:
        self._source_widths, self._widths = (
            np.array([itemsize(pair[side]) for pair in casts], dtype=np.int64) for side in (0, 1)
        )
        # Empty rows may lie anywhere: with them the ends would not be sorted.
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
        """The elements whose first byte lies in [start, end), as rows: ranges that adjoin share no element."""
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
        """The elements whose first byte lies in [start, end): no element is split between parts."""
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
