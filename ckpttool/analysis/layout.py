"""The layout of a checkpoint for pictures: which tensor lies where in which file, in few numbers.

Extents that repeat from rank to rank are one row with a count: 1T parameters over 1024 ranks are a few thousand rows.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.analysis.folding import Folding, fold, join_files, merge_adjacent
from ckpttool.analysis.stored import BUFFER, stored_states
from ckpttool.dtypes import itemsize
from ckpttool.model import MASTER, MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint

COLUMNS = (
    "tensor", "state", "file", "count", "file_step", "offset", "offset_step", "start", "start_step", "numel", "padding",
    "runs", "pitch", "width", "replica", "extents", "dtype",
)  # fmt: skip
"""Columns of a row, which stands for ``count`` extents, the i-th of them in file ``file + i * file_step``, at byte
``offset + i * offset_step``, with elements from ``start + i * start_step`` on. ``tensor``, ``state`` and ``dtype`` are
indices, ``width`` is the bytes of an element, ``numel``, ``padding``, ``runs`` and ``pitch`` are those of ``EXTENT``,
and ``replica`` is 1 for a copy of values that are read elsewhere. In a layout that was folded, each of them stands for
``extents`` extents that lie one behind the other in the file."""
CATEGORIES = ("masters", "moments", "copies", "buffers", "replicas", "padding", "overhead")
"""Uses of the bytes of a file. Overhead: pickles, zip records, and tensors that belong to no parameter or buffer."""
MAX_TENSORS = 6_000
"""Maximum number of tensors in a layout; more are folded."""
MAX_ROWS = 60_000
"""Maximum number of rows in a layout."""
MAX_FILES = 5_000
"""Maximum number of files in a layout; more are joined, those of one kind and rank to one."""
MAX_LANES = 64
"""Maximum number of files without a rank that get a lane each."""
_EXPERT = re.compile(r"(^|\.)(deepspeed_)?experts?(\.|$)")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def layout(
    checkpoint: Checkpoint, *, max_tensors: int = MAX_TENSORS, max_rows: int = MAX_ROWS, max_files: int = MAX_FILES
) -> dict[str, Any]:
    """Describe where the bytes of a checkpoint lie, as plain values for JSON.

    Args:
        checkpoint: The checkpoint.
        max_tensors: Maximum number of tensors; those of a layout with more are folded by their names.
        max_rows: Maximum number of rows.
        max_files: Maximum number of files; if there are more, those of one kind and rank are joined.

    Returns:
        "states", "dtypes", "layers": names in the order of their indices; "widths": bytes of an element by dtype;
        "tensors": columns "name", "shape", "numel", "kind" ("trained", "frozen" or "buffer"), "expert", "tied",
        "group" (-2 if none), "layer", "count" (tensors that it stands for); "rows": columns ``COLUMNS``; "extents":
        extents of the checkpoint; "files"; "lanes": ranks with the indices of their files; "usage": bytes of each file
        by ``CATEGORIES``; "folded": whether tensors were folded; "joined": whether files were, so that offsets are
        positions in all files of one kind and rank.
    """
    names = _state_names(checkpoint)
    table, usage, dtypes = _table(checkpoint, names)
    tensors = _tensors(checkpoint)
    count = int(table[:, COLUMNS.index("count")].sum())
    files = [
        {"name": f.name, "nbytes": f.nbytes, "kind": f.kind, "rank": f.rank, "model_rank": f.model_rank}
        for f in checkpoint.files
    ]
    lanes = _lanes(checkpoint)
    joined = len(files) > max_files
    if joined:
        table, files, lanes, usage = join_files(table, files, lanes, usage)
    folding = Folding.NONE
    while (len(tensors["name"]) > max_tensors or len(table) > max_rows) and folding is not Folding.ALL:
        folding = Folding(folding.value + 1)
        tensors, numbers = fold(tensors, folding)
        table[:, 0] = numbers[table[:, 0]]
        table = merge_adjacent(table)
    layers = list(dict.fromkeys(tensors["layer"]))
    place = {name: i for i, name in enumerate(layers)}
    return {
        "states": names,
        "dtypes": list(dtypes),
        "widths": {name: itemsize(name) for name in dtypes},
        "tensors": tensors | {"layer": [place[name] for name in tensors["layer"]]},
        "layers": layers,
        "rows": {name: table[:, i].tolist() for i, name in enumerate(COLUMNS)},
        "extents": count,
        "files": files,
        "lanes": lanes,
        "usage": {name: usage[i].tolist() for i, name in enumerate(CATEGORIES)},
        "folded": folding is not Folding.NONE,
        "joined": joined,
    }


def _table(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """Return the rows of a layout, the bytes of each file by category, and the indices of the dtypes.

    Args:
        checkpoint: The checkpoint.
        names: Names of the states.
    """
    usage = np.zeros((len(CATEGORIES), len(checkpoint.files)), dtype=np.int64)
    rows: list[tuple[int, ...]] = []
    index = {key: i for i, key in enumerate(names)}
    counted: set[tuple[int, int, int]] = set()
    dtypes: dict[str, int] = {}
    for tensor, key, state, extents, replica in stored_states(checkpoint):
        if (place := _first_bytes(extents)) not in counted:
            counted.add(place)
            _add_usage(usage, key, extents, itemsize(state.dtype), replica)
        dtype = dtypes.setdefault(state.dtype, len(dtypes))
        rows += _encode(extents, (tensor, index[key], itemsize(state.dtype), int(replica), dtype))
    usage[-1] = np.array([f.nbytes for f in checkpoint.files], dtype=np.int64) - usage.sum(axis=0)
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(COLUMNS)), usage, dtypes


def _first_bytes(rows: NDArray[np.void]) -> tuple[int, int, int]:
    """Return (file, first byte, number of extents), which two states share only if they are the same bytes.

    Without mixed precision the module's copy is the master, and two buffers may share a storage.
    """
    held = rows[rows["numel"] + rows["padding"] > 0][:1]
    return (int(held["file"][0]), int(held["offset"][0]), len(rows)) if len(held) else (-1, -1, len(rows))


def layer_of(name: str) -> str:
    """Return the layer that a parameter belongs to: its name up to the number of the layer, or its first component."""
    outside = name[: found.start()] if (found := _EXPERT.search(name)) else name
    found = _NUMBER.search("." + outside)
    return outside[: found.end() - 1] if found else outside.partition(".")[0]


def _state_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the states: the module's copies, buffers, masters, then the optimizer's."""
    held = dict.fromkeys(key for p in checkpoint.parameters for key in p.states)
    if checkpoint.buffers:
        held[BUFFER] = None
    if any(replica.copy.dtype != replica.state.dtype for replica in checkpoint.replicas):
        held[MODULE] = None
    first = [key for key in (MODULE, BUFFER, MASTER) if key in held]
    return [*first, *(key for key in held if key not in first)]


