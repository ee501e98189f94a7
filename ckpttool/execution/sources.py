"""Open the source files of a plan on first use, fetch many ranges at once, and reuse read buffers."""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
import threading
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from ckpttool.concurrency import default_jobs
from ckpttool.errors import ChecksumError, StorageError
from ckpttool.ranges import ByteRange, coalesced
from ckpttool.storage import WAIT, connect
from ckpttool.storage.base import WrappedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.plan import SourceFile
    from ckpttool.storage import Reader, Storage


GAP_BYTES = 1 << 18
"""Maximum gap, in bytes, between two ranges in one merged request."""
BLOCK_BYTES = 1 << 24
"""Maximum size, in bytes, of a merged request."""


HASH_BYTES = 1 << 20
"""Bytes of one read that is hashed: they fit into the core's cache."""


def change_times(files: Sequence[SourceFile]) -> list[int]:
    """Return the time of the last change of each local file, of its metadata too.

    Programs can set the time in ``version``, but not this one. It also changes with links and permissions of a file. So
    only ``resume`` compares it, because it can start again.
    """
    times = []
    for file in files:
        with contextlib.suppress(OSError):  # a missing file is an error of its reader
            times.append(0 if file.storage.remote else os.stat(file.path).st_ctime_ns)
    return times


class CheckedReader(WrappedReader):
    """An open file that hashes the bytes it reads.

    Args:
        reader: The open file.
        note: Called with the offset of the first byte read, and the bytes.
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
    """The source files of a plan, opened on first use. Threads may share them.

    Args:
        files: The files.
        checks: Collects checksums of the bytes read; None to read without checksums.
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
            # Two threads may create one each: both note into the same checks.
            checked = self._checked[index] = CheckedReader(self.raw(index), partial(self._checks.note, index))
        return checked

    def raw(self, index: int) -> Reader:
        """Return the open file without hashing: for bytes outside the output, and for kernel copies."""
        reader = self._open.get(index)
        if reader is None:
            with self._lock:
                reader = self._open.get(index)
                if reader is None:
                    reader = self._open[index] = self.open_as_planned(self._files[index])
        return reader

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_as_planned(self, file: SourceFile) -> Reader:
        """Open a file and check that it did not change since the plan was made.

        Raises:
            StorageError: The file cannot be opened, or was rewritten.
        """
        reader = connect(file.storage).open(file.path)
        if (reader.nbytes, reader.version) != (file.nbytes, file.version):
            reader.close()
            raise StorageError(file.path, "changed since its layout was read", WAIT)
        return reader

    def fetch(self, spans: Sequence[tuple[int, int, int]], *, hashed: bool = True) -> list[memoryview]:
        """Return the bytes of many spans (file, start, end), in order; merge near spans and request all at once.

        Args:
            spans: The byte ranges [start, end) to read, each with the index of its file.
            hashed: Whether to collect checksums of all bytes read, including the gaps between spans.

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
            storage = connect(self._files[blocks[numbers[0]][0]].storage)
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

    def finish(self, *, jobs: int | None = None) -> None:
        """Check the bytes read and the files, after the last read; errors as for ``finish_checks``."""
        self.finish_checks(jobs=jobs)
        self.check_unchanged()

    def finish_checks(self, *, jobs: int | None = None) -> None:
        """Compare the bytes read with the recorded checksums, after the last read.

        Raises:
            ChecksumError: Bytes do not match their recorded checksum.
            StorageError: They do not match because the file was rewritten while it was read.
        """
        if self._checks is None:
            return
        try:
            self._checks.finish(
                lambda file, start, buffer: self.raw(file).read_into(start, buffer),
                jobs=jobs or default_jobs(remote=self.remote),
            )
        except ChecksumError:
            self.check_unchanged()  # a clearer error for a file that was rewritten meanwhile
            raise

    def check_unchanged(self) -> None:
        """Check that no file was rewritten while it was read.

        Raises:
            StorageError: A file was rewritten.
        """
        opened: dict[int, tuple[Storage, list[Reader]]] = {}
        for index, reader in self._open.items():
            storage = connect(self._files[index].storage)
            opened.setdefault(id(storage), (storage, []))[1].append(reader)
        for storage, readers in opened.values():
            storage.refresh([reader.path for reader in readers])
            for reader in readers:
                reader.check_unchanged()

    @property
    def opened(self) -> set[int]:
        """Indexes of the files that were opened."""
        return set(self._open)

    def check_as_planned(self, indexes: Sequence[int]) -> None:
        """Check that files read by other processes did not change since the plan was made.

        Raises:
            StorageError: A file was rewritten.
        """
        by_storage: dict[int, list[SourceFile]] = {}
        for index in indexes:
            by_storage.setdefault(id(self._files[index].storage), []).append(self._files[index])
        for files in by_storage.values():
            connect(files[0].storage).refresh([file.path for file in files])
            for file in files:
                self.open_as_planned(file).close()

    def close(self) -> None:
        """Close all files."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()
        self._checked.clear()


def allow_open_files(count: int) -> None:
    """Raise the process's soft limit of open files to ``count`` and a margin, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
