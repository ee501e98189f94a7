"""File-like readers for ``torch.load``: a virtual target file of a plan, or a stored file.

torch reads each storage of a file in one call, into the memory of the tensor (torch 2.13,
caffe2/serialize/inline_container.cc ``getRecord``), and then the few bytes before and after it. So local bytes are read
from disk directly into the tensor. Remote bytes are requested in chunks, many at once; the chunks at the borders of a
read are cached for the next read.
"""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.execution.copy import PartAssembler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import WriteableBuffer

    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage import Reader

MIN_CHUNK_BYTES = 1 << 20
"""Minimum size, in bytes, of a request for a part of a large read."""
LOCAL_PART_BYTES = 32 << 20
"""Bytes of a large local read that a thread reads and checks."""
KEPT_CHUNKS = 4
"""Cached chunks: the end of a file (ZIP directory), its beginning (pickle), and the borders of the current read."""


class RangeFile(io.RawIOBase):
    """A read-only, seekable file whose ranges can be read in any order.

    Args:
        name: Name of the file, for errors.
        nbytes: Its size in bytes.
        remote: Whether each range costs a round trip.
        memory: Bytes of chunks in flight.
    """

    def __init__(self, name: str, nbytes: int, *, remote: bool, memory: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._remote = remote
        self._jobs = default_jobs(remote=True)
        self._local_jobs = default_jobs()
        # Memory holds a chunk up to four times while it is assembled; see ``PartAssembler.cost``.
        self._chunk_bytes = max(MIN_CHUNK_BYTES, memory // (4 * self._jobs))
        self._jobs = max(1, min(self._jobs, memory // (4 * self._chunk_bytes)))
        self._cached: dict[int, bytearray] = {}
        self._at = 0

    def fill(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on, all inside the file. Threads may call it.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        raise NotImplementedError

    def at_hand(self, start: int, end: int) -> memoryview | None:
        """Return the bytes [start, end) if they are in memory; else None."""
        return None

    # ------------------------------------------------------------------------------------------- io.RawIOBase methods

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset of the next read, relative to the beginning, the current offset or the end; return it."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence])
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer up to the end of the file; return the number of bytes read.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        into = memoryview(buffer).cast("B")
        count = max(0, min(len(into), self.nbytes - self._at))
        self._read(self._at, into[:count])
        self._at += count
        return count

    def scatter(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fill buffers with the bytes from their offsets on; of a remote file, one after another.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        if self._remote:
            for start, into in parts:
                self._read(start, into)
            return
        fills = [
            partial(self.fill, start + at, into[at : at + LOCAL_PART_BYTES])
            for start, into in parts
            for at in range(0, len(into), LOCAL_PART_BYTES)
        ]
        for _ in in_threads(iter(fills), min(self._local_jobs, len(fills))):
            pass

    def readall(self) -> bytes:
        """Return all bytes from the current offset to the end, read at once."""
        data = bytearray(max(0, self.nbytes - self._at))
        self.readinto(data)
        return bytes(data)

    # ------------------------------------------------------------------------------------------------------- chunks

    def _read(self, start: int, into: memoryview) -> None:
        found = self.at_hand(start, start + len(into))
        if found is not None:
            into[:] = found
        elif not self._remote:
            self.scatter([(start, into)])  # one thread reads, while others compute checksums
        else:
            for _ in in_threads(self._chunks(start, into), self._jobs):
                pass

    def _chunks(self, start: int, into: memoryview) -> Iterator[partial[None]]:
        end = start + len(into)
        for begin in range(start - start % self._chunk_bytes, end, self._chunk_bytes):
            low, high = max(begin, start), min(begin + self._chunk_bytes, end)
            part = into[low - start : high - start]
            whole = min(begin + self._chunk_bytes, self.nbytes) - begin
            yield partial(self.fill, low, part) if len(part) == whole else partial(self._fill_cached, begin, low, part)

    def _fill_cached(self, begin: int, start: int, into: memoryview) -> None:
        """Fill ``into`` from a chunk, and cache the chunk for the next read."""
        cached = self._cached.get(begin)
        if cached is None:
            cached = bytearray(min(self._chunk_bytes, self.nbytes - begin))
            self.fill(begin, memoryview(cached))
            self._cached[begin] = cached
            for old in list(self._cached)[:-KEPT_CHUNKS]:
                self._cached.pop(old, None)
        into[:] = memoryview(cached)[start - begin : start - begin + len(into)]


class VirtualFile(RangeFile):
    """Reads one target file of a plan without writing it.

    Args:
        plan: The plan of the file.
        file: The target file.
        sources: The source files of the plan; the caller closes them.
        memory: Bytes of chunks in flight, for remote sources.
    """

    def __init__(self, plan: CopyPlan, file: TargetFile, sources: Sources, *, memory: int) -> None:
        super().__init__(file.name, file.nbytes, remote=sources.remote, memory=memory)
        self._contents = PartAssembler(plan, file, sources)

    def fill(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        self._contents.fill(start, buffer)

    def at_hand(self, start: int, end: int) -> memoryview | None:
        """Return the bytes [start, end) if a literal of the plan contains them: headers and pickles; else None."""
        return self._contents.literal(start, end)


class StoredFile(RangeFile):
    """Reads a file of a storage.

    Args:
        reader: The open file; the caller closes it.
        memory: Bytes of chunks in flight, for a remote file.
    """

    def __init__(self, reader: Reader, *, memory: int) -> None:
        super().__init__(reader.path, reader.nbytes, remote=reader.remote, memory=memory)
        self._reader = reader

    def fill(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: Reading failed, or the file changed meanwhile.
        """
        self._reader.read_into(start, buffer)