def _add_usage(usage: NDArray[np.int64], key: str, rows: NDArray[np.void], width: int, replica: bool) -> None:
    """Add the bytes of a state to the usage of its files."""
    category = {MASTER: "masters", MODULE: "copies", BUFFER: "buffers"}.get(key, "moments")
    files = rows["file"].astype(np.int64)
    held = (rows["numel"] * rows["runs"]).astype(np.int64) * width
    np.add.at(usage[CATEGORIES.index("replicas" if replica else category)], files, held)
    np.add.at(usage[CATEGORIES.index("padding")], files, rows["padding"].astype(np.int64) * width)


def _encode(rows: NDArray[np.void], head: tuple[int, int, int, int, int]) -> list[tuple[int, ...]]:
    """Return the rows of ``COLUMNS`` for the extents of one state.

    Args:
        rows: Rows of EXTENT.
        head: Index of the tensor, index of the state, bytes of an element, whether it is a replica, index of the dtype.
    """
    if not len(rows):
        return []
    fields = ("file", "offset", "start", "numel", "padding", "runs", "pitch")
    values = np.stack([rows[name].astype(np.int64) for name in fields])
    encoded: list[tuple[int, ...]] = []
    for first, end in _repeated(values):
        file, offset, start, numel, padding, runs, pitch = (int(v) for v in values[:, first])
        step = values[:3, first + 1] - values[:3, first] if end - first > 1 else np.zeros(3, dtype=np.int64)
        encoded.append(
            (
                head[0], head[1], file, end - first, int(step[0]), offset, int(step[1]), start, int(step[2]), numel,
                padding, runs, pitch, head[2], head[3], 1, head[4],
            )
        )  # fmt: skip
    return encoded


