"""The layout of a checkpoint for pictures: the place of each tensor in the files, in few numbers.

Extents that repeat from rank to rank are one row with a count: 1T parameters over 1024 ranks are a few thousand rows.
"""

from __future__ import annotations

import re
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.analysis.stored import BUFFER, stored_states
from ckpttool.dtypes import itemsize
from ckpttool.model import MASTER, MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint


_TENSOR, _STATE, _FILE, _COUNT, _FILE_STEP, _OFFSET, _OFFSET_STEP = range(7)
_START, _START_STEP, _NUMEL, _PADDING, _RUNS, _PITCH, _WIDTH, _REPLICA, _EXTENTS, _DTYPE = range(7, 17)
_GAP = 64
"""Most bytes between two extents that count as contiguous: torch aligns tensors in a file."""


class Folding(Enum):
    """Options of folding tensors."""

    NONE = 0
    EXPERTS = 1
    LAYERS = 2
    ALL = 3


def folded_name(name: str, layer: str, folding: Folding) -> str:
    """Return the common name of a tensor and the others of its fold."""
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
        folding: Options of folding.

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
    """Merge the files of one kind and lane; place their tensors contiguously.

    Args:
        table: Rows of the layout.
        files: Its files.
        lanes: Its lanes.
        usage: Bytes of each file by category.

    Returns:
        The same for the joined files.
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
    """Merge contiguous rows of one tensor in the same files, then rows that repeat over files.

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
    """Merge rows of one file each that differ only in the file."""
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


COLUMNS = (
    "tensor",
    "state",
    "file",
    "count",
    "file_step",
    "offset",
    "offset_step",
    "start",
    "start_step",
    "numel",
    "padding",
    "runs",
    "pitch",
    "width",
    "replica",
    "extents",
    "dtype",
)
"""Columns of a row, which represents ``count`` extents, the i-th of them in file ``file + i * file_step``, at byte
``offset + i * offset_step``, with elements from ``start + i * start_step`` on. ``tensor``, ``state`` and ``dtype`` are
indices, ``width`` is the bytes of an element, ``numel``, ``padding``, ``runs`` and ``pitch`` are columns of ``EXTENT``,
and ``replica`` is 1 for a copy of values that are read elsewhere. In a layout that was folded, each of them represents
``extents`` contiguous extents of the file."""
CATEGORIES = ("masters", "moments", "copies", "buffers", "replicas", "padding", "overhead")
"""Uses of the bytes of a file. Overhead: pickles, zip records, and tensors that belong to no parameter or buffer."""
MAX_TENSORS = 6_000
"""Maximum number of tensors in a layout; more are folded."""
MAX_ROWS = 60_000
"""Maximum number of rows in a layout."""
MAX_FILES = 5_000
"""Maximum number of files in a layout; more are joined: files of one kind and rank become one."""
MAX_LANES = 64
"""Maximum number of files without a rank that get a lane each."""
_EXPERT = re.compile(r"(^|\.)(deepspeed_)?experts?(\.|$)")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def layout(
    checkpoint: Checkpoint, *, max_tensors: int = MAX_TENSORS, max_rows: int = MAX_ROWS, max_files: int = MAX_FILES
) -> dict[str, Any]:
    """Describe the place of the bytes of a checkpoint, as plain values for JSON.

    Args:
        checkpoint: The checkpoint.
        max_tensors: Maximum number of tensors; more are folded by their names.
        max_rows: Maximum number of rows.
        max_files: Maximum number of files; more are joined by kind and rank.

    Returns:
        "states", "dtypes", "layers": names in the order of their indices; "widths": bytes of an element by dtype;
        "tensors": columns "name", "shape", "numel", "kind" ("trained", "frozen" or "buffer"), "expert", "tied",
        "group" (-2 if none), "layer", "count" (tensors that it represents); "rows": columns ``COLUMNS``; "extents":
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
    held = dict.fromkeys(key for p in checkpoint.parameters for key in p.tensors)
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
                head[0],
                head[1],
                file,
                end - first,
                int(step[0]),
                offset,
                int(step[1]),
                start,
                int(step[2]),
                numel,
                padding,
                runs,
                pitch,
                head[2],
                head[3],
                1,
                head[4],
            )
        )
    return encoded


def _repeated(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the ranges of extents that differ only in file, offset and start, by equal steps."""
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
