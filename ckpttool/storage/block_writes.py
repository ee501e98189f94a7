"""Writes into open local files, past the page cache or through it."""

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

BLOCK_BYTES = 1 << 22
"""Bytes that are written past the page cache at a time, ending at multiples of it in the file."""
TELLING_BYTES = 1 << 19
"""Fewer are written through the page cache, and tell nothing about the pace of either way."""


@dataclass(slots=True)
class OpenFile:
    """A file that is being written."""

    path: str
    """What errors call it."""
    fd: int
    """Where it is open for writing."""
    direct: int = -1
    """Where it is open for writing past the page cache; -1 if it is not."""
    sharing: bool = False
    """Whether the kernel may let it share blocks with other files instead of copying them."""
    by_one: bool = False
    """Whether one thread alone writes it."""


class BlockWrites:
    """Writes past the page cache where that is better. Threads may share it."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._blocks: list[NDArray[Any]] = []
        """Memory that nobody uses. It is kept: the kernel takes longer to find some than to fill it."""

    def take_block(self) -> NDArray[Any]:
        """Memory of BLOCK_BYTES (uint8) that begins with a page."""
        try:
            return self._blocks.pop()
        except IndexError:
            return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)

    def give_back(self, block: NDArray[Any]) -> None:
        """Let others have it."""
        self._blocks.append(block)

    @contextlib.contextmanager
    def turn(self, into: OpenFile, at: int, left: int, through_cache: int) -> Iterator[tuple[int, bool]]:
        """Say how many of the bytes that are left to write now, and whether past the page cache; do it meanwhile.

        Args:
            into: Where to.
            at: First byte there.
            left: How many are left.
            through_cache: How many are written at a time through the page cache.
        """
        nbytes = min(left, through_cache - at % through_cache)
        aligned = min(left, BLOCK_BYTES - at % BLOCK_BYTES) // ALIGNMENT * ALIGNMENT
        if into.direct < 0 or aligned < TELLING_BYTES:
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
            told = nbytes if nbytes >= TELLING_BYTES else 0
            self._pace.end(into.fd, past_cache, told, time.perf_counter() - began)

    def write(self, into: OpenFile, data: memoryview, at: int, *, past_cache: bool) -> None:
        """Write in a turn, the way that it said; past the page cache memory must begin with a page.

        Raises:
            StorageError: Writing failed.
        """
        done = 0
        if past_cache:
            with translate_os_errors(into.path):
                done = write_direct(into.direct, data, at)
        if done < len(data):  # this disk wants another alignment
            write_at(into.fd, data[done:], at + done, into.path)


class Stream:
    """Bytes that come a few at a time, written one behind the other.

    Args:
        writes: Writes them.
        into: Where to.
        at: First byte there.
        nbytes: How many will come.
    """

    def __init__(self, writes: BlockWrites, into: OpenFile, at: int, nbytes: int) -> None:
        self._writes = writes
        self._into = into
        self._begin = self._end = at  # of what waits in memory
        self._in_blocks = into.direct >= 0 and nbytes >= TELLING_BYTES
        self._block: NDArray[Any] | None = None

    def put(self, data: NDArray[Any]) -> None:
        """Write bytes (uint8), or keep them for later.

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
            place = self._end % BLOCK_BYTES  # as it lies in the file's pages
            count = min(len(data) - done, BLOCK_BYTES - place)
            np.copyto(self._block[place : place + count], data[done : done + count])  # others may run meanwhile
            done += count
            self._end += count
            if self._end % BLOCK_BYTES == 0:
                self._flush(self._block)

    def finish(self) -> None:
        """Write what waits, and let the memory go.

        Raises:
            StorageError: Writing failed.
        """
        if self._block is not None:
            self._flush(self._block)
            self._writes.give_back(self._block)
            self._block = None

    def _flush(self, block: NDArray[Any]) -> None:
        while self._begin < self._end:
            place = self._begin % BLOCK_BYTES
            left = self._end - self._begin
            with self._writes.turn(self._into, self._begin, left, BLOCK_BYTES) as (count, past_cache):
                self._writes.write(self._into, block[place : place + count].data, self._begin, past_cache=past_cache)
            self._begin += count
