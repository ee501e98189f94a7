"""Check bytes against the checksums of a manifest when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checksums import crc32
from ckpttool.commit import has_manifest
from ckpttool.commit.manifest import read_manifest, size_problems
from ckpttool.errors import ChecksumError, ContainerError, PlanError
from ckpttool.storage.base import WrappedReader
from ckpttool.storage.specs import Described, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.commit.manifest import Manifest
    from ckpttool.ranges import ByteRange
    from ckpttool.storage import Entry, Reader, Storage, StorageSpec


def checksummed(storage: Storage, directory: str, key: bytes | None = None) -> Storage:
    """Return a storage that checks all bytes read from a checkpoint; ``storage`` itself if it has no manifest.

    Args:
        storage: Storage of the checkpoint.
        directory: Directory of the checkpoint.
        key: Key that the manifest must be signed with; reads then check SHA-256 too. None for no signature.

    Raises:
        PlanError: The checkpoint has no manifest, or its manifest is not signed with the key.
        CkptError: A file of the manifest is missing or has another size, or the manifest cannot be read.
    """
    if not has_manifest(storage, directory):
        if key is not None:
            hint = "was it saved by CheckpointManager(sign_key=...)? do not load it"
            raise PlanError(directory, "has no manifest, and so no signature", hint)
        return storage
    manifest = read_manifest(storage, directory, key)
    for problem in size_problems(storage, directory, manifest):
        raise problem
    # Without a key the SHA-256 prove no more than the CRC-32, and take ten times as long.
    files = {name: sums if key is not None else sums._replace(sha256=()) for name, sums in manifest.files.items()}
    checksums = {f"{directory}/{name}": sums for name, sums in files.items()}
    return ChecksummedStorage(storage, checksums, manifest)


def with_manifest(storage: Storage, directory: str) -> StructureStorage | None:
    """Return a storage that checks the structure of a checkpoint's files; None if the checkpoint has no manifest.

    Raises:
        CkptError: A file of the manifest is missing or has another size, or the manifest cannot be read.
    """
    checked = checksummed(storage, directory)
    if not isinstance(checked, ChecksummedStorage):
        return None
    return StructureStorage(storage, checked.checksums, checked.manifest)


class ChecksummedStorage(Described):
    """Wraps a storage, and checks some of its files when they are read.

    Args:
        storage: The wrapped storage.
        checksums: Checksums of the files to check, by path.
        manifest: The manifest; a storage that is opened again from its specification has none.
    """

    def __init__(self, storage: Storage, checksums: Mapping[str, Checksums], manifest: Manifest | None = None) -> None:
        self.inner = storage
        """The wrapped storage."""
        self.checksums = checksums
        """Checksums of the files to check, by path."""
        self.manifest = manifest
        """The manifest."""
        self.remote = storage.remote
        self.reads_versions = storage.reads_versions
        self._sound: dict[str, bytearray] = {}
        """By path: 1 for each chunk that matched its checksum."""

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its arguments."""
        return _reopen, (type(self), self.inner.spec, self.checksums)

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name."""
        return self.inner.listing(path)

    def list_tree(self, path: str) -> None:
        """Prefetch the listings of a directory tree."""
        self.inner.list_tree(path)

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory."""
        return self.inner.is_dir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        return self.inner.exists(path)

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
            ContainerError: The file has another size than in the manifest.
        """
        reader = self.inner.open(path, ahead=ahead)
        sums = self.checksums.get(path)
        if sums is None:
            return reader
        _check_size(reader, sums)
        return ChecksummedReader(reader, sums, self._sound.setdefault(path, bytearray(len(sums.crcs))))

    def read_text(self, path: str) -> str:
        """Return the content of a small text file."""
        return self.inner.read_text(path)

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> list[bytes | memoryview]:
        """Return the bytes [start, end) of each reader of this storage; remote reads run concurrently."""
        inner = []
        for reader, start, end in wanted:
            if isinstance(reader, ChecksummedReader):
                inner.append((reader.reader, *reader.widened(start, end)))
            else:
                inner.append((reader, start, end))
        found: list[bytes | memoryview] = []
        for (reader, start, end), (_, first, _), data in zip(wanted, inner, self.inner.read_all(inner), strict=True):
            if isinstance(reader, ChecksummedReader):
                reader.check(first, data)
            found.append(data[start - first : end - first] if len(data) > end - start else data)
        return found

    def refresh(self, paths: Sequence[str]) -> None:
        """Drop cached listings; see ``Storage.refresh``."""
        self.inner.refresh(paths)


class ChecksummedReader(WrappedReader):
    """An open file; each chunk is checked at the first read of its bytes."""

    def __init__(self, reader: Reader, checksums: Checksums, sound: bytearray) -> None:
        super().__init__(reader)
        self._sums = checksums
        self._sound = sound

    def widened(self, start: int, end: int) -> tuple[int, int]:
        """Widen a range to the chunk boundaries that its check needs."""
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
        """Check all chunks that lie completely in ``data``, which begins at byte ``start``.

        Raises:
            ChecksumError: A chunk does not match its checksum.
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
                import hashlib  # importing it takes longer than reading a manifest without signature

                sound = hashlib.sha256(data_of_chunk).digest() == self._sums.sha256[chunk]
            if not sound:
                problem = f"is damaged: bytes {a:,} to {b:,} do not match their checksum in the manifest"
                raise ChecksumError(self.path, problem, "restore it from a copy, or use another tag")
            self._sound[chunk] = 1

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
            ChecksumError: A chunk does not match its checksum.
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
            ChecksumError: A chunk does not match its checksum.
        """
        end = start + len(buffer)
        first, last = self.widened(start, end)
        size = self._sums.chunk_bytes
        # Whole chunks are read directly into the buffer; the chunks at both ends are read whole and copied in part.
        low = start if first == start else min(end, first + size)
        high = end if last == end else max(low, (last - 1) // size * size)
        if low < high:
            middle = buffer[low - start : high - start]
            self.reader.read_into(low, middle)
            self.check(low, middle)
        for a, b in ((start, low), (high, end)):
            if a < b:
                buffer[a - start : b - start] = self.read(a, b)


class StructureStorage(ChecksummedStorage):
    """Wraps a storage, and checks the structure of some of its files when it is read.

    For an archive with a directory checksum in the manifest, only the directory is checked: it has the CRC-32 of every
    record, and readers of a record check that. For other files all reads are checked in whole chunks.
    """

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges; see ``ChecksummedStorage``."""
        sums = self.checksums.get(path)
        if sums is None or sums.directory is None:
            return super().open(path, ahead=ahead)
        reader = self.inner.open(path, ahead=ahead)
        _check_size(reader, sums)
        return DirectoryReader(reader, *sums.directory)


class DirectoryReader(WrappedReader):
    """An open archive; the first read of its directory checks the directory.

    Args:
        reader: The file.
        start: Offset of the directory, which extends to the end of the file.
        crc: CRC-32 of the directory.
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
            ChecksumError: The directory does not match its checksum.
        """
        if end <= self._start:
            return self.reader.read(start, end)
        if self._directory is None:
            data = self.reader.read(self._start, self.nbytes)
            if crc32(data) != self._crc:
                problem = "its zip directory does not match its checksum in the manifest"
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


def _reopen(
    kind: type[ChecksummedStorage], inner: StorageSpec, checksums: Mapping[str, Checksums]
) -> ChecksummedStorage:
    return kind(connect(inner), checksums)


def _check_size(reader: Reader, sums: Checksums) -> None:
    if reader.nbytes != sums.nbytes:
        reader.close()
        problem = f"is {reader.nbytes:,} bytes long, but {sums.nbytes:,} in the manifest"
        raise ContainerError(reader.path, problem, "restore it from a copy, or use another tag")
