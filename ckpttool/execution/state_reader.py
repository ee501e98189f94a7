"""Read the values of a state in tensor order: from the extents of its source files, or computed by its formula."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.plan.casts import cast
from ckpttool.storage.buffers import ReadBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.execution.sources import Sources
    from ckpttool.model import Formula, State


GATHER_ELEMENTS = 1 << 18
"""Elements of one chunk from local sources."""
RUN_ELEMENTS = 1 << 17
"""Maximum number of elements of one run that a formula reads: they and the result fit into a core's cache."""
REMOTE_ELEMENTS = 1 << 20
"""Elements of one chunk from remote sources, where each chunk costs a round trip."""


def chunk_elements(*sources: Sources) -> int:
    """Return the number of elements of a chunk for the sources: more if remote."""
    return REMOTE_ELEMENTS if any(s.remote for s in sources) else GATHER_ELEMENTS


class StateReader:
    """Read states into buffers that it reuses: each thread needs a reader of its own."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._buffer = ReadBuffer()
        self._result = ReadBuffer()
        self._scratch: dict[str, ReadBuffer] = {}
        self._inner: StateReader | None = None
        """Reads computed inputs of a formula: it needs scratch arrays of its own."""
        self._owner: Formula | None = None
        self._kept: dict[int, NDArray[np.float32]] = {}
        """Small inputs of the formula ``_owner``, by identity."""

    def chunks(
        self, state: State, first: int = 0, last: int | None = None, step: int | None = None
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the elements [first, last) of a state, chunk by chunk in order: (first element, values).

        Args:
            state: The state to read.
            first: The first element.
            last: One past the last element; default: all.
            step: Elements of a chunk; default: ``chunk_elements`` of the sources.

        The values are valid until the next chunk is requested.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        last = state.numel if last is None else last
        step = step or chunk_elements(self._sources)
        if state.formula is not None:
            step = max(1, step // state.formula.block) * state.formula.block
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
        if state.formula is not None:
            state.formula.fill(first, out, self)
            return
        self._fill(state, first, out)
        if state.mean_with:
            part = np.empty_like(out)
            with np.errstate(all="ignore"):
                # Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py (``merge_tp_slices``): sum, then divide.
                for other in state.mean_with:
                    self._fill(other, first, part)
                    out += part
                out /= np.asarray(len(state.mean_with) + 1, dtype=out.dtype)

    def runs(self, state: State, first: int, count: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield elements of a state in runs, in any order: (offset from ``first``, values).

        Values are valid until the next run is requested. Unlike ``chunks`` this saves a copy where files contain runs.

        Args:
            state: The state to read.
            first: The first element.
            count: Number of elements.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        blocks = list(_blocks(state, first, first + count)) if state.formula is None and not state.mean_with else []
        if not blocks or self._sources.remote or any(block.runs > 1 for block in blocks):
            if state.formula is not None and self._inner is None:
                self._inner = StateReader(self._sources)
            reader = self._inner if state.formula is not None and self._inner is not None else self
            out = self.scratch("run", count, state.dtype)
            reader.fill(state, first, out)
            yield 0, out
            return
        for block in blocks:
            for done in range(0, block.span, RUN_ELEMENTS):
                position, number = block.position + done * itemsize(state.dtype), min(RUN_ELEMENTS, block.span - done)
                yield block.at + done, self._buffer.read(self._sources[block.file], position, number, state.dtype)

    def scratch(self, name: str, count: int, dtype: str) -> NDArray[Any]:
        """Return an array of ``count`` elements, valid until the next call with this name."""
        return self._scratch.setdefault(name, ReadBuffer()).array(count, dtype)

    def whole(self, state: State, owner: Formula) -> NDArray[np.float32]:
        """Return all elements of a small state in fp32, in its shape; kept until another ``owner`` asks.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        if self._owner is not owner:
            self._owner, self._kept = owner, {}
        found = self._kept.get(id(state))
        if found is None:
            out = np.empty(state.numel, dtype=numpy_dtype(state.dtype))
            self.fill(state, 0, out)
            found = self._kept[id(state)] = cast(out, "F32").reshape(state.shape)
        return found

    def _fill(self, state: State, first: int, out: NDArray[Any]) -> None:
        blocks = _blocks(state, first, first + len(out))
        if self._sources.remote:
            held = list(blocks)
            width = itemsize(state.dtype)
            found = self._sources.fetch([(p.file, p.position, p.position + p.span * width) for p in held])
            for block, data in zip(held, found, strict=True):
                _copy_block(block, np.frombuffer(data, dtype=numpy_dtype(state.dtype)), out)
            return
        for block in blocks:
            reader = self._sources[block.file]
            if block.runs == 1:
                reader.read_into(block.position, out[block.at : block.at + block.numel].view(np.uint8).data)
            else:
                _copy_block(block, self._buffer.read(reader, block.position, block.span, state.dtype), out)


