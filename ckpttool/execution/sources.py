"""The files that a checkpoint's bytes are read from, opened when first asked for, and memory to read into."""

from __future__ import annotations

import bisect
import mmap
import resource
import threading
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.concurrency import default_jobs
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.errors import ChecksumError, StorageError
from ckpttool.ranges import ByteRange, coalesced
from ckpttool.storage import WAIT
from ckpttool.storage.wrapped import WrappedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import SourceFile
    from ckpttool.storage import Reader, Storage


GAP_BYTES = 1 << 18
"""Bytes that are read in vain rather than make another request."""
BLOCK_BYTES = 1 << 24
"""No request is made longer than this to save another."""


HASH_BYTES = 1 << 20
"""Bytes that are read at a time where they are hashed: they are still in the core's cache then."""


class CheckedReader(WrappedReader):
    """An open file whose bytes are hashed as they are read.

    Args:
        reader: The file.
        note: Takes the bytes that were read, with the place of the first.
    """

    def __init__(self, reader: Reader, note: Callable[[int, memoryview], None]) -> None:
        super().__init__(reader)
        self._note = note

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
        """
        data = self.reader.read(start, end)
        self._note(start, memoryview(data))
        return data

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        found = self.reader.read_many(ranges)
        for where, data in zip(ranges, found, strict=True):
            self._note(where.start, memoryview(data))
        return found

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The range cannot be read whole.
        """
        step = len(buffer) if self.remote else HASH_BYTES
        for at in range(0, len(buffer), step or 1):
            part = buffer[at : at + step]
            self.reader.read_into(start + at, part)
            self._note(start + at, part)


