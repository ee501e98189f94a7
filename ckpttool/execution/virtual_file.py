"""Files to read that are nowhere written: of a plan, or as they lie in a storage. ``torch.load`` reads both.

torch's reader asks for each storage of a file at once, with the memory that the tensor will have for a buffer (torch
2.13, caffe2/serialize/inline_container.cc ``getRecord``), and for the few bytes before and behind it. So what is local
goes from the disk to the tensor; what is remote is asked for in windows, many at once, and those at the borders of a
request are kept for the next one.
"""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.execution.assemble import Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import WriteableBuffer

    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage import Reader

LEAST_WINDOW_BYTES = 1 << 20
"""No request for a part of a large read is smaller."""
KEPT_WINDOWS = 4
"""The end of a file, where its directory is; its beginning, where the structure is; and what is being read."""


class RangeFile(io.RawIOBase):
    """A file of which ranges can be had in any order: read-only, seekable.

    Args:
        name: What errors call it.
        nbytes: Its size.
        remote: Whether each range costs a round trip.
        memory: Bytes that windows in flight may take together.
    """

    def __init__(self, name: str, nbytes: int, *, remote: bool, memory: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._distant = remote
        self._jobs = default_jobs(remote=True)
        # A window is there up to four times while it is put together; see ``Windows.cost``.
        self._window = max(LEAST_WINDOW_BYTES, memory // (4 * self._jobs))
        self._jobs = max(1, min(self._jobs, memory // (4 * self._window)))
        self._kept: dict[int, bytearray] = {}
        self._at = 0

    def fill(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on, all of which lie inside the file. Threads may call it.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        raise NotImplementedError

    def at_hand(self, start: int, end: int) -> memoryview | None:
        """The bytes [start, end) if they are in memory."""
        return None

    # --------------------------------------------------------------------------------------------- as Python has it

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, counted from the beginning, from here or from the end; returns it."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.nbytes}[whence])
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer, but for what lies beyond the end of the file; returns bytes read.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        into = memoryview(buffer).cast("B")
        count = max(0, min(len(into), self.nbytes - self._at))
        self._read(self._at, into[:count])
        self._at += count
        return count

    def readall(self) -> bytes:
        """All bytes from here to the end, asked for at once."""
        data = bytearray(max(0, self.nbytes - self._at))
        self.readinto(data)
        return bytes(data)

    # ------------------------------------------------------------------------------------------------------ windows

    def _read(self, start: int, into: memoryview) -> None:
        found = self.at_hand(start, start + len(into))
        if found is not None:
            into[:] = found
        elif not self._distant:
            self.fill(start, into)
        else:
            for _ in in_threads(self._windows(start, into), self._jobs):
                pass

    def _windows(self, start: int, into: memoryview) -> Iterator[partial[None]]:
        end = start + len(into)
        for begin in range(start - start % self._window, end, self._window):
            low, high = max(begin, start), min(begin + self._window, end)
            part = into[low - start : high - start]
            whole = min(begin + self._window, self.nbytes) - begin
            yield partial(self.fill, low, part) if len(part) == whole else partial(self._part, begin, low, part)

    def _part(self, begin: int, start: int, into: memoryview) -> None:
        """Some bytes of a window, of which others will be asked for soon."""
        kept = self._kept.get(begin)
        if kept is None:
            kept = bytearray(min(self._window, self.nbytes - begin))
            self.fill(begin, memoryview(kept))
            self._kept[begin] = kept
            for old in list(self._kept)[:-KEPT_WINDOWS]:
                self._kept.pop(old, None)
        into[:] = memoryview(kept)[start - begin : start - begin + len(into)]


class PlannedFile(RangeFile):
    """One file of a plan: what writing it and reading it back would give.

    Args:
        plan: What the file is part of.
        file: The file.
        sources: What it is made of; opened by who closes them.
        memory: Bytes that windows in flight may take together where sources are remote.
    """

    def __init__(self, plan: CopyPlan, file: TargetFile, sources: Sources, *, memory: int) -> None:
        super().__init__(file.name, file.nbytes, remote=sources.remote, memory=memory)
        self._contents = Windows(plan, file, sources)

    def fill(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        self._contents.fill(start, buffer)

    def at_hand(self, start: int, end: int) -> memoryview | None:
        """The bytes [start, end) if they are the plan's own: headers and structure."""
        return self._contents.literal(start, end)


class StoredFile(RangeFile):
    """A file as it lies in a storage.

    Args:
        reader: The open file; closed by who opened it.
        memory: Bytes that windows in flight may take together where it is remote.
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
