"""Map slices of a tensor to the whole tensor, as strided boxes."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.dtypes import itemsize
from ckpttool.model import State
from ckpttool.model.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray


class Box(NamedTuple):
    """Runs of equal length at equal distances, in a slice and in the whole tensor, both flattened in C order."""

    source: int
    """First element in the slice."""
    target: int
    """First element in the whole."""
    runs: int
    """Number of runs."""
    numel: int
    """Elements of each run."""
    stride: int
    """Distance of the starts of two runs in the slice, in elements."""
    pitch: int
    """Distance of the starts of two runs in the whole, in elements."""


def box(
    part: tuple[int, ...], whole: tuple[int, ...], dim: int, *, source: int, target: int, count: int | None = None
) -> Box:
    """Make the box of a slice along one dimension of the whole tensor.

    Args:
        part: Shape of the slice.
        whole: Shape of the whole tensor, the same but for ``dim``.
        dim: The cut dimension.
        source: First index of the box along ``dim`` of the slice.
        target: First index of the box along ``dim`` of the whole.
        count: Length of the box along ``dim``; default: all of the slice.
    """
    count = part[dim] if count is None else count
    inner = math.prod(part[dim + 1 :])
    return Box(
        source=source * inner,
        target=target * inner,
        runs=math.prod(part[:dim]),
        numel=count * inner,
        stride=part[dim] * inner,
        pitch=whole[dim] * inner,
    )


def boxes_of(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[Box]:
    """Return a block of a tensor as boxes: one if a single dimension is cut, else one for each index of the outer ones.

    Args:
        offsets: First index of the block in each dimension.
        sizes: Its shape.
        shape: Shape of the whole tensor.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    if not shape:
        return [Box(0, 0, 1, 1, 1, 1)]
    numel = sizes[last] * strides[last]
    outer = sizes[:last]
    runs, rows = (outer[-1], outer[:-1]) if outer else (1, ())
    pitch = strides[last - 1] if outer else numel
    result = []
    for i, index in enumerate(itertools.product(*map(range, rows))):
        at = sum(
            (o + k) * s for o, k, s in zip(offsets, (*index, *[0] * (len(shape) - len(index))), strides, strict=True)
        )
        result.append(Box(i * runs * numel, at, runs, numel, numel, pitch))
    return result


class Slice(NamedTuple):
    """A stored slice of a tensor."""

    numel: int
    """Elements of the slice."""
    dtype: str
    """Its type, safetensors' spelling."""
    place: Place
    """The place of its elements."""
    boxes: tuple[Box, ...]
    """The elements that belong to the whole tensor, and where."""


class Sliced(Place):
    """The elements of a tensor in its slices.

    Args:
        numel: Elements of the tensor.
        width: Bytes of an element.
        slices: The slices.
    """

    __slots__ = ("_rows", "numel", "slices", "width")

    def __init__(self, numel: int, width: int, slices: tuple[Slice, ...]) -> None:
        self.numel = numel
        self.width = width
        self.slices = slices
        self._rows: NDArray[np.void] | None = None

    @property
    def rows(self) -> NDArray[np.void]:
        """Rows of EXTENT; computed once."""
        if self._rows is None:
            self._rows = self._merge()
            self._rows.flags.writeable = False
        return self._rows

    def _merge(self) -> NDArray[np.void]:
        import numpy as np  # a layout is shown without it

        from ckpttool.model.extents import EXTENT, single_runs

        rows: list[tuple[int, ...]] = []
        for part in self.slices:
            for extent in single_runs(part.place.rows, self.width):
                placed = [row for b in part.boxes for row in _placed(extent, b, self.width)]
                if placed:
                    placed[-1] = (*placed[-1][:4], int(extent["padding"]), *placed[-1][5:])
                rows += placed
        table: NDArray[np.void] = np.array(rows, dtype=EXTENT)
        table = table[np.argsort(table["start"], kind="stable")]
        plain = table["runs"] == 1
        beyond = np.zeros(len(table), dtype=np.uint64)
        end = table["start"] + table["numel"]
        beyond[plain] = np.minimum(np.maximum(end, self.numel) - np.uint64(self.numel), table["numel"])[plain]
        table["numel"] -= beyond
        table["padding"] += beyond
        table["start"] = np.minimum(table["start"], self.numel)
        return table

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether the boxes are blocks of columns (or of rows) side by side, in slices that are sound."""
        boxes = sorted((b for part in self.slices for b in part.boxes if b.runs and b.numel), key=lambda b: b.target)
        if not boxes or numel != self.numel or itemsize(dtype) != self.width:
            return False
        runs, pitch = boxes[0].runs, boxes[0].pitch
        at = 0
        for b in boxes:
            if (b.target, b.runs) != (at, runs) or (runs > 1 and b.pitch != pitch):
                return False
            at += b.numel
        # A single run may have more elements than the tensor: rows that pad a vocabulary.
        if (at != pitch or runs * pitch != numel) if runs > 1 else at < numel:
            return False
        return all(
            part.place.sound(part.numel, part.dtype, sizes)
            and itemsize(part.dtype) == self.width
            and all(
                b.source + (b.runs - 1) * b.stride + b.numel <= part.numel and b.numel <= b.stride for b in part.boxes
            )
            for part in self.slices
        )


def merge_slices(
    parts: Sequence[tuple[State, Sequence[Box]]], shape: tuple[int, ...], dtype: str | None = None
) -> State:
    """Merge the states of slices into the state of the whole tensor.

    Elements beyond the whole (rows that pad a vocabulary) count as padding.

    Args:
        parts: Each slice and its boxes.
        shape: Shape of the whole tensor.
        dtype: Type of the whole tensor; default: the type of the first slice.
    """
    dtype = dtype or parts[0][0].dtype
    slices = tuple(Slice(math.prod(state.shape), state.dtype, state.place, tuple(boxes)) for state, boxes in parts)
    return State(shape, dtype, Sliced(math.prod(shape), itemsize(dtype), slices))


def _placed(extent: np.void, b: Box, width: int) -> Iterator[tuple[int, ...]]:
    """Yield the rows of EXTENT for the part of an extent inside a box: whole runs, and partial runs at its ends."""
    first, last = int(extent["start"]), int(extent["start"]) + int(extent["numel"])
    at = max(first, b.source)
    run, within = divmod(at - b.source, b.stride) if b.stride else (0, 0)
    if within >= b.numel:
        run, within = run + 1, 0
        at = b.source + run * b.stride
    while run < b.runs and at < last and b.numel:
        runs, numel = 1, min(b.numel - within, last - at)
        if within == 0 and numel == b.numel and b.runs - run > 1:
            runs = min(b.runs - run, 1 + (last - at - b.numel) // b.stride)
        start = b.target + run * b.pitch + within
        offset = int(extent["offset"]) + (at - first) * width
        if runs > 1 and b.stride == b.pitch == b.numel:
            yield (start, numel * runs, int(extent["file"]), offset, 0, 1, 0, 0)
        else:
            yield (start, numel, int(extent["file"]), offset, 0, runs, b.pitch, b.stride)
        run, within = run + runs, 0
        at = b.source + run * b.stride


def is_expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements of a live tensor share memory, so that torch cannot write into it.

    Source: torch 2.13, aten/src/ATen/MemoryOverlap.cpp (``has_internal_overlap``).
    """
    return any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True))
