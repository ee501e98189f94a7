"""Cuts a file of a plan, so that its bytes can be written apart from each other, by who knows no more of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.plan import Gather, TargetFile


class Cutter:
    """Cuts one file of a plan. What it gives has the file's name, size and offsets, and fewer rows.

    Args:
        casts: Of the plan.
        file: The file.
    """

    def __init__(self, casts: Sequence[tuple[str, str]], file: TargetFile) -> None:
        self._file = file
        self._source_widths, self._widths = (
            np.array([itemsize(pair[side]) for pair in casts], dtype=np.int64) for side in (0, 1)
        )
        rows = file.copies[file.copies["numel"] > 0]
        self._rows: NDArray[np.void] = rows[np.argsort(rows["target"], kind="stable")]
        # No two overlap: in the order of their first bytes they are in that of their ends.
        self._targets = self._rows["target"].astype(np.int64)
        self._ends = self._targets + self._rows["numel"].astype(np.int64) * self._widths[self._rows["cast"]]

    def touching(self, start: int, end: int) -> TargetFile:
        """All that has bytes in [start, end), whole: what ``windows.Windows`` takes these bytes from."""
        gathers = tuple(g for g in self._file.gathers if g.target < end and g.target + g.nbytes > start)
        return self._part(self._touching(start, end).copy(), gathers, start, end)

    def beginning(self, start: int, end: int) -> TargetFile:
        """The elements whose first byte lies in [start, end): so each is in one piece, wherever the file is cut."""
        rows = self._touching(start, end).copy()
        target, numel = rows["target"].astype(np.int64), rows["numel"].astype(np.int64)
        width = self._widths[rows["cast"]]
        first, last = (np.clip(-((target - byte) // width), 0, numel) for byte in (start, end))
        rows["start"] += (first * self._source_widths[rows["cast"]]).astype(np.uint64)
        rows["target"] += (first * width).astype(np.uint64)
        rows["numel"] = (last - first).astype(np.uint64)
        return self._part(rows[rows["numel"] > 0], tuple(self._cut_gathers(start, end)), start, end)

    def _touching(self, start: int, end: int) -> NDArray[np.void]:
        low = int(np.searchsorted(self._ends, start, side="right"))
        return self._rows[low : max(low, int(np.searchsorted(self._targets, end, side="left")))]

    def _cut_gathers(self, start: int, end: int) -> Iterator[Gather]:
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