@dataclass(frozen=True, slots=True)
class _StridedBlock:
    """Runs of elements at equal distances, both in the file and in the tensor."""

    file: int
    position: int
    """First byte in the file."""
    runs: int
    numel: int
    """Elements of each run."""
    stride: int
    """Elements from one run to the next in the file."""
    at: int
    """First element in the output array."""
    pitch: int
    """Elements from one run to the next in the output array."""

    @property
    def span(self) -> int:
        """Number of elements from the first to the last, gaps included, in the file."""
        return (self.runs - 1) * self.stride + self.numel


def _blocks(state: State, first: int, last: int) -> Iterator[_StridedBlock]:
    """Yield the blocks of a state's own extents that contain elements of [first, last)."""
    rows = state.extents
    if len(rows) == 1:  # of a contiguous tensor; numpy would take longer than reading
        return _blocks_of(rows[0], itemsize(state.dtype), first, last)
    runs = rows["runs"].astype(np.int64)
    begin = rows["start"].astype(np.int64)
    end = begin + (runs - 1) * rows["pitch"].astype(np.int64) + rows["numel"].astype(np.int64)
    wanted = rows[(rows["numel"] > 0) & (begin < last) & (end > first)]
    return chain.from_iterable(_blocks_of(row, itemsize(state.dtype), first, last) for row in wanted)


def _blocks_of(row: Any, width: int, first: int, last: int) -> Iterator[_StridedBlock]:
    """Yield the blocks of one extent that hold elements of [first, last)."""
    start, numel, runs = int(row["start"]), int(row["numel"]), int(row["runs"])
    pitch, stride, offset, file = int(row["pitch"]), int(row["stride"]), int(row["offset"]), int(row["file"])
    # Runs low to high are wholly inside [first, last); at most one run before and one after them is clipped.
    low = 0 if start >= first else min(runs, -(-(first - start) // pitch) if runs > 1 else 1)
    high = max(low, min(runs, (last - numel - start) // pitch + 1 if runs > 1 else int(start + numel <= last)))
    if high > low:
        yield _StridedBlock(
            file, offset + low * stride * width, high - low, numel, stride, start + low * pitch - first, pitch
        )
    for block in {max(low - 1, 0), min(high, runs - 1)} - set(range(low, high)):
        a, b = max(first, start + block * pitch), min(last, start + block * pitch + numel)
        if a < b:
            position = offset + (block * stride + a - start - block * pitch) * width
            yield _StridedBlock(file, position, 1, b - a, b - a, a - first, b - a)


def _copy_block(block: _StridedBlock, values: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy the values of a block into the output array."""
    if block.runs == 1:
        out[block.at : block.at + block.numel] = values
        return
    shape = (block.runs, block.numel)
    strides = [(n * out.itemsize, out.itemsize) for n in (block.stride, block.pitch)]
    into = np.lib.stride_tricks.as_strided(out[block.at :], shape, strides[1])
    into[...] = np.lib.stride_tricks.as_strided(values, shape, strides[0])


def whole(sources: Sources, state: State) -> NDArray[Any]:
    """Return all elements of a state as a new array in its shape."""
    out = np.empty(state.numel, dtype=numpy_dtype(state.dtype))
    StateReader(sources).fill(state, 0, out)
    return out.reshape(state.shape)
