"""Puts elements of a state together in memory, in the order of the tensor, from wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.sources import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.execution.sources import Sources
    from ckpttool.model import State

GATHER_ELEMENTS = 1 << 18
"""Elements put together at a time;"""
REMOTE_ELEMENTS = 1 << 20
"""and where each time costs a round trip."""


def chunk_elements(*sources: Sources) -> int:
    """Elements that are best put together at a time."""
    return REMOTE_ELEMENTS if any(s.remote for s in sources) else GATHER_ELEMENTS


class Gatherer:
    """Puts states together; its memory is used again and again, so that each thread needs one of its own."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._scratch = Scratch()
        self._result = Scratch()

    def chunks(
        self, state: State, first: int = 0, last: int | None = None, step: int | None = None
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """The elements [first, last) of a state, piece by piece in order: (first element, values).

        Args:
            state: What to put together.
            first: The first element.
            last: One past the last element; default: all.
            step: Elements of a piece; default: what suits the sources.

        The values are valid until the next piece is asked for.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        last = state.numel if last is None else last
        step = step or chunk_elements(self._sources)
        for begin in range(first, last, step):
            count = min(step, last - begin)
            out = self._result.array(count, state.dtype)
            self.fill(state, begin, out)
            yield begin, out

    def fill(self, state: State, first: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with as many elements of a state, from ``first`` on.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        self._fill(state, first, out)
        if state.mean_with:
            part = np.empty_like(out)
            with np.errstate(all="ignore"):
                # Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py (``merge_tp_slices``): sum, then divide.
                for other in state.mean_with:
                    self._fill(other, first, part)
                    out += part
                out /= np.asarray(len(state.mean_with) + 1, dtype=out.dtype)

    def _fill(self, state: State, first: int, out: NDArray[Any]) -> None:
        last = first + len(out)
        rows = state.extents
        runs = rows["runs"].astype(np.int64)
        begin = rows["start"].astype(np.int64)
        end = begin + (runs - 1) * rows["pitch"].astype(np.int64) + rows["numel"].astype(np.int64)
        wanted = rows[(rows["numel"] > 0) & (begin < last) & (end > first)]
        pieces = chain.from_iterable(_pieces(row, itemsize(state.dtype), first, last) for row in wanted)
        if self._sources.remote:
            held = list(pieces)
            width = itemsize(state.dtype)
            found = self._sources.fetch([(p.file, p.position, p.position + p.span * width) for p in held])
            for piece, data in zip(held, found, strict=True):
                _weave(piece, np.frombuffer(data, dtype=numpy_dtype(state.dtype)), out)
            return
        for piece in pieces:
            _weave(piece, self._scratch.read(self._sources[piece.file], piece.position, piece.span, state.dtype), out)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Runs of elements that lie at equal distances, in the file as in the tensor."""

    file: int
    position: int
    """First byte in the file."""
    runs: int
    numel: int
    """Elements of each run."""
    stride: int
    """Elements from one run to the next in the file."""
    at: int
    """First element in the window."""
    pitch: int
    """Elements from one run to the next in the window."""

    @property
    def span(self) -> int:
        """Elements from the first to the last, in the file."""
        return (self.runs - 1) * self.stride + self.numel


def _pieces(row: Any, width: int, first: int, last: int) -> Iterator[_Piece]:
    """What one extent holds of the elements [first, last)."""
    start, numel, runs = int(row["start"]), int(row["numel"]), int(row["runs"])
    pitch, stride, offset, file = int(row["pitch"]), int(row["stride"]), int(row["offset"]), int(row["file"])
    # Runs wholly inside; before and behind them at most one each is cut by the window.
    low = 0 if start >= first else min(runs, -(-(first - start) // pitch) if runs > 1 else 1)
    high = max(low, min(runs, (last - numel - start) // pitch + 1 if runs > 1 else int(start + numel <= last)))
    if high > low:
        yield _Piece(file, offset + low * stride * width, high - low, numel, stride, start + low * pitch - first, pitch)
    for run in {max(low - 1, 0), min(high, runs - 1)} - set(range(low, high)):
        a, b = max(first, start + run * pitch), min(last, start + run * pitch + numel)
        if a < b:
            position = offset + (run * stride + a - start - run * pitch) * width
            yield _Piece(file, position, 1, b - a, b - a, a - first, b - a)


def _weave(piece: _Piece, values: NDArray[Any], out: NDArray[Any]) -> None:
    """Put a piece in its place."""
    if piece.runs == 1:
        out[piece.at : piece.at + piece.numel] = values
        return
    shape = (piece.runs, piece.numel)
    strides = [(n * out.itemsize, out.itemsize) for n in (piece.stride, piece.pitch)]
    into = np.lib.stride_tricks.as_strided(out[piece.at :], shape, strides[1])
    into[...] = np.lib.stride_tricks.as_strided(values, shape, strides[0])


def whole(sources: Sources, state: State) -> NDArray[Any]:
    """All elements of a state, in its shape, in memory of their own."""
    out = np.empty(state.numel, dtype=numpy_dtype(state.dtype))
    Gatherer(sources).fill(state, 0, out)
    return out.reshape(state.shape)
