"""A storage that compares what it reads with the checksums of a manifest, before anybody uses it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.checksums import crc32
from ckpttool.commit.manifest import is_commit, read_manifest, size_problems
from ckpttool.errors import ChecksumError, ContainerError, PlanError
from ckpttool.storage.wrapped import WrappedReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.ranges import ByteRange
    from ckpttool.storage import Entry, Reader, Storage


def guard(storage: Storage, directory: str, key: bytes | None = None) -> Storage:
    """A storage that checks what it reads of a checkpoint; the same storage if that has no manifest.

    Args:
        storage: The storage.
        directory: The checkpoint.
        key: The manifest must be signed with it, and SHA-256 are compared too.

    Raises:
        PlanError: There is no manifest that was signed with the key.
        CkptError: A file of the manifest is not there in full; or the manifest cannot be read.
    """
    if not is_commit(storage, directory):
        if key is not None:
            hint = "was it saved by CheckpointManager(sign_key=...)? do not load it"
            raise PlanError(directory, "has no manifest, so that nobody has signed it", hint)
        return storage
    manifest = read_manifest(storage, directory, key)
    for problem in size_problems(storage, directory, manifest):
        raise problem
    # Without a key nobody knows who wrote the SHA-256, and they take ten times as long.
    files = {name: sums if key is not None else replace(sums, sha256=()) for name, sums in manifest.files.items()}
    return GuardedStorage(storage, {f"{directory}/{name}": sums for name, sums in files.items()})


def with_manifest(storage: Storage, directory: str) -> StructureStorage | None:
    """A storage that checks the structure of a checkpoint's files against its manifest; None if that has none.

    Raises:
        CkptError: A file of the manifest is not there in full; or the manifest cannot be read.
    """
    guarded = guard(storage, directory)
    return StructureStorage(storage, guarded.checksums) if isinstance(guarded, GuardedStorage) else None


class GuardedStorage:
    """Another storage, of which some files are checked as they are read.

    Args:
        storage: The other.
        checksums: By path.
    """

    def __init__(self, storage: Storage, checksums: Mapping[str, Checksums]) -> None:
        self.inner = storage
        """The other storage."""
        self.checksums = checksums
        """By path: what is checked."""
        self.remote = storage.remote
        self.reads_versions = storage.reads_versions
        self._sound: dict[str, bytearray] = {}
        """By path: a 1 for each chunk that was found so."""

    def listing(self, path: str) -> list[Entry]:
        """The names in a directory, sorted."""
        return self.inner.listing(path)

    def list_tree(self, path: str) -> None:
        """Be ready to list a directory and all below it."""
        self.inner.list_tree(path)

    def is_dir(self, path: str) -> bool:
        """Whether the path is a directory that can be looked at."""
        return self.inner.is_dir(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything at the path."""
        return self.inner.exists(path)

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges.

        Raises:
            StorageError: It is missing, not a file, or not permitted.
            ContainerError: It has another size than it was saved with.
        """
        reader = self.inner.open(path, ahead=ahead)
        sums = self.checksums.get(path)
        if sums is None:
            return reader
        _check_size(reader, sums)
        return GuardedReader(reader, sums, self._sound.setdefault(path, bytearray(len(sums.crcs))))

    def read_text(self, path: str) -> str:
        """The content of a small text file."""
        return self.inner.read_text(path)

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> list[bytes | memoryview]:
        """The bytes [start, end) of each reader of this storage, many at once where that is faster."""
        inner = []
        for reader, start, end in wanted:
            if isinstance(reader, GuardedReader):
                inner.append((reader.reader, *reader.widened(start, end)))
            else:
                inner.append((reader, start, end))
        found: list[bytes | memoryview] = []
        for (reader, start, end), (_, first, _), data in zip(wanted, inner, self.inner.read_all(inner), strict=True):
            if isinstance(reader, GuardedReader):
                reader.check(first, data)
            found.append(data[start - first : end - first] if len(data) > end - start else data)
        return found

    def refresh(self, paths: Sequence[str]) -> None:
        """Look anew."""
        self.inner.refresh(paths)


class GuardedReader(WrappedReader):
    """An open file whose chunks are checked the first time that something of them is read."""

    def __init__(self, reader: Reader, checksums: Checksums, sound: bytearray) -> None:
        super().__init__(reader)
        self._sums = checksums
        self._sound = sound

    def widened(self, start: int, end: int) -> tuple[int, int]:
        """The range, and what else must be read to check it."""
        size = self._sums.chunk_bytes
        if start >= end:
            return start, end
        first, last = start // size, (end - 1) // size
        if not self._sound[first]:
            start = first * size
        if not self._sound[last]:
            end = min(self.nbytes, (last + 1) * size)
        return start, end

    def check(self, start: int, data: bytes | memoryview) -> None:
        """Compare the chunks that lie in the bytes from ``start`` on with their checksums.

        Raises:
            ContainerError: One is not as it was saved.
        """
        size = self._sums.chunk_bytes
        view = memoryview(data)
        end = start + len(view)
        for chunk in range(-(-start // size), -(-end // size)):
            a, b = chunk * size, min(self.nbytes, (chunk + 1) * size)
            if self._sound[chunk] or b > end:
                continue
            data_of_chunk = view[a - start : b - start]
            sound = crc32(data_of_chunk) == self._sums.crcs[chunk]
            if sound and self._sums.sha256:
                sound = hashlib.sha256(data_of_chunk).digest() == self._sums.sha256[chunk]
            if not sound:
                problem = f"is damaged: bytes {a:,} to {b:,} are not what was saved"
                raise ChecksumError(self.path, problem, "restore it from a copy, or use another tag")
            self._sound[chunk] = 1

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
            ContainerError: It is not as it was saved.
        """
        first, last = self.widened(start, end)
        data = self.reader.read(first, last)
        self.check(first, data)
        return data[start - first : end - first]

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        return [self.read(r.start, r.end) for r in ranges]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The range cannot be read whole.
            ContainerError: It is not as it was saved.
        """
        end = start + len(buffer)
        first, last = self.widened(start, end)
        size = self._sums.chunk_bytes
        # Whole chunks go straight to their place; of those at the ends more is read than is asked for.
        low = start if first == start else min(end, first + size)
        high = end if last == end else max(low, (last - 1) // size * size)
        if low < high:
            middle = buffer[low - start : high - start]
            self.reader.read_into(low, middle)
            self.check(low, middle)
        for a, b in ((start, low), (high, end)):
            if a < b:
                buffer[a - start : b - start] = self.read(a, b)


class StructureStorage(GuardedStorage):
    """Another storage, of which the structure of some files is checked as it is read.

    Of an archive whose directory the manifest knows, the directory is checked alone: it has the CRC-32 of every record,
    and whoever reads one compares it. Of other files all that is read is checked, in whole chunks.
    """

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges; see ``GuardedStorage``."""
        sums = self.checksums.get(path)
        if sums is None or sums.directory is None:
            return super().open(path, ahead=ahead)
        reader = self.inner.open(path, ahead=ahead)
        _check_size(reader, sums)
        return DirectoryReader(reader, *sums.directory)


