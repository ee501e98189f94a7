"""Write into open local files with direct I/O or through the page cache, whichever is faster."""

from __future__ import annotations

import contextlib
import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.storage import translate_os_errors, write_at
from ckpttool.storage.direct_io import ALIGNMENT, write_direct
from ckpttool.storage.write_policy import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

DIRECT_BYTES = 1 << 22
"""Bytes of one direct write; each ends at a multiple of this offset in the file."""
MIN_DIRECT_BYTES = 1 << 19
"""Least bytes of a direct write, and of a write whose time is measured; smaller ones go through the page cache."""


@dataclass(slots=True)
class OpenFile:
    """The descriptors of a local file that is being written."""

    path: str
    """Path, as error messages show it."""
    fd: int
    """Descriptor for writes through the page cache."""
    direct: int = -1
    """Descriptor for direct I/O; -1 without."""
    sharing: bool = False
    """Whether the kernel may share blocks with the source file instead of copying them."""
    by_one: bool = False
    """Whether only one thread writes it."""


class BlockWrites:
    """Writes to local files with direct I/O where that is faster. Threads may share it."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._blocks: list[NDArray[Any]] = []
        """Free buffers. Reuse is faster: the kernel takes longer to allocate pages than to fill them."""

    def take_block(self) -> NDArray[Any]:
        """Return a page-aligned buffer of DIRECT_BYTES (uint8)."""
        try:
            return self._blocks.pop()
        except IndexError:
            return np.frombuffer(mmap.mmap(-1, DIRECT_BYTES), np.uint8)

    def give_back(self, block: NDArray[Any]) -> None:
        """Return a buffer for reuse."""
        self._blocks.append(block)

    @contextlib.contextmanager
    def turn(self, into: OpenFile, at: int, left: int, through_cache: int) -> Iterator[tuple[int, bool]]:
        """Yield the byte count of the next write and whether to use direct I/O; time the body, which writes them.

        Args:
            into: The file.
            at: Offset in the file.
            left: Bytes left to write.
            through_cache: Most bytes of one write through the page cache.
        """
        nbytes = min(left, through_cache - at % through_cache)
        aligned = min(left, DIRECT_BYTES - at % DIRECT_BYTES) // ALIGNMENT * ALIGNMENT
        if into.direct < 0 or aligned < MIN_DIRECT_BYTES:
            yield nbytes, False
            return
        if at % ALIGNMENT:
            yield -at % ALIGNMENT, False
            return
        past_cache = self._pace.begin(into.fd, aligned, by_one=into.by_one)
        nbytes = aligned if past_cache else nbytes
        began = time.perf_counter()
        try:
            yield nbytes, past_cache
        finally:
            measured = nbytes if nbytes >= MIN_DIRECT_BYTES else 0
            self._pace.end(into.fd, past_cache, measured, time.perf_counter() - began)

    def write(self, into: OpenFile, data: memoryview, at: int, *, past_cache: bool) -> None:
        """Write bytes as ``turn`` has chosen; for direct I/O ``data`` must be page-aligned.

        Raises:
            StorageError: Writing failed.
        """
        done = 0
        if past_cache:
            with translate_os_errors(into.path):
                done = write_direct(into.direct, data, at)
        if done < len(data):  # the disk requires another alignment
            write_at(into.fd, data[done:], at + done, into.path)


class Stream:
    """Collects consecutive small pieces into blocks and writes them.

    Args:
        writes: Writes the blocks.
        into: The file.
        at: Offset of the first byte in the file.
        nbytes: Total bytes of all pieces.
    """

    def __init__(self, writes: BlockWrites, into: OpenFile, at: int, nbytes: int) -> None:
        self._writes = writes
        self._into = into
        self._begin = self._end = at  # range of the bytes in the buffer
        self._in_blocks = into.direct >= 0 and nbytes >= MIN_DIRECT_BYTES
        self._block: NDArray[Any] | None = None

    def put(self, data: NDArray[Any]) -> None:
        """Write or buffer a piece (uint8).

        Raises:
            StorageError: Writing failed.
        """
        if not self._in_blocks:
            write_at(self._into.fd, data.data, self._end, self._into.path)
            self._end += len(data)
            return
        if self._block is None:
            self._block = self._writes.take_block()
        done = 0
        while done < len(data):
            offset = self._end % DIRECT_BYTES  # the offset in the buffer has the alignment of that in the file
            count = min(len(data) - done, DIRECT_BYTES - offset)
            np.copyto(self._block[offset : offset + count], data[done : done + count])  # releases the GIL
            done += count
            self._end += count
            if self._end % DIRECT_BYTES == 0:
                self._flush(self._block)

    def finish(self) -> None:
        """Write the buffered bytes, and release the buffer.

        Raises:
            StorageError: Writing failed.
        """
        if self._block is not None:
            self._flush(self._block)
            self._writes.give_back(self._block)
            self._block = None

    def _flush(self, block: NDArray[Any]) -> None:
        while self._begin < self._end:
            offset = self._begin % DIRECT_BYTES
            left = self._end - self._begin
            with self._writes.turn(self._into, self._begin, left, DIRECT_BYTES) as (count, past_cache):
                self._writes.write(self._into, block[offset : offset + count].data, self._begin, past_cache=past_cache)
            self._begin += count