def _repeated(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the ranges of extents that differ in file, offset and start alone, and in these by equal steps."""
    count = values.shape[1]
    if count < 3:
        return [(i, i + 1) for i in range(count)]
    alike = (values[3:, 1:] == values[3:, :-1]).all(axis=0)
    steps = values[:3, 1:] - values[:3, :-1]
    even = (steps[:, 1:] == steps[:, :-1]).all(axis=0)
    breaks = np.flatnonzero(~(alike[1:] & alike[:-1] & even)).tolist()
    ranges = []
    first = 0
    for at in breaks:  # extents at, at + 1 and at + 2 do not belong together
        if at < first:
            continue
        end = at + 2 if at > first or alike[at] else at + 1
        ranges.append((first, end))
        first = end
    if first < count:
        ranges.append((first, count))
    return [part for each in ranges for part in _checked(each, alike)]


def _checked(each: tuple[int, int], alike: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Split a range of two extents that are not alike."""
    first, end = each
    if end - first == 2 and not alike[first]:
        return [(first, first + 1), (first + 1, end)]
    return [each]


def _tensors(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """Return the columns of the table of tensors: parameters, then buffers."""
    tied = Counter(checkpoint.aliases.values())
    names = [*(p.name for p in checkpoint.parameters), *(b.name for b in checkpoint.buffers)]
    shapes = [*(p.shape for p in checkpoint.parameters), *(b.state.shape for b in checkpoint.buffers)]
    buffers = len(checkpoint.buffers)
    return {
        "name": names,
        "shape": [list(shape) for shape in shapes],
        "numel": [*(p.numel for p in checkpoint.parameters), *(b.state.numel for b in checkpoint.buffers)],
        "kind": ["trained" if p.trained else "frozen" for p in checkpoint.parameters] + [BUFFER] * buffers,
        "expert": [int(_EXPERT.search(name) is not None) for name in names],
        "tied": [int(name in tied) for name in names],
        "group": [*(-2 if p.group is None else p.group for p in checkpoint.parameters), *([-2] * buffers)],
        "layer": [layer_of(name) for name in names],
        "count": [1] * len(names),
    }


def _lanes(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the ranks and the indices of their files; files without a rank come first."""
    files = checkpoint.files
    ranked = any(f.rank is not None or f.model_rank is not None for f in files)
    if not ranked and checkpoint.format != "universal" and len(files) <= MAX_LANES:
        return [{"label": f.name, "rank": None, "model_rank": None, "files": [i]} for i, f in enumerate(files)]
    lanes: dict[tuple[int, int], list[int]] = {}
    for i, f in enumerate(files):
        key = (-1 if f.model_rank is None else f.model_rank, -1 if f.rank is None else f.rank)
        lanes.setdefault(key, []).append(i)
    return [
        {
            "label": _label(rank, model_rank, checkpoint),
            "rank": None if rank < 0 else rank,
            "model_rank": None if model_rank < 0 else model_rank,
            "files": indices,
        }
        for (model_rank, rank), indices in sorted(lanes.items())
    ]


def _label(rank: int, model_rank: int, checkpoint: Checkpoint) -> str:
    """Return the title of a lane: its place in the grid of ranks."""
    t = checkpoint.topology
    words = []
    if model_rank >= 0:
        # Source: DeepSpeed 0.19, runtime/pipe/topology.py: tensor parallelism is the inner axis of model ranks.
        stage, tensor = divmod(model_rank, max(1, t.tensor_parallel))
        words += [f"pp {stage}"] if t.pipeline_parallel > 1 else []
        words += [f"tp {tensor}"] if t.tensor_parallel > 1 else []
        words = words or [f"model rank {model_rank}"]
    if rank >= 0:
        words.append(f"rank {rank}" if not words else f"dp {rank}")
    elif not words:
        return "all ranks" if checkpoint.native else "files"
    return " ".join(words)


def expand(rows: dict[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield every extent of the rows of a layout, as a mapping with the names of ``COLUMNS``."""
    for values in zip(*(rows[name] for name in COLUMNS), strict=True):
        row = dict(zip(COLUMNS, values, strict=True))
        for i in range(row["count"]):
            steps = {name: row[name] + i * row[f"{name}_step"] for name in ("file", "offset", "start")}
            yield row | steps | {"count": 1}
