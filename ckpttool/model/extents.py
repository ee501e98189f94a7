"""Tables of extents: the place of the elements of a tensor, as rows of numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.ranges import exact_cover_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ckpttool.ranges import CoverProblem

EXTENT = np.dtype(
    [
        ("start", "<u8"),  # first element, in elements of the flattened tensor (C order)
        ("numel", "<u8"),  # elements of one run; 0 where a rank has only padding
        ("file", "<u4"),  # index into Checkpoint.files
        ("offset", "<u8"),  # first byte, counted from the start of that file
        ("padding", "<u8"),  # elements of padding stored after them
        ("runs", "<u8"),  # number of runs: 1, except for a tensor that is cut across its rows
        ("pitch", "<u8"),  # elements of the tensor between the starts of two runs
        ("stride", "<u8"),  # elements of the file between the starts of two runs
    ]
)
"""One row: a contiguous run of elements in one file, or many such runs at equal distances (the columns of a
tensor-parallel rank). Rows are in ascending ``start``."""


def blank_rows(count: int) -> NDArray[np.void]:
    """A table of extents to fill in, each a single run."""
    table = np.zeros(count, dtype=EXTENT)
    table["runs"] = 1
    return table


def single_runs(table: NDArray[np.void], width: int) -> NDArray[np.void]:
    """The same extents with a row for each run, in ascending start; ``width`` is the bytes of an element."""
    if not (table["runs"] > 1).any():
        return table
    runs = table["runs"].astype(np.int64)
    rows = np.repeat(table, runs)
    number = (np.arange(len(rows)) - np.repeat(np.cumsum(runs) - runs, runs)).astype(np.uint64)
    rows["start"] += number * rows["pitch"]
    rows["offset"] += number * rows["stride"] * np.uint64(width)
    rows["padding"][:-1][np.diff(np.repeat(np.arange(len(table)), runs)) == 0] = 0  # it is stored after the last run
    rows["runs"] = 1
    return rows[np.argsort(rows["start"], kind="stable")]


def stored_blocks(table: NDArray[np.void], width: int) -> NDArray[np.void]:
    """The same bytes as contiguous blocks of the file, regardless of their place in the tensor."""
    table = table.copy()
    dense = (table["runs"] > 1) & (table["stride"] == table["numel"])
    table["numel"][dense] *= table["runs"][dense]
    table["runs"][dense] = 1
    return single_runs(table, width)


def suspects(tensors: Sequence[tuple[NDArray[np.void], int, str]], sizes: Sequence[int]) -> list[int]:
    """Find the tensors that may be incomplete, out of order or beyond their files, by one vectorised check.

    Args:
        tensors: Rows of EXTENT, number of elements and type of each.
        sizes: Bytes of each file.

    Returns:
        Indices of tensors.
    """
    if not tensors:
        return []
    nbytes = np.array(sizes, dtype=np.uint64)
    number = np.repeat(np.arange(len(tensors)), [len(rows) for rows, _, _ in tensors])
    rows = np.concatenate([rows for rows, _, _ in tensors])
    woven = number[rows["runs"] > 1]
    item = np.array([itemsize(dtype) for _, _, dtype in tensors], dtype=np.uint64)
    bad = rows["offset"] + rows["numel"] * item[number] > nbytes[rows["file"]]
    wrong = np.zeros(len(tensors), dtype=bool)
    wrong[number[bad]] = wrong[woven] = True
    # Of the rows with elements, each begins at the end of the one before it, and the last one reaches the end.
    held = rows["numel"] > 0
    number, start, end = number[held], rows["start"][held], (rows["start"] + rows["numel"])[held]
    first = np.diff(number, prepend=-1) > 0
    wrong[number[start != np.where(first, 0, np.roll(end, 1))]] = True
    total = np.zeros(len(tensors), dtype=np.uint64)
    total[number] = end  # the last run of a tensor wins
    wrong |= total != np.array([numel for _, numel, _ in tensors], dtype=np.uint64)
    return [int(i) for i in np.flatnonzero(wrong)]


def cover_problem(table: NDArray[np.void], numel: int, dtype: str) -> CoverProblem | None:
    """Find the first elements of a tensor that its extents do not contain exactly once."""
    rows = single_runs(table, itemsize(dtype))
    return exact_cover_problem(rows["start"], rows["numel"], numel)


def file_too_short(table: NDArray[np.void], dtype: str, sizes: Sequence[int]) -> int | None:
    """Return the index of the first file that ends before an extent of a tensor; None if all are inside."""
    rows = single_runs(table, itemsize(dtype))
    ends = rows["offset"] + rows["numel"] * np.uint64(itemsize(dtype))
    outside = np.flatnonzero(ends > np.array(sizes, dtype=np.uint64)[rows["file"]])
    return int(rows["file"][outside[0]]) if outside.size else None