class Sources:
    """The files to read, opened when first asked for. Threads may share them.

    Args:
        files: The files.
        checks: Collects checksums of all that is read; None to read without.
    """

    def __init__(self, files: Sequence[SourceFile], checks: ReadChecks | None = None) -> None:
        self._files = files
        self._checks = checks
        self._open: dict[int, Reader] = {}
        self._checked: dict[int, CheckedReader] = {}
        self._lock = threading.Lock()
        self.remote = any(file.storage.remote for file in files)
        """Whether reads cost round trips."""
        if not self.remote:
            allow_open_files(len(files))

    def __getitem__(self, index: int) -> Reader:
        if self._checks is None:
            return self.raw(index)
        checked = self._checked.get(index)
        if checked is None:
            # Two threads may make one each: both note the same.
            checked = self._checked[index] = CheckedReader(self.raw(index), partial(self._checks.note, index))
        return checked

    def raw(self, index: int) -> Reader:
        """A file whose bytes are not hashed: for what goes into no output, and where the kernel copies."""
        reader = self._open.get(index)
        if reader is None:
            with self._lock:
                reader = self._open.get(index)
                if reader is None:
                    reader = self._open[index] = self.open_as_planned(self._files[index])
        return reader

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open_as_planned(self, file: SourceFile) -> Reader:
        """Open a file, if it still is the one that the plan was made for.

        Raises:
            StorageError: It cannot be opened, or was written anew.
        """
        reader = file.storage.open(file.path)
        if (reader.nbytes, reader.version) != (file.nbytes, file.version):
            reader.close()
            raise StorageError(file.path, "changed since its layout was read", WAIT)
        return reader

    def fetch(self, spans: Sequence[tuple[int, int, int]], *, hashed: bool = True) -> list[memoryview]:
        """The bytes of many spans (file, start, end) of remote files, in order; as few requests as pay, all at once.

        Args:
            spans: What to read.
            hashed: Whether the checksums of all that is read are collected, the bytes between the spans included.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        by_file: dict[int, list[ByteRange]] = {}
        for file, start, end in spans:
            by_file.setdefault(file, []).append(ByteRange(start, end))
        gap = GAP_BYTES if self.remote else 0
        blocks = [(f, b) for f, ranges in by_file.items() for b in coalesced(ranges, gap=gap, limit=BLOCK_BYTES)]
        by_storage: dict[int, list[int]] = {}
        for number, (file, _) in enumerate(blocks):
            by_storage.setdefault(id(self._files[file].storage), []).append(number)
        data: dict[int, list[tuple[int, memoryview]]] = {}
        for numbers in by_storage.values():
            storage = self._files[blocks[numbers[0]][0]].storage
            wanted = [(self.raw(f), where.start, where.end) for f, where in (blocks[n] for n in numbers)]
            for n, got in zip(numbers, storage.read_all(wanted), strict=True):
                if hashed and self._checks is not None:
                    self._checks.note(blocks[n][0], blocks[n][1].start, got)
                data.setdefault(blocks[n][0], []).append((blocks[n][1].start, memoryview(got)))
        result = []
        for file, start, end in spans:
            held = data[file]
            at, view = held[bisect.bisect_right(held, start, key=itemgetter(0)) - 1] if start < end else held[0]
            result.append(view[start - at : end - at])
        return result

    def finish_checks(self, *, jobs: int | None = None) -> None:
        """Compare what was read with the recorded checksums, once all reading has ended.

        Raises:
            ChecksumError: Bytes are not what was saved.
            StorageError: They are not, for the file was written anew while it was read.
        """
        if self._checks is None:
            return
        try:
            self._checks.finish(
                lambda file, start, buffer: self.raw(file).read_into(start, buffer),
                jobs=jobs or default_jobs(remote=self.remote),
            )
        except ChecksumError:
            self.check_unchanged()  # which says more of a file that was rewritten meanwhile
            raise

    def check_unchanged(self) -> None:
        """Make sure that no file was rewritten while it was read."""
        opened: dict[int, tuple[Storage, list[Reader]]] = {}
        for index, reader in self._open.items():
            storage = self._files[index].storage
            opened.setdefault(id(storage), (storage, []))[1].append(reader)
        for storage, readers in opened.values():
            storage.refresh([reader.path for reader in readers])
            for reader in readers:
                reader.check_unchanged()

    @property
    def opened(self) -> set[int]:
        """Numbers of the files that something was read of."""
        return set(self._open)

    def check_as_planned(self, indexes: Sequence[int]) -> None:
        """Make sure that files that others have read are still those that the plan was made for.

        Raises:
            StorageError: One was written anew.
        """
        by_storage: dict[int, list[SourceFile]] = {}
        for index in indexes:
            by_storage.setdefault(id(self._files[index].storage), []).append(self._files[index])
        for files in by_storage.values():
            files[0].storage.refresh([file.path for file in files])
            for file in files:
                self.open_as_planned(file).close()

    def close(self) -> None:
        """Close all."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()
        self._checked.clear()


def allow_open_files(count: int) -> None:
    """Let this process have so many files open, and some more, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Scratch:
    """Memory to read into, used again and again: fresh memory for every chunk costs more than reading it does."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def array(self, count: int, dtype: str) -> NDArray[Any]:
        """Memory for some elements of a type; it is theirs until the next call."""
        return np.frombuffer(self._memory_of(count * itemsize(dtype)), dtype=numpy_dtype(dtype))

    def read(self, reader: Reader, start: int, count: int, dtype: str) -> NDArray[Any]:
        """Read elements of a type from a byte of a file; they are valid until the next call."""
        return np.frombuffer(self.read_bytes(reader, start, count * itemsize(dtype)), dtype=numpy_dtype(dtype))

    def read_bytes(self, reader: Reader, start: int, nbytes: int) -> memoryview:
        """Read bytes from a byte of a file; they are valid until the next call."""
        memory = self._memory_of(nbytes)
        reader.read_into(start, memory)
        return memory

    def _memory_of(self, nbytes: int) -> memoryview:
        if len(self._memory) < nbytes:
            # Begins with a page: the kernel copies faster to there.
            self._memory = memoryview(mmap.mmap(-1, nbytes))
        return self._memory[:nbytes]
