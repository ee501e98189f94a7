"""Check bytes against the checksums of a manifest when they are read.

Readers of a layout use it. ``execution.checks`` compares the tensors.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from ckpttool.checksums import Record, chunk_records, crc32
from ckpttool.commit.manifest import find_manifest, size_problems
from ckpttool.errors import ChecksumError, ContainerError
from ckpttool.ranges import ByteRange
from ckpttool.storage.base import WrappedReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.commit.manifest import Manifest
    from ckpttool.storage import Entry, Reader, Storage

COPY = "restore it from a copy, or use another tag"
ARCHIVES = ".distcp"
"""Suffix of files of many small archives, which record their own checksums: their structure is everywhere in them."""
DIRECTORY = "zip directory"
"""Name of the directory of an archive, as a record."""


def with_manifest(storage: Storage, directory: str, optional: str = "") -> ChecksummedStorage | None:
    """Return a storage that checks the structure of the files of a checkpoint; None if it has no manifest.

    For an archive with a directory checksum in the manifest, only the directory is checked: it has the CRC-32 of every
    record, and readers of a record check that. For other files all reads are checked in whole chunks.

    Args:
        storage: Storage of the checkpoint.
        directory: Directory of the checkpoint.
        optional: End of the names of files that may be missing.

    Raises:
        CkptError: A file of the manifest is missing or has another size, or the manifest cannot be read.
    """
    manifest = find_manifest(storage, directory)
    if manifest is None:
        return None
    for problem in size_problems(storage, directory, manifest, optional):
        raise problem
    return ChecksummedStorage(storage, directory, manifest)


class ChecksummedStorage:
    """Wraps a storage, and checks the structure of some of its files when they are read; see ``with_manifest``.

    Args:
        storage: The wrapped storage.
        directory: Directory of the checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, storage: Storage, directory: str, manifest: Manifest) -> None:
        self.checksums = {f"{directory}/{name}": sums for name, sums in manifest.files.items()}
        """Checksums of the files to check, by path."""
        self.manifest = manifest
        """The manifest."""
        self.remote = storage.remote
        self.reads_versions = storage.reads_versions
        self.spec = storage.spec
        """The wrapped storage as data: tensors are read without this class."""
        self._inner = storage
        self._sound: dict[str, bytearray] = {}
        """By path: 1 for each record that matched its checksum."""

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name."""
        return self._inner.listing(path)

    def list_tree(self, path: str) -> None:
        """Prefetch the listings of a directory tree."""
        self._inner.list_tree(path)

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory."""
        return self._inner.is_dir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        return self._inner.exists(path)

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
            ContainerError: The file has another size than in the manifest.
        """
        reader = self._inner.open(path, ahead=ahead)
        sums = self.checksums.get(path)
        if sums is None:
            return reader
        if reader.nbytes != sums.nbytes:
            reader.close()
            raise ContainerError(path, f"is {reader.nbytes:,} bytes long, but {sums.nbytes:,} in the manifest", COPY)
        if path.endswith(ARCHIVES):
            return reader
        records = chunk_records(sums)
        if sums.directory is not None:
            start, crc = sums.directory
            records = (Record(DIRECTORY, ByteRange(start, sums.nbytes), crc),)
        return ChecksummedReader(reader, records, self._sound.setdefault(path, bytearray(len(records))))

    def read_text(self, path: str) -> str:
        """Return the content of a small text file."""
        return self._inner.read_text(path)

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> list[bytes | memoryview]:
        """Return the bytes [start, end) of each reader of this storage; remote reads run concurrently."""
        inner = [
            (r.reader, *r.widened(start, end)) if isinstance(r, ChecksummedReader) else (r, start, end)
            for r, start, end in wanted
        ]
        found: list[bytes | memoryview] = []
        for (reader, start, end), (_, first, _), data in zip(wanted, inner, self._inner.read_all(inner), strict=True):
            if isinstance(reader, ChecksummedReader):
                reader.check(first, data)
            found.append(data[start - first : end - first] if len(data) > end - start else data)
        return found

    def refresh(self, paths: Sequence[str]) -> None:
        """Drop cached listings; see ``Storage.refresh``."""
        self._inner.refresh(paths)


class ChecksummedReader(WrappedReader):
    """An open file; each record is checked at the first read of its bytes.

    Args:
        reader: The file.
        records: Ranges with a CRC-32, sorted and disjoint: chunks, or the directory of an archive.
        sound: 1 for each record that matched its checksum.
    """

    def __init__(self, reader: Reader, records: Sequence[Record], sound: bytearray) -> None:
        super().__init__(reader)
        self._records = records
        self._sound = sound
        self._starts = [record.where.start for record in records]
        self._ends = [record.where.end for record in records]

    def _unchecked(self, start: int, end: int) -> list[int]:
        """Return the numbers of the records with bytes in a range that were not checked yet."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._starts, end)
        return [n for n in range(first, last) if not self._sound[n]] if start < end else []

    def widened(self, start: int, end: int) -> tuple[int, int]:
        """Widen a range to the records that its check needs."""
        wanted = [self._records[n].where for n in self._unchecked(start, end)]
        return (min(start, wanted[0].start), max(end, wanted[-1].end)) if wanted else (start, end)

    def check(self, start: int, data: bytes | memoryview) -> None:
        """Check all records that are completely in ``data``, which begins at byte ``start``.

        Raises:
            ChecksumError: A record does not match its checksum.
        """
        view = memoryview(data)
        for n in self._unchecked(start, start + len(view)):
            name, (a, b), crc = self._records[n]
            if a < start or b > start + len(view):
                continue
            content = view[a - start : b - start]
            if crc32(content) != crc:
                problem = f"is damaged: bytes {a:,} to {b:,} do not match their checksum in the manifest"
                if name == DIRECTORY:
                    problem = f"its {name} does not match its checksum in the manifest"
                raise ChecksumError(self.path, problem, COPY)
            self._sound[n] = 1

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
            ChecksumError: A record does not match its checksum.
        """
        first, last = self.widened(start, end)
        data = self.reader.read(first, last)
        self.check(first, data)
        return data[start - first : end - first]

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        if not any(self._unchecked(r.start, r.end) for r in ranges):
            return self.reader.read_many(ranges)
        return [self.read(r.start, r.end) for r in ranges]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The range cannot be read whole.
            ChecksumError: A record does not match its checksum.
        """
        end = start + len(buffer)
        if self.widened(start, end) == (start, end):
            self.reader.read_into(start, buffer)
            self.check(start, buffer)
        else:
            buffer[:] = self.read(start, end)
