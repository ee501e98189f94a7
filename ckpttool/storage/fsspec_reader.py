"""Read byte ranges of one file of an fsspec storage."""

from __future__ import annotations

import bisect
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.errors import StorageError
from ckpttool.ranges import coalesced
from ckpttool.storage.error_texts import WAIT
from ckpttool.storage.retry import ShortReadError, T

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Entry

AHEAD_BYTES = 1 << 16
"""Bytes to read ahead at either end of a file; the directory of a torch archive with hundreds of records fits."""


class RangeStorage(Protocol):
    """The members of ``RemoteStorage`` that its readers use."""

    def call(self, path: str, function: Callable[[], T]) -> T:
        """Make a request; see ``RemoteStorage.call``."""

    def entry(self, path: str) -> Entry:
        """Return the entry of a file."""

    def get(self, path: str, start: int, end: int, version: str) -> bytes | memoryview:
        """Return the bytes [start, end) of a file; one request."""

    def read_all(self, wanted: Sequence[tuple[Any, int, int]]) -> list[bytes | memoryview]:
        """Return the bytes [start, end) of each reader."""


class RemoteReader:
    """An open remote file. Threads may share it.

    Args:
        storage: Storage of the file.
        path: URL of the file.
        entry: Its entry in the listing of its directory.
        ahead: Whether to read ahead at both ends of the file and cache the bytes.
    """

    remote = True

    def __init__(self, storage: RangeStorage, path: str, entry: Entry, *, ahead: bool) -> None:
        self.storage = storage
        self.path = path
        self.nbytes = entry.nbytes
        self.version = entry.version
        self._ahead = ahead
        self._cache: list[tuple[int, bytes]] = []

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The file ends before ``end``, was rewritten, or the store keeps failing.
        """
        return bytes(self.fetch(start, end))

    def fetch(self, start: int, end: int) -> bytes | memoryview:
        """Like ``read``, but may return the buffer of the response: a copy would take longer than all other steps."""
        if start >= end:
            return b""
        if end > self.nbytes:
            raise StorageError(self.path, f"ended at byte {self.nbytes} while it was being read", WAIT)
        if (cached := self._cached(start, end)) is not None:
            return cached
        first, last = self._widened(start, end) if self._ahead else (start, end)
        data = self.storage.call(self.path, partial(self._get, first, last))
        if self._ahead:
            self._store(first, bytes(data))
        return data[start - first : end - first] if (first, last) != (start, end) else data

    def _cached(self, start: int, end: int) -> bytes | None:
        for at, data in self._cache[max(0, bisect.bisect_right(self._cache, start, key=itemgetter(0)) - 2) :]:
            if at > start:
                break
            if end <= at + len(data):
                return data[start - at : end - at]
        return None

    def _store(self, start: int, data: bytes) -> None:
        bisect.insort(self._cache, (start, data), key=itemgetter(0))

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Read ranges concurrently, and cache the bytes until the file is closed."""
        wanted = coalesced(ranges, gap=AHEAD_BYTES)
        for where, data in zip(wanted, self.read_many(wanted), strict=True):
            self._store(where.start, data)

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
        """Return the bytes of each range, in order; the requests run concurrently."""
        return [bytes(data) for data in self.storage.read_all([(self, r.start, r.end) for r in ranges])]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The file is too short, was rewritten, or the store keeps failing.
        """
        buffer[:] = self.fetch(start, start + len(buffer))

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: Its size or version in the listing changed.
        """
        entry = self.storage.entry(self.path)
        if (entry.nbytes, entry.version) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Drop the cached bytes."""
        self._cache.clear()
