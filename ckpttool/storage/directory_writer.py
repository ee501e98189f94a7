"""Write one file into a directory that no reader sees before it is complete.

Unlike ``local_writer``, this syncs nothing and gives the file its final name at once: the whole directory gets its name
by one rename, and can be made again after a power failure.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.checksums import cuts
from ckpttool.storage.base import WrappedReader, Writer
from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.local import LocalReader
from ckpttool.storage.posix import copy_range, reserve, write_at
from ckpttool.storage.safe_files import Directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.storage.base import PartWriter, Reader

PART_BYTES = 4 << 20
"""Bytes of one part, where parts are assembled in memory."""
BUFFER_BYTES = 1 << 17
"""Bytes of one buffered write, aligned to multiples of it: the page cache allocates memory in the size of the writes.
Larger writes save calls, but their memory is slow to allocate once memory is fragmented (up to three times the time of
the whole copy)."""
PAGE_BYTES = 4096
"""Page size of the page cache."""


class OpenFile(Writer):
    """An existing file of its final size that is open for writing, at any offset. Threads may share it.

    Args:
        path: Path of the file, for errors.
        fd: Its descriptor, for reading and writing.
        shares: Whether its file system can share blocks between files instead of copying them.
    """

    part_bytes = PART_BYTES

    def __init__(self, path: str, fd: int, *, shares: bool = False) -> None:
        self.path = path
        self.fd = fd
        """Descriptor for reading and writing; -1 when closed."""
        self._shares = shares
        self._asks_kernel = True

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset.

        Raises:
            StorageError: They cannot be written.
        """
        view = memoryview(data)
        for first, end in cuts(start, start + len(view), BUFFER_BYTES):
            write_at(self.fd, view[first - start : end - start], first, self.path)

    def copy_from(self, source: Reader, start: int, nbytes: int, target: int) -> bool:
        """Let the kernel copy bytes of a local file, or share its blocks; return False where a buffer is cheaper.

        If offsets in a page differ, the kernel splits every page. Bytes that are hashed have to be read anyway.

        Raises:
            StorageError: Reading or writing failed.
        """
        file = source.reader if isinstance(source, WrappedReader) else source
        if not (self._asks_kernel and isinstance(file, LocalReader) and (start - target) % PAGE_BYTES == 0):
            return False
        if file is not source and not self._shares:
            return False
        self._asks_kernel = copy_range(file, start, self.fd, target, nbytes, self.path)
        if self._asks_kernel and file is not source:
            for first, end in cuts(start, start + nbytes, BUFFER_BYTES):
                source.read(first, end)
        return self._asks_kernel


class DirectoryWriter(OpenFile):
    """Writes one new file of a staging directory; a ``Writer``. Threads may share it.

    Args:
        directory: The staging directory.
        name: Name of the file in it, with "/" between directories.
        nbytes: Its size in bytes.
        mode: Its permissions before the umask.
        completed: Called after its last byte.
        shares: As for ``OpenFile``.

    Raises:
        StorageError: The file cannot be created.
    """

    def __init__(
        self,
        directory: Directory,
        name: str,
        nbytes: int,
        mode: int,
        completed: Callable[[], None] | None = None,
        *,
        shares: bool = False,
    ) -> None:
        super().__init__(os.path.join(directory.path, name), -1, shares=shares)
        self._directory = directory
        self._name = name
        self._left = nbytes
        self._completed = completed
        self._lock = threading.Lock()
        with translate_os_errors(self.path):
            self.fd = directory.create(name, mode)
        try:
            reserve(self.fd, nbytes, self.path)
        except BaseException:
            self.commit()
            raise

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset; the last byte closes the file.

        Raises:
            StorageError: They cannot be written.
        """
        super().write(start, data)
        self.accept(start, len(data), None)

    def copy_from(self, source: Reader, start: int, nbytes: int, target: int) -> bool:
        """Copy as ``OpenFile`` does; the last byte closes the file.

        Raises:
            StorageError: Reading or writing failed.
        """
        if not super().copy_from(source, start, nbytes, target):
            return False
        self.accept(target, nbytes, None)
        return True

    def part_writer(self) -> PartWriter:
        """Return an object that writes parts in other processes."""
        self.commit()  # many small files would exceed the limit of open files
        return DirectoryPartWriter(os.path.abspath(self._directory.path), self._name)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Count written bytes; after the last one close the file and call ``completed``."""
        with self._lock:
            self._left -= nbytes
            if self._left:
                return
            self.commit()
            if self._completed is not None:
                self._completed()

    def commit(self) -> None:
        """Close the file; readers see it when the directory gets its name."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def discard(self) -> None:
        """Close and remove the file."""
        self.commit()
        with contextlib.suppress(OSError):
            self._directory.remove(self._name)


@dataclass(frozen=True, slots=True)
class DirectoryPartWriter:
    """Write parts into an existing file of the final size."""

    directory: str
    """Full path of the output directory."""
    name: str
    """Name of the file in it."""

    @property
    def path(self) -> str:
        """Full path of the file."""
        return os.path.join(self.directory, self.name)

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenFile]:
        """Context manager: open the file for writing.

        Raises:
            StorageError: The file cannot be opened, or closing it reports a failed write.
        """
        with translate_os_errors(self.path), Directory.open(self.directory) as directory:
            fd = directory.open_file(self.name, os.O_RDWR)
        try:
            yield OpenFile(self.path, fd)
        except BaseException:
            os.close(fd)
            raise
        with translate_os_errors(self.path):
            os.close(fd)  # network file systems send the written bytes on close

    def write(self, start: int, data: memoryview) -> None:
        """Write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """
        with self.opened() as file:
            file.write(start, data)
