"""Output on local disk: the staging directory and its files."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.execution.output.base import Place
from ckpttool.execution.output.staging import SHARED
from ckpttool.storage import reserve, translate_os_errors, write_at
from ckpttool.storage.safe_files import opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.execution.output.base import Target
    from ckpttool.execution.output.staging import Journal
    from ckpttool.plan import TargetFile
    from ckpttool.storage import PartWriter
    from ckpttool.storage.safe_files import Directory

LOCAL_PART_BYTES = 4 << 20
"""Part size, in bytes, of files on local disk."""


class DirectoryOutput:
    """A directory on local disk.

    Args:
        directory: An existing directory, not yet visible to readers.
        journal: Lists the files that an earlier run completed; completed files are added to it.
    """

    def __init__(self, directory: Directory, journal: Journal | None) -> None:
        self.directory = directory
        self.journal = journal
        self._begun: list[_LocalTarget] = []

    def __enter__(self) -> DirectoryOutput:
        return self

    def __exit__(self, *_: object) -> None:
        for target in self._begun:
            target.close()

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""
        return self.journal is not None and self.journal.has(file.name, file.nbytes)

    def begin(self, file: TargetFile) -> Target:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """
        target = _LocalTarget(self.directory, file, self.journal)
        self._begun.append(target)
        return target

    def place(self) -> Place:
        """Write the file SHARED into the directory, so that workers can tell that they see the same directory.

        Raises:
            StorageError: The file cannot be written.
        """
        place = Place(os.path.abspath(self.directory.path), secrets.token_hex(16))
        path = os.path.join(place.directory, SHARED)
        with translate_os_errors(path):
            with contextlib.suppress(FileNotFoundError):  # left by an earlier run
                self.directory.remove(SHARED)
            with open(self.directory.create(SHARED), "w", encoding="utf-8") as file:
                file.write(place.token)
        return place


@dataclass(frozen=True, slots=True)
class LocalPartWriter:
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
        with translate_os_errors(self.path), opened(self.directory) as directory:
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


class _LocalTarget:
    part_bytes = LOCAL_PART_BYTES

    def __init__(self, directory: Directory, file: TargetFile, journal: Journal | None) -> None:
        path = self._path = os.path.join(directory.path, file.name)
        self._directory = directory.path
        self._name = file.name
        self._nbytes = self._left = file.nbytes
        self._journal = journal
        self._lock = threading.Lock()
        with translate_os_errors(path):
            self._fd = directory.create(file.name, file.mode)
        try:
            reserve(self._fd, file.nbytes, path)
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        pass

    def has(self, start: int, nbytes: int) -> bool:
        return False

    def write(self, start: int, data: memoryview) -> None:
        write_at(self._fd, memoryview(data), start, self._path)
        self.accept(start, len(data), None)

    def part_writer(self) -> PartWriter:
        self.close()  # many small files would exceed the limit of open files
        return LocalPartWriter(os.path.abspath(self._directory), self._name)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left:
                return
            self.close()
            if self._journal is not None:
                self._journal.add(self._name, self._nbytes)

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
