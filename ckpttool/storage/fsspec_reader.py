"""Reads ranges of one file of an fsspec storage."""

from __future__ import annotations

import bisect
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.ranges import coalesced
from ckpttool.storage.base import WAIT, Entry
from ckpttool.storage.retry import ShortReadError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.fsspec import RemoteStorage

AHEAD_BYTES = 1 << 16
"""What is read at either end of a file whose structure is looked at. torch's directory of hundreds of records fits."""


class RemoteReader:
    """A file of which ranges are read. Threads may share it.

    Args:
        storage: Where it lies.
        path: Its URL.
        entry: What its directory says of it.
        ahead: Read more than is asked for at both ends, and keep it.
    """

    remote = True

    def __init__(self, storage: RemoteStorage, path: str, entry: Entry, *, ahead: bool) -> None:
        self.storage = storage
        self.path = path
        self.nbytes = entry.nbytes
        self.version = entry.version
        self._ahead = ahead
        self._kept: list[tuple[int, bytes]] = []

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The file ends before ``end``, was written anew, or the store keeps failing.
        """
        return bytes(self.fetch(start, end))

    def fetch(self, start: int, end: int) -> bytes | memoryview:
        """As ``read``, but the bytes may lie where they came to: to copy them takes longer than all else about them."""
        if start >= end:
            return b""
        if end > self.nbytes:
            raise StorageError(self.path, f"ended at byte {self.nbytes} while it was being read", WAIT)
        if (kept := self._find(start, end)) is not None:
            return kept
        first, last = self._widened(start, end) if self._ahead else (start, end)
        data = self.storage.call(self.path, partial(self._get, first, last))
        if self._ahead:
            self._keep(first, bytes(data))
        return data[start - first : end - first] if (first, last) != (start, end) else data

    def _find(self, start: int, end: int) -> bytes | None:
        for at, data in self._kept[max(0, bisect.bisect_right(self._kept, start, key=itemgetter(0)) - 2) :]:
            if at > start:
                break
            if end <= at + len(data):
                return data[start - at : end - at]
        return None

    def _keep(self, start: int, data: bytes) -> None:
        bisect.insort(self._kept, (start, data), key=itemgetter(0))

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Read ranges at once, and keep them until the file is closed."""
        wanted = coalesced(ranges, gap=AHEAD_BYTES)
        for where, data in zip(wanted, self.read_many(wanted), strict=True):
            self._keep(where.start, data)

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        if self.nbytes <= 2 * AHEAD_BYTES:
            return 0, self.nbytes
        if end <= AHEAD_BYTES:
            return 0, AHEAD_BYTES
        if start >= self.nbytes - AHEAD_BYTES:
            return self.nbytes - AHEAD_BYTES, self.nbytes
        return start, end

    def _get(self, start: int, end: int) -> bytes | memoryview:
        data = self.storage.get(self.path, start, end, self.version)
        if len(data) != end - start:
            raise ShortReadError(f"{len(data):,} bytes instead of {end - start:,}")
        return data

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; asked for at once."""
        return [bytes(data) for data in self.storage.read_all([(self, r.start, r.end) for r in ranges])]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The file ends too early, was written anew, or the store keeps failing.
        """
        buffer[:] = self.fetch(start, start + len(buffer))

    def check_unchanged(self) -> None:
        """Make sure that the file is still the one that was opened.

        Raises:
            StorageError: Its size or version changed since, as far as the storage's listing tells.
        """
        entry = self.storage.entry(self.path)
        if (entry.nbytes, entry.version) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Forget what was read ahead."""
        self._kept.clear()
