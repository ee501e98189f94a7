"""Page-aligned buffers for reads and writes, reused because allocating pages costs more than reading a chunk."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckpttool.storage.base import Reader

_KEPT: list[NDArray[np.uint8]] = []
"""Part buffers of the last file, for the next one: with new ones a save takes up to a third longer, because the kernel
allocates and clears their pages meanwhile."""
os.register_at_fork(after_in_child=_KEPT.clear)  # parent and child share the memory of anonymous maps
KEPT = 2
"""Number of part buffers to keep: a file that is written one part at a time uses two."""


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return new memory that begins at a page: direct I/O requires it, and the kernel copies faster into it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def take(nbytes: int) -> NDArray[np.uint8]:
    """Return a part buffer: a kept one, or a new one."""
    try:
        kept = _KEPT.pop()
    except IndexError:
        kept = None
    return kept if kept is not None and len(kept) == nbytes else _aligned(nbytes)


def give_back(buffer: NDArray[np.uint8]) -> None:
    """Keep a part buffer for the next file, if few are kept."""
    if len(_KEPT) < KEPT:
        _KEPT.append(buffer)


class ReadBuffer:
    """A reusable read buffer: allocating memory for every chunk costs more than reading the chunk."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def array(self, count: int, dtype: str) -> NDArray[Any]:
        """Return an array of ``count`` elements over the buffer, valid until the next call."""
        return np.frombuffer(self._memory_of(count * itemsize(dtype)), dtype=numpy_dtype(dtype))

    def read(self, reader: Reader, start: int, count: int, dtype: str) -> NDArray[Any]:
        """Read ``count`` elements from byte ``start`` of a file; they are valid until the next call."""
        return np.frombuffer(self.read_bytes(reader, start, count * itemsize(dtype)), dtype=numpy_dtype(dtype))

    def read_bytes(self, reader: Reader, start: int, nbytes: int) -> memoryview:
        """Read ``nbytes`` bytes from byte ``start`` of a file; they are valid until the next call."""
        memory = self._memory_of(nbytes)
        reader.read_into(start, memory)
        return memory

    def _memory_of(self, nbytes: int) -> memoryview:
        if len(self._memory) < nbytes:
            self._memory = _aligned(nbytes).data
        return self._memory[:nbytes]
