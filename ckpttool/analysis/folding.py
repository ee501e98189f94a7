"""Fold the tensors of a large layout: experts of one layer, then whole layers, then all, become one entry each."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TENSOR, _STATE, _FILE, _COUNT, _FILE_STEP, _OFFSET, _OFFSET_STEP = range(7)
_START, _START_STEP, _NUMEL, _PADDING, _RUNS, _PITCH, _WIDTH, _REPLICA, _EXTENTS, _DTYPE = range(7, 17)
_GAP = 64
"""Bytes between two extents that still lie one behind the other: torch aligns tensors in a file."""


class Folding(Enum):
    """How far tensors are folded."""

    NONE = 0
    EXPERTS = 1
    LAYERS = 2
    ALL = 3


def folded_name(name: str, layer: str, folding: Folding) -> str:
    """Return the name that stands for a tensor and others."""
    if folding is Folding.EXPERTS:
        return re.sub(r"(experts?\.)\d+(?=\.|$)", r"\1*", name)
    inside = name.startswith(f"{layer}.")
    if folding is Folding.LAYERS:
        return f"{layer}.*" if inside else name
    return re.sub(r"\d+", "*", f"{layer}.*" if inside else name)


def fold(tensors: dict[str, list[Any]], folding: Folding) -> tuple[dict[str, list[Any]], NDArray[np.int64]]:
    """Fold a table of tensors.

    Args:
        tensors: Columns of the table.
        folding: How far.

    Returns:
        The smaller table, and for each row of the old table the number of its row in that.
    """
    place: dict[tuple[str, str], int] = {}
    numbers = np.zeros(len(tensors["name"]), dtype=np.int64)
    folded: dict[str, list[Any]] = {column: [] for column in tensors}
    for i, name in enumerate(tensors["name"]):
        kind = tensors["kind"][i]
        new = folded_name(name, tensors["layer"][i], folding)
        at = place.setdefault((new, kind), len(place))
        numbers[i] = at
        if at == len(folded["name"]):
            for column, values in tensors.items():
                folded[column].append(values[i])
            folded["name"][at] = new
            if folding is Folding.ALL:
                folded["layer"][at] = re.sub(r"\d+", "*", tensors["layer"][i])
            continue
        folded["numel"][at] += tensors["numel"][i]
        folded["count"][at] += tensors["count"][i]
        folded["shape"][at] = []
        for column in ("expert", "tied"):
            folded[column][at] |= tensors[column][i]
        if folded["group"][at] != tensors["group"][i]:
            folded["group"][at] = max(folded["group"][at], tensors["group"][i])
    return folded, numbers


def join_files(
    table: NDArray[np.int64], files: list[dict[str, Any]], lanes: list[dict[str, Any]], usage: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[dict[str, Any]], list[dict[str, Any]], NDArray[np.int64]]:
    """Join the files of one kind and lane to one, with their tensors one behind the other.

    Args:
        table: Rows of the layout.
        files: Its files.
        lanes: Its lanes.
        usage: Bytes of each file by category.

    Returns:
        The same of the joined files.
    """
    counts = table[:, _COUNT].copy()
    table = np.repeat(table, counts, axis=0)
    within = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    for column, step in ((_FILE, _FILE_STEP), (_OFFSET, _OFFSET_STEP), (_START, _START_STEP)):
        table[:, column] += within * table[:, step]
    table[:, (_FILE_STEP, _OFFSET_STEP, _START_STEP)] = 0
    table[:, _COUNT] = 1
    target = np.zeros(len(files), dtype=np.int64)
    joined: list[dict[str, Any]] = []
    for lane in lanes:
        kinds: dict[str, int] = {}
        for i in lane["files"]:
            target[i] = kinds.setdefault(files[i]["kind"], len(joined))
            if target[i] == len(joined):
                joined.append(files[i] | {"nbytes": 0, "count": 0})
            joined[target[i]]["nbytes"] += files[i]["nbytes"]
            joined[target[i]]["count"] += 1
        lane["files"] = list(kinds.values())
    for file in joined:
        file["name"] = file["name"] if file["count"] == 1 else f"{file['count']:,} files: {file['kind']}"
    table = table[np.lexsort([table[:, _OFFSET], table[:, _FILE], target[table[:, _FILE]]])]
    table[:, _FILE] = target[table[:, _FILE]]
    length = (table[:, _NUMEL] * table[:, _RUNS] + table[:, _PADDING]) * table[:, _WIDTH]
    end = np.cumsum(length)
    first = np.concatenate([[True], np.diff(table[:, _FILE]) != 0])
    table[:, _OFFSET] = end - length - np.repeat((end - length)[first], np.diff([*np.flatnonzero(first), len(table)]))
    spent = np.zeros((len(usage), len(joined)), dtype=np.int64)
    for category, values in enumerate(usage):
        np.add.at(spent[category], target, values)
    return table, joined, lanes, spent


def merge_adjacent(table: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge rows of one tensor that lie one behind the other in the same files, then rows that repeat over files.

    The place of their elements in the tensor is lost.
    """
    flat = table.copy()
    flat[:, _NUMEL] *= flat[:, _RUNS]
    flat[:, (_RUNS, _PITCH, _START, _START_STEP)] = (1, 0, 0, 0)
    flat = _merged_in_files(flat)
    return _merged_over_files(flat)


def _merged_in_files(flat: NDArray[np.int64]) -> NDArray[np.int64]:
    same = (_STATE, _TENSOR, _FILE, _COUNT, _FILE_STEP, _OFFSET_STEP, _WIDTH, _REPLICA, _DTYPE)
    flat = flat[np.lexsort([flat[:, _OFFSET], *(flat[:, column] for column in reversed(same))])]
    end = flat[:, _OFFSET] + (flat[:, _NUMEL] + flat[:, _PADDING]) * flat[:, _WIDTH]
    gap = flat[1:, _OFFSET] - end[:-1]
    joins = (flat[1:, same] == flat[:-1, same]).all(axis=1) & (gap >= 0) & (gap < _GAP)
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    merged = flat[firsts]
    for column in (_NUMEL, _PADDING, _EXTENTS):
        merged[:, column] = np.add.reduceat(flat[:, column], firsts)
    return merged


def _merged_over_files(flat: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge rows of one file each that differ in the file alone."""
    same = (_STATE, _TENSOR, _COUNT, _OFFSET, _NUMEL, _PADDING, _WIDTH, _REPLICA, _EXTENTS, _DTYPE)
    flat = flat[np.lexsort([flat[:, _FILE], *(flat[:, column] for column in reversed(same))])]
    step = flat[1:, _FILE] - flat[:-1, _FILE]
    joins = (flat[1:, same] == flat[:-1, same]).all(axis=1) & (flat[1:, _COUNT] == 1) & (step > 0)
    keep = np.ones(len(flat), dtype=bool)
    first = 0
    for i in range(1, len(flat)):
        steady = flat[first, _COUNT] == 1 or step[i - 1] == flat[first, _FILE_STEP]
        if joins[i - 1] and steady:
            flat[first, _FILE_STEP] = step[i - 1]
            flat[first, _COUNT] += 1
            keep[i] = False
        else:
            first = i
    return flat[keep]
