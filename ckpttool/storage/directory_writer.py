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

from ckpttool.storage.base import Writer
from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.posix import reserve, write_at
from ckpttool.storage.safe_files import Directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.storage.base import PartWriter

PART_BYTES = 4 << 20
"""Bytes of one write."""


class DirectoryWriter(Writer):
    """Writes one file of a staging directory in parts; a ``Writer``. Threads may share it.

    Args:
        directory: The staging directory.
        name: Name of the file in it, with "/" between directories.
        nbytes: Its size in bytes.
        mode: Its permissions before the umask.
        completed: Called after the last part.

    Raises:
        StorageError: The file cannot be created.
    """

    part_bytes = PART_BYTES

    def __init__(
        self, directory: Directory, name: str, nbytes: int, mode: int, completed: Callable[[], None] | None = None
    ) -> None:
        self.path = os.path.join(directory.path, name)
        self._directory = directory
        self._name = name
        self._left = nbytes
        self._completed = completed
        self._lock = threading.Lock()
        self.fd = -1
        """Descriptor for reading and writing; -1 after ``commit``."""
        with translate_os_errors(self.path):
            self.fd = directory.create(name, mode)
        try:
            reserve(self.fd, nbytes, self.path)
        except BaseException:
            self.commit()
            raise

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """
        write_at(self.fd, memoryview(data), start, self.path)
        self.accept(start, len(data), None)

    def part_writer(self) -> PartWriter:
        """Return an object that writes parts in other processes."""
        self.commit()  # many small files would exceed the limit of open files
        return DirectoryPartWriter(os.path.abspath(self._directory.path), self._name)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Count a written part; after the last one close the file and call ``completed``."""
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
    def opened(self) -> Iterator[int]:
        """Context manager: open the file for writing.

        Raises:
            StorageError: The file cannot be opened, or closing it reports a failed write.
        """
        with translate_os_errors(self.path), Directory.open(self.directory) as directory:
            fd = directory.open_file(self.name, os.O_RDWR)
        try:
            yield fd
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
        with self.opened() as fd:
            write_at(fd, memoryview(data), start, self.path)
