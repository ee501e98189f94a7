"""Puts a window of a target file together in memory, from wherever its bytes lie.

For storages that are written in parts or read by requests: each window is one part, and all that it needs is asked for
at once. And for who reads a file that is nowhere written. Between local files ``execute`` copies without bringing bytes
together.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.sources import Scratch
from ckpttool.execution.state_reader import Gatherer
from ckpttool.plan.split import SortedRows, elements_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, TargetFile


class Windows:
    """The windows of one target file. Threads may share it.

    Args:
        plan: What the file is part of.
        file: The file.
        sources: What it is made of.
    """

    def __init__(self, plan: CopyPlan, file: TargetFile, sources: Sources) -> None:
        self._casts: Sequence[tuple[str, str]] = plan.casts
        self._sources = sources
        self._rows = SortedRows(plan.casts, file.copies)
        self._literals = sorted(literal for literal in file.literals if literal[1])
        self._pairs = {plan.casts[i] for i in set(self._rows.rows["cast"].tolist())}
        self._pairs |= {(g.state.dtype, g.dtype) for g in file.gathers}
        self._gathers = sorted(file.gathers, key=lambda g: g.target)
        self._zeros = sorted(zeros for zeros in file.zeros if zeros[1])

    def cost(self, nbytes: int) -> int:
        """Bytes of memory that putting together and writing so many bytes of the file takes, at the most.

        What is fetched is there twice, as it comes from the connection and in one piece, and so is what is written.
        """
        fetched = max((itemsize(a) / itemsize(b) for a, b in self._pairs), default=1.0)
        return int(2 * nbytes * (1 + max(1.0, fetched)))

    def assemble(self, start: int, end: int) -> tuple[memoryview, int]:
        """The bytes [start, end) of the file, and how many finite values became infinite in a narrower type.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        if (fetched := self._fetched_whole(start, end)) is not None:
            return fetched, 0
        window = np.empty(end - start, dtype=np.uint8).data  # not zeros: threads would wait while they are written
        return window, self.fill(start, window)

    def _fetched_whole(self, start: int, end: int) -> memoryview | None:
        """The bytes [start, end) as they come from a source, if they lie there as they are wanted; None if not."""
        if not self._sources.remote:
            return None
        rows = self._rows.overlapping(start, end)
        if len(rows) != 1:
            return None
        row = rows[0]
        source, target = self._casts[int(row["cast"])]
        at = int(row["target"])
        if source != target or at > start or at + int(row["numel"]) * itemsize(target) < end:
            return None
        begin = int(row["start"]) - at
        return self._sources.fetch([(int(row["source"]), begin + start, begin + end)])[0]

    def fill(self, start: int, window: memoryview) -> int:
        """Fill ``window`` with the bytes of the file from ``start`` on, wherever it lies in memory.

        Where sources are local, bytes that are not cast are read to where they belong, and what is cast passes through
        a small buffer: any size will do. Where they are remote, what a window needs is there twice for a moment.

        Returns:
            Finite values that became infinite in a narrower type.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        end = start + len(window)
        for offset, nbytes in self._zeros[self._first(self._zeros, start) :]:
            if offset >= end:
                break
            low, high = max(offset, start), min(offset + nbytes, end)
            if low < high:
                np.frombuffer(window[low - start : high - start], dtype=np.uint8)[:] = 0
        for offset, data in self._literals[self._first(self._literals, start) :]:
            if offset >= end:
                break
            _put(window, start, offset, data)
        overflowed = self._copy(window, start, end)
        for gather in self._gathers:
            width = itemsize(gather.dtype)
            first, last = elements_in(gather.target, gather.numel, width, start, end)
            if first < last:
                at = gather.target + first * width
                whole = Gatherer(self._sources).chunks(gather.state, gather.first + first, gather.first + last)
                for _, values in whole:
                    result = cast(values, gather.dtype)
                    _put(window, start, at, result.view(np.uint8).data)
                    overflowed += count_overflowed(values, result)
                    at += result.nbytes
        return overflowed

    def literal(self, start: int, end: int) -> memoryview | None:
        """The bytes [start, end) of the file if the plan itself has all of them: nothing is read for these."""
        if not self._literals:
            return None
        offset, data = self._literals[self._first(self._literals, start)]
        if offset <= start and end <= offset + len(data):
            return memoryview(data)[start - offset : end - offset]
        return None

    @staticmethod
    def _first(spans: Sequence[tuple[int, Any]], start: int) -> int:
        """The last literal or run of zeros that begins at or before a byte: it may reach beyond it."""
        return max(0, bisect.bisect_right(spans, start, key=lambda span: span[0]) - 1)

    def _copy(self, window: memoryview, start: int, end: int) -> int:
        if not self._sources.remote:
            return self._copy_local(window, start, end)
        spans: list[tuple[int, int, int]] = []
        places: list[tuple[int, int]] = []
        for row in self._rows.overlapping(start, end):
            source, target = self._casts[int(row["cast"])]
            low, high = elements_in(int(row["target"]), int(row["numel"]), itemsize(target), start, end)
            begin, width = int(row["start"]), itemsize(source)
            spans.append((int(row["source"]), begin + low * width, begin + high * width))
            places.append((int(row["target"]) + low * itemsize(target), int(row["cast"])))
        overflowed = 0
        for data, (at, index) in zip(self._sources.fetch(spans), places, strict=True):
            source, target = self._casts[index]
            if source == target:
                _put(window, start, at, data)
                continue
            values: NDArray[Any] = np.frombuffer(data, dtype=numpy_dtype(source))
            result = cast(values, target)
            _put(window, start, at, result.view(np.uint8).data)
            overflowed += count_overflowed(values, result)
        return overflowed

    def _copy_local(self, window: memoryview, start: int, end: int) -> int:
        overflowed = 0
        scratch = Scratch()
        for row in self._rows.overlapping(start, end):
            source, target = self._casts[int(row["cast"])]
            reader, begin, at = self._sources[int(row["source"])], int(row["start"]), int(row["target"])
            if source == target:
                low, high = max(at, start), min(at + int(row["numel"]) * itemsize(target), end)
                reader.read_into(begin + low - at, window[low - start : high - start])
                continue
            low, high = elements_in(at, int(row["numel"]), itemsize(target), start, end)
            for element in range(low, high, CAST_ELEMENTS):
                count = min(CAST_ELEMENTS, high - element)
                values = scratch.read(reader, begin + element * itemsize(source), count, source)
                result = cast(values, target)
                _put(window, start, at + element * itemsize(target), result.view(np.uint8).data)
                overflowed += count_overflowed(values, result)
        return overflowed


def _put(window: memoryview, start: int, at: int, data: bytes | memoryview) -> None:
    """Put bytes in their place; what lies outside the window is left out."""
    skip = max(0, start - at)
    room = start + len(window) - at
    if skip < min(len(data), room):
        into = np.frombuffer(window[at + skip - start : at + min(len(data), room) - start], dtype=np.uint8)
        into[:] = np.frombuffer(memoryview(data)[skip:room], dtype=np.uint8)  # other threads run meanwhile
