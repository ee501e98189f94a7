"""Copy rows of a plan into open local files, casting values where dtypes differ.

The kernel copies, or bytes pass through a small buffer: memory is bounded by a few buffers per thread.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpttool.checksums import cuts
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.sources import CheckedReader, ReadBuffer
from ckpttool.execution.state_reader import StateReader
from ckpttool.plan.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.storage import LocalReader, copy_range, write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, Gather
    from ckpttool.storage import Reader
    from ckpttool.units import Advance

BUFFER_BYTES = 1 << 17
"""Bytes of one buffered write, aligned to multiples of it in the target: the page cache allocates memory in the size of
the writes. Larger writes save calls, but their memory is slow to allocate once memory is fragmented (up to three times
the time of the whole copy)."""
READ_BYTES = 1 << 19
"""Bytes of one read for several such writes: they fit into the cache of the core that reads and hashes them."""
SHARED_READ_BYTES = 1 << 19
"""Bytes of one read that is also cast into another file: shorter casts make threads contend."""
KERNEL_COPY_BYTES = 1 << 26
"""Bytes of one kernel copy: progress is reported between two."""
PAGE_BYTES = 4096
"""Page size of the page cache."""


@dataclass(slots=True)
class OpenFile:
    """A local file that is open for writing."""

    path: str
    """Path, as error messages show it."""
    fd: int
    """Descriptor."""
    sharing: bool = False
    """Whether the kernel may share blocks with the source file instead of copying them."""


class _SharedRead(NamedTuple):
    """A cast into another file of bytes that a copy reads."""

    begin: int
    """First byte, counted from the start of the copy."""
    end: int
    """Byte after the last."""
    pair: tuple[str, str]
    """Source dtype and target dtype."""
    into: OpenFile
    """File of the cast values."""
    target: int
    """First byte of the cast values in it."""


class LocalCopier:
    """Copy and cast rows of a plan into local files. Threads may share it.

    Args:
        plan: The plan of the rows.
        sources: The source files of the plan.
        advance: Called with the number of bytes written since the last call.
    """

    def __init__(self, plan: CopyPlan, sources: Sources, advance: Advance) -> None:
        self._casts = plan.casts
        self._sources = sources
        self._advance = advance
        self._of_thread = threading.local()

    def copy(
        self,
        rows: NDArray[np.void],
        into: OpenFile,
        shared: NDArray[np.void] | None = None,
        file: Callable[[int], OpenFile] | None = None,
    ) -> int:
        """Copy rows into a file.

        Args:
            rows: Rows of COPY.
            into: The target file of the rows.
            shared: Rows of SHARED_READ, sorted by copy: casts into other files of the bytes that copies read.
            file: Returns the open file of an index in the plan, for the targets of shared reads.

        Returns:
            Number of finite elements cast to infinity.

        Raises:
            StorageError: Reading or writing failed, or a source changed meanwhile.
        """
        overflowed = 0
        buffer = self._buffer()
        for row in rows:
            source, start, target = self._sources[int(row["source"])], int(row["start"]), int(row["target"])
            pair, numel = self._casts[int(row["cast"])], int(row["numel"])
            if pair[0] != pair[1]:
                overflowed += self._copy_cast(source, start, numel, pair, into, target, buffer)
                continue
            nbytes = numel * itemsize(pair[0])
            reads = [] if shared is None or file is None else self._shared_reads_of(shared, target, file)
            if reads:
                overflowed += self._copy_shared(source, start, nbytes, into, target, reads, buffer)
            else:
                self._copy_bytes(source, start, nbytes, into, target, buffer)
        return overflowed

    def gather(self, gather: Gather, into: OpenFile) -> int:
        """Assemble a tensor in memory, chunk by chunk, and write it; returns and raises as ``copy``."""
        overflowed, target = 0, gather.target
        for _, values in StateReader(self._sources).chunks(gather.state, gather.first, gather.first + gather.numel):
            overflowed += self._cast(values, gather.dtype, into, target)
            target += len(values) * itemsize(gather.dtype)
        return overflowed

    def _buffer(self) -> ReadBuffer:
        """Return the read buffer of this thread."""
        found: ReadBuffer | None = getattr(self._of_thread, "buffer", None)
        if found is None:
            found = self._of_thread.buffer = ReadBuffer()
        return found

    def _copy_bytes(
        self, source: Reader, start: int, nbytes: int, into: OpenFile, target: int, buffer: ReadBuffer
    ) -> None:
        """Copy bytes without a cast.

        The kernel copies (or, on some file systems, shares) whole pages if source and target have the same offset in a
        page. Otherwise it splits every page, and a large buffer is cheaper. A buffer is also cheaper for bytes that are
        hashed, unless the file system shares pages: then the bytes are read, but not written.
        """
        file = source.reader if isinstance(source, CheckedReader) else source
        by_kernel = (start - target) % PAGE_BYTES == 0 and (file is source or into.sharing)
        done = 0
        while done < nbytes:
            if by_kernel and isinstance(file, LocalReader):
                count = min(KERNEL_COPY_BYTES, nbytes - done)
                by_kernel = copy_range(file, start + done, into.fd, target + done, count, into.path)
                if not by_kernel:
                    continue
                if file is not source:
                    for at in range(done, done + count, BUFFER_BYTES):
                        buffer.read_bytes(source, start + at, min(BUFFER_BYTES, done + count - at))
            else:
                at = target + done
                count = min(nbytes - done, READ_BYTES - at % READ_BYTES)
                data = buffer.read_bytes(source, start + done, count)
                for first, end in cuts(at, at + count, BUFFER_BYTES):
                    write_at(into.fd, data[first - at : end - at], first, into.path)
            done += count
            self._advance(count)

    def _copy_cast(
        self, source: Reader, start: int, numel: int, pair: tuple[str, str], into: OpenFile, target: int,
        buffer: ReadBuffer,
    ) -> int:  # fmt: skip
        overflowed = 0
        while numel:
            count = min(numel, CAST_ELEMENTS)
            values = buffer.read(source, start, count, pair[0])
            overflowed += self._cast(values, pair[1], into, target)
            start += values.nbytes
            target += count * itemsize(pair[1])
            numel -= count
        return overflowed

    def _copy_shared(
        self, source: Reader, start: int, nbytes: int, into: OpenFile, target: int, shared: Sequence[_SharedRead],
        buffer: ReadBuffer,
    ) -> int:  # fmt: skip
        """Copy bytes without a cast, and cast the values of shared reads into other files from the same buffer."""
        overflowed = done = 0
        waiting = deque(shared)
        while done < nbytes:
            count = min(nbytes - done, SHARED_READ_BYTES)
            data = buffer.read_bytes(source, start + done, count)
            write_at(into.fd, data, target + done, into.path)
            self._advance(count)
            overflowed += self._cast_shared(waiting, data, done)
            done += count
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
            if low >= high:
                continue
            values = np.frombuffer(data[low - start : high - start], dtype=numpy_dtype(read.pair[0]))
            target = read.target + (low - read.begin) // itemsize(read.pair[0]) * itemsize(read.pair[1])
            overflowed += self._cast(values, read.pair[1], read.into, target)
        return overflowed

    def _shared_reads_of(
        self, shared: NDArray[np.void], copy_target: int, file: Callable[[int], OpenFile]
    ) -> list[_SharedRead]:
        first, last = (
            int(np.searchsorted(shared["copy_target"], copy_target, side=side)) for side in ("left", "right")
        )
        result = []
        for row in shared[first:last]:
            pair, begin = self._casts[int(row["cast"])], int(row["skip"])
            end = begin + int(row["numel"]) * itemsize(pair[0])
            result.append(_SharedRead(begin, end, pair, file(int(row["file"])), int(row["target"])))
        return result

    def _cast(self, values: NDArray[np.generic], dtype: str, into: OpenFile, target: int) -> int:
        """Cast and write values; returns the number of finite elements cast to infinity."""
        result = cast(values, dtype)
        write_at(into.fd, result.view(np.uint8).data, target, into.path)
        self._advance(result.nbytes)
        return count_overflowed(values, result)
