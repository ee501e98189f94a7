"""Copy bytes and values from the sources of a plan to its target files: one engine for all kinds of targets.

A target is an open local file, into which the kernel may copy, or a part of a file in memory: for uploads, for streams
and for readers of a file that is never written. From local sources, bytes pass through a small buffer of each thread,
so that memory does not depend on the size of a file or a part. From remote sources, all ranges of a part are requested
at once.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.state_reader import REMOTE_ELEMENTS, StateReader
from ckpttool.plan.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.plan.split import SortedRows, elements_in, runs_of, short_rows
from ckpttool.storage import Writer
from ckpttool.storage.buffers import ReadBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ckpttool.concurrency import MemoryBudget
    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, Gather, TargetFile
    from ckpttool.storage import PartWriter, Reader
    from ckpttool.units import Advance


class Sizes(NamedTuple):
    """How much a thread copies at once."""

    task_elements: int = 1 << 24
    """Elements of one task: 64 MB of fp32."""
    read_bytes: int = 1 << 19
    """Bytes of one read of uncast bytes: they fit into the cache of the core that reads, hashes, casts and writes."""
    cast_elements: int = CAST_ELEMENTS
    """Elements of one cast."""


SIZES = Sizes()
"""Sizes of a copy, if it is given no others."""
COMPUTED_CHUNKS = 6
"""Chunks of fp32 in memory while a formula is computed from remote sources: as fetched, joined, product and result."""


class Piece(NamedTuple):
    """A run of elements to copy, or a part of one."""

    source: int
    """Index of the source file."""
    start: int
    """First byte in it."""
    nbytes: int
    """Number of source bytes."""
    target: int
    """First byte in the target file."""
    cast: int
    """Index of the source dtype and the target dtype in ``CopyPlan.casts``."""


class _SharedRead(NamedTuple):
    """A cast into another file of bytes that a copy reads."""

    begin: int
    """First byte, counted from the start of the copy."""
    end: int
    """Byte after the last."""
    pair: tuple[str, str]
    """Source dtype and target dtype."""
    into: Writer
    """Writer of the cast values."""
    target: int
    """First byte of the cast values in its file."""


class Copier:
    """Copies and casts pieces of a plan into writers that take bytes at any offset. Threads may share it.

    Args:
        plan: The plan.
        sources: The source files of the plan.
        advance: Called with the number of bytes written since the last call.
        sizes: How much a thread copies at once; None for SIZES.
    """

    def __init__(
        self, plan: CopyPlan, sources: Sources, advance: Advance = lambda _: None, sizes: Sizes | None = None
    ) -> None:
        self.casts = plan.casts
        self._sizes = sizes or SIZES
        self.sources = sources
        self._advance = advance
        self._of_thread = threading.local()
        self._widths = np.array([itemsize(source) for source, _ in plan.casts], dtype=np.uint64)

    def split(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Split rows of COPY that are longer than a task."""
        return short_rows(self.casts, rows, self._sizes.task_elements)

    def tasks(
        self,
        file: TargetFile,
        rows: NDArray[np.void],
        into: Writer,
        shared: NDArray[np.void] | None = None,
        writers: Mapping[int, Writer] | None = None,
    ) -> Iterator[Callable[[], int]]:
        """Yield the tasks that write the copies and gathers of a local file; each returns as ``copy``.

        Args:
            file: The target file.
            rows: Its rows of COPY as ``split`` returns them, without those that a shared read serves.
            into: Its writer.
            shared: Rows of SHARED_READ: casts into other files of the bytes that the copies read.
            writers: The writers of these files, by index in the plan.
        """
        for run in runs_of(rows, self._sizes.task_elements):
            yield partial(self._copy_rows, run, into, shared, writers)
        for gather in file.gathers:
            yield partial(self.gather, gather, into)

    def _copy_rows(
        self,
        rows: NDArray[np.void],
        into: Writer,
        shared: NDArray[np.void] | None,
        writers: Mapping[int, Writer] | None,
    ) -> int:
        nbytes = (rows["numel"] * self._widths[rows["cast"]]).tolist()
        sources, starts, targets, casts = (rows[field].tolist() for field in ("source", "start", "target", "cast"))
        pieces = list(map(Piece, sources, starts, nbytes, targets, casts))
        if shared is None or writers is None:
            return self.copy(pieces, into)
        return sum(self.copy([piece], into, self._shared_reads_of(shared, piece.target, writers)) for piece in pieces)

    def copy(self, pieces: Sequence[Piece], into: Writer, shared: Sequence[_SharedRead] = ()) -> int:
        """Copy pieces into a file.

        Args:
            pieces: The pieces.
            into: The target file.
            shared: Casts into other files of the bytes of the only piece.

        Returns:
            Number of finite elements cast to infinity.

        Raises:
            StorageError: Reading or writing failed, or a source changed meanwhile.
        """
        overflowed = 0
        if self.sources.remote:
            spans = [(piece.source, piece.start, piece.start + piece.nbytes) for piece in pieces]
            for piece, data in zip(pieces, self.sources.fetch(spans), strict=True):
                overflowed += self._put(data, self.casts[piece.cast], into, piece.target)
            return overflowed
        buffer = self._buffer()
        for piece in pieces:
            reader, pair = self.sources[piece.source], self.casts[piece.cast]
            if pair[0] != pair[1]:
                overflowed += self._cast_piece(reader, piece, pair, into, buffer)
            elif shared or not into.copy_from(reader, piece.start, piece.nbytes, piece.target):
                overflowed += self._copy_piece(reader, piece, into, deque(shared), buffer)
            else:
                self._advance(piece.nbytes)
        return overflowed

    def gather(self, gather: Gather, into: Writer, start: int = 0, end: int | None = None) -> int:
        """Write the elements of a tensor with bytes in [start, end) of its file; returns and raises as ``copy``."""
        width = itemsize(gather.dtype)
        end = gather.target + gather.nbytes if end is None else end
        first, last = elements_in(gather.target, gather.numel, width, start, end)
        overflowed, target = 0, gather.target + first * width
        if first < last:
            for _, values in StateReader(self.sources).chunks(gather.state, gather.first + first, gather.first + last):
                overflowed += self._cast(values, gather.dtype, into, target)
                target += len(values) * width
        return overflowed

    def _buffer(self) -> ReadBuffer:
        """Return the read buffer of this thread."""
        found: ReadBuffer | None = getattr(self._of_thread, "buffer", None)
        if found is None:
            found = self._of_thread.buffer = ReadBuffer()
        return found

    def _copy_piece(
        self, reader: Reader, piece: Piece, into: Writer, shared: deque[_SharedRead], buffer: ReadBuffer
    ) -> int:
        """Copy bytes through the buffer, and cast the values of shared reads into other files from it."""
        overflowed, done, size = 0, 0, self._sizes.read_bytes
        while done < piece.nbytes:
            at = piece.target + done
            count = min(piece.nbytes - done, size - at % size)
            data = buffer.read_bytes(reader, piece.start + done, count)
            into.write(at, data)
            self._advance(count)
            overflowed += self._cast_shared(shared, data, done)
            done += count
        return overflowed

    def _cast_piece(self, reader: Reader, piece: Piece, pair: tuple[str, str], into: Writer, buffer: ReadBuffer) -> int:
        width, elements = itemsize(pair[0]), self._sizes.cast_elements
        overflowed, target = 0, piece.target
        for done in range(0, piece.nbytes, elements * width):
            count = min(elements, (piece.nbytes - done) // width)
            values = buffer.read(reader, piece.start + done, count, pair[0])
            overflowed += self._cast(values, pair[1], into, target)
            target += count * itemsize(pair[1])
        return overflowed

    def _cast_shared(self, shared: deque[_SharedRead], data: memoryview, start: int) -> int:
        """Cast the shared reads that overlap ``data``, which begins at byte ``start`` of the copy; drop finished ones.

        Shared reads are sorted by their begin, but one may end before another that begins earlier.
        """
        overflowed = 0
        end = start + len(data)
        while shared and shared[0].end <= start:
            shared.popleft()
        for read in shared:
            if read.begin >= end:
                break
            low, high = max(read.begin, start), min(read.end, end)
            if low < high:
                target = read.target + (low - read.begin) // itemsize(read.pair[0]) * itemsize(read.pair[1])
                overflowed += self._put(data[low - start : high - start], read.pair, read.into, target)
        return overflowed

    def _shared_reads_of(
        self, shared: NDArray[np.void], copy_target: int, writers: Mapping[int, Writer]
    ) -> list[_SharedRead]:
        first, last = (
            int(np.searchsorted(shared["copy_target"], copy_target, side=side)) for side in ("left", "right")
        )
        result = []
        for row in shared[first:last]:
            pair, begin = self.casts[int(row["cast"])], int(row["skip"])
            end = begin + int(row["numel"]) * itemsize(pair[0])
            result.append(_SharedRead(begin, end, pair, writers[int(row["file"])], int(row["target"])))
        return result

    def _put(self, data: memoryview, pair: tuple[str, str], into: Writer, target: int) -> int:
        """Write bytes, cast if the dtypes differ; returns the number of finite elements cast to infinity."""
        if pair[0] != pair[1]:
            return self._cast(np.frombuffer(data, dtype=numpy_dtype(pair[0])), pair[1], into, target)
        into.write(target, data)
        self._advance(len(data))
        return 0

    def _cast(self, values: NDArray[np.generic], dtype: str, into: Writer, target: int) -> int:
        result = cast(values, dtype)
        into.write(target, result.view(np.uint8).data)
        self._advance(result.nbytes)
        return count_overflowed(values, result)


class _Part(Writer):
    """Bytes of a file in memory. Bytes written outside of them are dropped."""

    path = "memory"
    part_bytes = 1

    def __init__(self, start: int, memory: memoryview) -> None:
        self._start = start
        self._memory = memory

    def write(self, start: int, data: bytes | memoryview) -> None:
        skip = max(0, self._start - start)
        room = self._start + len(self._memory) - start
        if skip < min(len(data), room):
            low = start + skip - self._start
            into = np.frombuffer(self._memory[low : start + min(len(data), room) - self._start], dtype=np.uint8)
            into[:] = np.frombuffer(memoryview(data)[skip:room], dtype=np.uint8)  # numpy releases the GIL

    def copy_from(self, source: Reader, start: int, nbytes: int, target: int) -> bool:
        source.read_into(start, self._memory[target - self._start : target - self._start + nbytes])
        return True


class PartAssembler:
    """Assembles parts of one target file in memory. Threads may share it.

    Args:
        plan: The plan of the file.
        file: The target file.
        sources: The source files of the plan.
        sizes: How much a thread copies at once; None for SIZES.
    """

    def __init__(self, plan: CopyPlan, file: TargetFile, sources: Sources, sizes: Sizes | None = None) -> None:
        self._copier = Copier(plan, sources, sizes=sizes)
        self._casts = plan.casts
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

    def task(self, into: PartWriter, start: int, end: int, budget: MemoryBudget) -> Callable[[], tuple[int, Any]]:
        """Return a task that assembles the bytes [start, end) of the file and writes them; acquire its memory now.

        Now, in the order of the parts: a writer that takes parts in order waits for earlier parts, and these must not
        wait for memory that later parts hold.

        Args:
            into: Writes the bytes.
            start: First byte of the part.
            end: Byte after the last.
            budget: Bytes of the parts in flight; the task releases the bytes of its part.

        Returns:
            A function that returns the number of finite values cast to infinity, and the result of the writer; it
            raises as ``assemble`` and the writer.
        """
        return partial(self._write, into, start, end, partial(budget.release, budget.acquire(self.cost(end - start))))

    def _write(self, into: PartWriter, start: int, end: int, release: Callable[[], None]) -> tuple[int, Any]:
        try:
            data, overflowed = self.assemble(start, end)
            return overflowed, into.write(start, data)
        finally:
            release()

    def _fetched_whole(self, start: int, end: int) -> memoryview | None:
        """Return the bytes [start, end) as fetched, if they are uncast in one range of a remote source; else None."""
        pieces = self._pieces(start, end) if self._sources.remote else []
        if len(pieces) != 1:
            return None
        (piece,) = pieces
        source, target = self._casts[piece.cast]
        if source != target or (piece.target, piece.nbytes) != (start, end - start):
            return None
        return self._sources.fetch([(piece.source, piece.start, piece.start + piece.nbytes)])[0]

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
        into = _Part(start, part)
        for offset, nbytes in self._zeros[self._first(self._zeros, start) :]:
            if offset >= end:
                break
            low, high = max(offset, start), min(offset + nbytes, end)
            if low < high:
                np.frombuffer(part[low - start : high - start], dtype=np.uint8)[:] = 0
        for offset, data in self._literals[self._first(self._literals, start) :]:
            if offset >= end:
                break
            into.write(offset, data)
        overflowed = self._copier.copy(self._pieces(start, end), into)
        return overflowed + sum(self._copier.gather(gather, into, start, end) for gather in self._gathers)

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

    def _pieces(self, start: int, end: int) -> list[Piece]:
        """Return the content of [start, end): bytes of uncast runs, and whole elements of other runs."""
        pieces = []
        for source, begin, numel, target, index in self._rows.overlapping(start, end).tolist():
            pair = self._casts[index]
            # An element that begins before the range is cast whole; uncast bytes are clipped.
            width, unit = (itemsize(pair[1]), itemsize(pair[0])) if pair[0] != pair[1] else (1, 1)
            count = numel if pair[0] != pair[1] else numel * itemsize(pair[0])
            low, high = elements_in(target, count, width, start, end)
            pieces.append(Piece(source, begin + low * unit, (high - low) * unit, target + low * width, index))
        return pieces
