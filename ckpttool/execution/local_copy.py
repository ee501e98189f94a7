"""Moves the bytes that a plan's rows name from its sources into open local files, cast on the way where they are to be.

Bytes move in the kernel or through a small buffer: memory is a few of these for each thread, whatever is moved.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpttool.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.checksums import cuts
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.sources import CheckedReader, Scratch
from ckpttool.execution.state_reader import Gatherer
from ckpttool.storage import LocalReader, copy_range, write_at
from ckpttool.storage.block_writes import DIRECT_BYTES, BlockWrites, OpenFile, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, Gather
    from ckpttool.storage import Reader
    from ckpttool.units import Advance

BUFFER_BYTES = 1 << 17
"""Bytes copied at a time where they pass through this process, ending at multiples of it in the target: kernels keep
files in pieces of memory that fit the writes. Larger ones save calls, and cost more than that to find once memory is
fragmented (up to three times the time of the whole copy)."""
READ_BYTES = 1 << 19
"""Bytes read and hashed at a time for several such writes: they fit into the cache of the core that does both."""
CARRIED_BYTES = 1 << 19
"""The same where they are cast into another file as well: threads get in each other's way over shorter casts."""
KERNEL_COPY_BYTES = 1 << 26
"""Bytes that the kernel copies between two reports of progress."""
PAGE_BYTES = 4096
"""The unit in which kernels keep files in memory."""


class _Rider(NamedTuple):
    """A run of elements that is cast on the way of a copy."""

    begin: int
    """First byte, counted from the start of the copy."""
    end: int
    """Byte after the last."""
    pair: tuple[str, str]
    """From which type to which."""
    into: Stream
    """Where to."""


