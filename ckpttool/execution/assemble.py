"""Assemble one part of a target file in memory from its sources.

Storages that take uploads in parts or serve reads by request use it: all source ranges of a part are requested at once.
``virtual_file`` uses it to read a target file without writing it. Between local files ``local`` copies without
assembling parts.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.sources import ReadBuffer
from ckpttool.execution.state_reader import REMOTE_ELEMENTS, StateReader
from ckpttool.plan.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.plan.split import SortedRows, elements_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, TargetFile


COMPUTED_CHUNKS = 6
"""Chunks of fp32 in memory while a formula is computed from remote sources: as fetched, joined, product and result."""


class PartAssembler:
    """Assemble parts of one target file. Threads may share it.

    Args:
        plan: The plan of the file.
        file: The target file.
        sources: The source files of the plan.
    """

    def __init__(self, plan: CopyPlan, file: TargetFile, sources: Sources) -> None:
        self._casts: Sequence[tuple[str, str]] = plan.casts
        self._sources = sources
        self._rows = SortedRows(plan.casts, file.copies)
        self._literals = sorted(literal for literal in file.literals if literal[1])
        self._cast_pairs = {plan.casts[i] for i in set(self._rows.rows["cast"].tolist())}
        self._cast_pairs |= {(g.state.dtype, g.dtype) for g in file.gathers}
        self._computed = any(g.state.formula is not None for g in file.gathers)
        self._gathers = sorted(file.gathers, key=lambda g: g.target)
        self._zeros = sorted(zeros for zeros in file.zeros if zeros[1])

    def cost(self, nbytes: int) -> int:
        """Upper bound, in bytes, of the memory needed to assemble and write ``nbytes`` of the file.

        Memory holds fetched bytes twice (as received and joined), and written bytes twice too.
        """
        fetched = max((itemsize(a) / itemsize(b) for a, b in self._cast_pairs), default=1.0)
        computed = COMPUTED_CHUNKS * REMOTE_ELEMENTS * 4 if self._computed and self._sources.remote else 0
        return int(2 * nbytes * (1 + max(1.0, fetched))) + computed

    def assemble(self, start: int, end: int) -> tuple[memoryview, int]:
        """Return the bytes [start, end) of the file, and the number of finite values cast to infinity.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        if (fetched := self._fetched_whole(start, end)) is not None:
            return fetched, 0
        part = np.empty(end - start, dtype=np.uint8).data  # not zeros: other threads would wait for the fill
        return part, self.fill(start, part)

    def _fetched_whole(self, start: int, end: int) -> memoryview | None:
        """Return the bytes [start, end) as fetched, if one remote source holds them uncast in one range; else None."""
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

    def fill(self, start: int, part: memoryview) -> int:
        """Fill ``part`` with the bytes of the file from ``start`` on.

        Local sources: uncast bytes are read straight into ``part`` and cast values pass through a small buffer, so that
        memory does not depend on the size of the part. Remote sources: memory briefly holds a part's bytes twice.

        Returns:
            Number of finite values cast to infinity.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        end = start + len(part)
        for offset, nbytes in self._zeros[self._first(self._zeros, start) :]:
            if offset >= end:
                break
            low, high = max(offset, start), min(offset + nbytes, end)
            if low < high:
                np.frombuffer(part[low - start : high - start], dtype=np.uint8)[:] = 0
        for offset, data in self._literals[self._first(self._literals, start) :]:
            if offset >= end:
                break
            _put(part, start, offset, data)
        overflowed = self._copy(part, start, end)
        for gather in self._gathers:
            width = itemsize(gather.dtype)
            first, last = elements_in(gather.target, gather.numel, width, start, end)
            if first < last:
                at = gather.target + first * width
                whole = StateReader(self._sources).chunks(gather.state, gather.first + first, gather.first + last)
                for _, values in whole:
                    result = cast(values, gather.dtype)
                    _put(part, start, at, result.view(np.uint8).data)
                    overflowed += count_overflowed(values, result)
                    at += result.nbytes
        return overflowed

    def literal(self, start: int, end: int) -> memoryview | None:
        """Return the bytes [start, end) of the file if one literal of the plan covers them; else None."""
        if not self._literals:
            return None
        offset, data = self._literals[self._first(self._literals, start)]
        if offset <= start and end <= offset + len(data):
            return memoryview(data)[start - offset : end - offset]
        return None

    @staticmethod
    def _first(spans: Sequence[tuple[int, Any]], start: int) -> int:
        """Return the index of the last span that begins at or before ``start``: it may reach beyond it."""
        return max(0, bisect.bisect_right(spans, start, key=lambda span: span[0]) - 1)

    def _copy(self, part: memoryview, start: int, end: int) -> int:
        if not self._sources.remote:
            return self._copy_local(part, start, end)
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
                _put(part, start, at, data)
                continue
            values: NDArray[Any] = np.frombuffer(data, dtype=numpy_dtype(source))
            result = cast(values, target)
            _put(part, start, at, result.view(np.uint8).data)
            overflowed += count_overflowed(values, result)
        return overflowed

    def _copy_local(self, part: memoryview, start: int, end: int) -> int:
        overflowed = 0
        buffer = ReadBuffer()
        for row in self._rows.overlapping(start, end):
            source, target = self._casts[int(row["cast"])]
            reader, begin, at = self._sources[int(row["source"])], int(row["start"]), int(row["target"])
            if source == target:
                low, high = max(at, start), min(at + int(row["numel"]) * itemsize(target), end)
                reader.read_into(begin + low - at, part[low - start : high - start])
                continue
            low, high = elements_in(at, int(row["numel"]), itemsize(target), start, end)
            for element in range(low, high, CAST_ELEMENTS):
                count = min(CAST_ELEMENTS, high - element)
                values = buffer.read(reader, begin + element * itemsize(source), count, source)
                result = cast(values, target)
                _put(part, start, at + element * itemsize(target), result.view(np.uint8).data)
                overflowed += count_overflowed(values, result)
        return overflowed


def _put(part: memoryview, start: int, at: int, data: bytes | memoryview) -> None:
    """Copy ``data`` (at byte ``at`` of the file) into the part that begins at ``start``; clip what lies outside."""
    skip = max(0, start - at)
    room = start + len(part) - at
    if skip < min(len(data), room):
        into = np.frombuffer(part[at + skip - start : at + min(len(data), room) - start], dtype=np.uint8)
        into[:] = np.frombuffer(memoryview(data)[skip:room], dtype=np.uint8)  # numpy releases the GIL