class DirectoryReader(WrappedReader):
    """An open archive whose directory is checked before anything of it is returned.

    Args:
        reader: The file.
        start: First byte of the directory, which reaches to the end of the file.
        crc: Its CRC-32.
    """

    def __init__(self, reader: Reader, start: int, crc: int) -> None:
        super().__init__(reader)
        self._start = start
        self._crc = crc
        self._directory: bytes | None = None

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
            ChecksumError: The directory is not as it was saved.
        """
        if end <= self._start:
            return self.reader.read(start, end)
        if self._directory is None:
            data = self.reader.read(self._start, self.nbytes)
            if crc32(data) != self._crc:
                problem = "its zip directory is not what was saved, by the manifest"
                raise ChecksumError(self.path, problem, "restore it from a copy, or use another tag")
            self._directory = data
        before = self.reader.read(start, self._start) if start < self._start else b""
        return before + self._directory[max(0, start - self._start) : end - self._start]

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        if all(r.end <= self._start for r in ranges):
            return self.reader.read_many(ranges)
        return [self.read(r.start, r.end) for r in ranges]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on."""
        buffer[:] = self.read(start, start + len(buffer))


def _check_size(reader: Reader, sums: Checksums) -> None:
    if reader.nbytes != sums.nbytes:
        reader.close()
        problem = f"is {reader.nbytes:,} bytes long, {sums.nbytes:,} by the manifest"
        raise ContainerError(reader.path, problem, "restore it from a copy, or use another tag")