class Mover:
    """Moves what rows of a plan say. Threads may share it.

    Args:
        plan: What the rows are part of.
        sources: What it is made of.
        advance: Told of bytes written.
    """

    def __init__(self, plan: CopyPlan, sources: Sources, advance: Advance) -> None:
        self._casts = plan.casts
        self._sources = sources
        self._advance = advance
        self._writes = BlockWrites()
        self._of_thread = threading.local()

    def copy(
        self,
        rows: NDArray[np.void],
        into: OpenFile,
        riders: NDArray[np.void] | None = None,
        file: Callable[[int], OpenFile] | None = None,
    ) -> int:
        """Make the copies of some rows.

        Args:
            rows: Of COPY.
            into: The file that they are of.
            riders: Rows of SHARED_READ, by copy: casts into other files of bytes that these copies and others read.
            file: Gives the files that riders are cast into.

        Returns:
            Finite elements that became infinite in a narrower type.

        Raises:
            StorageError: Reading or writing failed, or a source changed meanwhile.
        """
        overflowed = 0
        scratch = self._scratch()
        for row in rows:
            source, start, target = self._sources[int(row["source"])], int(row["start"]), int(row["target"])
            pair, numel = self._casts[int(row["cast"])], int(row["numel"])
            if pair[0] != pair[1]:
                overflowed += self._copy_cast(source, start, numel, pair, into, target, scratch)
                continue
            nbytes = numel * itemsize(pair[0])
            carried = [] if riders is None or file is None else self._riders_of(riders, target, file)
            if carried:
                overflowed += self._carry(source, start, nbytes, into, target, carried, scratch)
            else:
                self._copy_bytes(source, start, nbytes, into, target, scratch)
        return overflowed

    def gather(self, gather: Gather, into: OpenFile) -> int:
        """Put a tensor together in memory, a piece at a time, and write it; as ``copy``."""
        overflowed = 0
        stream = Stream(self._writes, into, gather.target, gather.numel * itemsize(gather.dtype))
        for _, values in Gatherer(self._sources).chunks(gather.state, gather.first, gather.first + gather.numel):
            overflowed += self._cast(values, gather.dtype, stream)
        stream.finish()
        return overflowed

    def _scratch(self) -> Scratch:
        """This thread's memory to read into."""
        found: Scratch | None = getattr(self._of_thread, "scratch", None)
        if found is None:
            found = self._of_thread.scratch = Scratch()
        return found

    def _copy_bytes(
        self, source: Reader, start: int, nbytes: int, into: OpenFile, target: int, scratch: Scratch
    ) -> None:
        """Copy bytes as they are."""
        by_kernel = (start - target) % PAGE_BYTES == 0
        if into.direct >= 0 and not source.remote and not (by_kernel and into.sharing):
            self._copy_either_way(source, start, nbytes, into, target, scratch)
        else:
            self._copy_through_cache(source, start, nbytes, into, target, scratch)

    def _copy_either_way(
        self, source: Reader, start: int, nbytes: int, into: OpenFile, target: int, scratch: Scratch
    ) -> None:
        """Copy bytes past the page cache or through it, whichever is faster."""
        done = 0
        while done < nbytes:
            at = target + done
            with self._writes.turn(into, at, nbytes - done, DIRECT_BYTES) as (count, past_cache):
                if past_cache:
                    self._writes.write(into, scratch.read_bytes(source, start + done, count), at, past_cache=True)
                    self._advance(count)
                else:
                    self._copy_through_cache(source, start + done, count, into, at, scratch)
            done += count

    def _copy_through_cache(
        self, source: Reader, start: int, nbytes: int, into: OpenFile, target: int, scratch: Scratch
    ) -> None:
        """Copy bytes through the page cache.

        The kernel's own copy moves (or, where the file system can, shares) whole pages if source and target lie at the
        same place in a page. If they do not it splits every page, and one large buffer is cheaper. So it is for bytes
        that are hashed, unless the file system shares them: then they are read, but not written.
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
                        scratch.read_bytes(source, start + at, min(BUFFER_BYTES, done + count - at))
            else:
                at = target + done
                count = min(nbytes - done, READ_BYTES - at % READ_BYTES)
                data = scratch.read_bytes(source, start + done, count)
                for first, end in cuts(at, at + count, BUFFER_BYTES):
                    write_at(into.fd, data[first - at : end - at], first, into.path)
            done += count
            self._advance(count)

    def _copy_cast(
        self, source: Reader, start: int, numel: int, pair: tuple[str, str], into: OpenFile, target: int,
        scratch: Scratch,
    ) -> int:  # fmt: skip
        overflowed = 0
        stream = Stream(self._writes, into, target, numel * itemsize(pair[1]))
        while numel:
            count = min(numel, CAST_ELEMENTS)
            values = scratch.read(source, start, count, pair[0])
            overflowed += self._cast(values, pair[1], stream)
            start += values.nbytes
            numel -= count
        stream.finish()
        return overflowed

    def _carry(
        self, source: Reader, start: int, nbytes: int, into: OpenFile, target: int, riders: Sequence[_Rider],
        scratch: Scratch,
    ) -> int:  # fmt: skip
        """Copy bytes as they are, and cast values among them into other files while they are at hand."""
        overflowed = done = 0
        waiting = deque(riders)
        while done < nbytes:
            with self._writes.turn(into, target + done, nbytes - done, CARRIED_BYTES) as (count, past_cache):
                data = scratch.read_bytes(source, start + done, count)
                self._writes.write(into, data, target + done, past_cache=past_cache)
            self._advance(count)
            for at in range(done, done + count, CARRIED_BYTES):
                overflowed += self._cast_riders(waiting, data[at - done :][:CARRIED_BYTES], at)
            done += count
        return overflowed

    def _cast_riders(self, riders: deque[_Rider], data: memoryview, start: int) -> int:
        """Cast what riders say of bytes that begin at a place of the copy; those that are done are dropped.

        They come in the order of their beginnings, but one may end before another that began earlier.
        """
        overflowed = 0
        end = start + len(data)
        while riders and riders[0].end <= start:
            riders.popleft()
        for rider in riders:
            if rider.begin >= end:
                break
            low, high = max(rider.begin, start), min(rider.end, end)
            if low >= high:
                continue
            values = np.frombuffer(data[low - start : high - start], dtype=numpy_dtype(rider.pair[0]))
            overflowed += self._cast(values, rider.pair[1], rider.into)
            if high == rider.end:
                rider.into.finish()
        return overflowed

    def _riders_of(self, riders: NDArray[np.void], carrier: int, file: Callable[[int], OpenFile]) -> list[_Rider]:
        first, last = (int(np.searchsorted(riders["copy_target"], carrier, side=side)) for side in ("left", "right"))
        result = []
        for row in riders[first:last]:
            pair, begin = self._casts[int(row["cast"])], int(row["skip"])
            end = begin + int(row["numel"]) * itemsize(pair[0])
            nbytes = int(row["numel"]) * itemsize(pair[1])
            stream = Stream(self._writes, file(int(row["file"])), int(row["target"]), nbytes)
            result.append(_Rider(begin, end, pair, stream))
        return result

    def _cast(self, values: NDArray[np.generic], dtype: str, into: Stream) -> int:
        """Write values as another type; returns how many finite elements became infinite."""
        result = cast(values, dtype)
        into.put(result.view(np.uint8))
        self._advance(result.nbytes)
        return count_overflowed(values, result)
