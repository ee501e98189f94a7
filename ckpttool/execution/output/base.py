"""Protocols of an output that executors write to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.errors import StorageError
from ckpttool.storage.safe_files import opened
from ckpttool.storage.staging import SHARED

if TYPE_CHECKING:
    from ckpttool.plan import TargetFile
    from ckpttool.storage import PartWriter


class Target(Protocol):
    """One open target file. Threads may share it."""

    part_bytes: int
    """Size in bytes of every part but the last; a multiple of 64, so that no element spans two parts."""

    def open(self) -> None:
        """Prepare for the first part, in parallel with reading it.

        Raises:
            StorageError: The file cannot be created.
        """

    def has(self, start: int, nbytes: int) -> bool:
        """Whether an earlier run wrote the part that begins at byte ``start``."""

    def write(self, start: int, data: memoryview) -> None:
        """Write a part.

        Raises:
            StorageError: The part cannot be written.
        """

    def fail(self, error: BaseException) -> None:
        """Abort the file: wake writers that wait for an earlier part and give them ``error``."""

    def part_writer(self) -> PartWriter:
        """Return the part writer for other processes; from then on only they write parts.

        Raises:
            StorageError: Only one process can write the file.
        """

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Record the result of a part written by another process.

        Raises:
            StorageError: The storage rejects the part.
        """


class Output(Protocol):
    """The destination of a plan's files."""

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""

    def begin(self, file: TargetFile) -> Target:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """

    def place(self) -> Place | None:
        """Return the directory that workers must share to write here; None if they need none.

        Raises:
            StorageError: The directory cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Place:
    """A directory shared by all nodes."""

    directory: str
    """Its full path."""
    token: str
    """Content of the file SHARED in it; another directory with the same path has other content, or no such file."""

    def is_here(self) -> bool:
        """Whether this process sees the shared directory."""
        try:
            with opened(self.directory) as directory, open(directory.open_file(SHARED, os.O_RDONLY), "rb") as file:
                return file.read() == self.token.encode()
        except (OSError, StorageError):
            return False
