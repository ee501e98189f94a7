"""What an executor needs of an output."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.errors import StorageError
from ckpttool.execution.output.staging import SHARED
from ckpttool.storage.safe_files import opened

if TYPE_CHECKING:
    from ckpttool.plan import TargetFile
    from ckpttool.storage import PartWriter


class Target(Protocol):
    """One file that is being written. Threads may share it."""

    part_bytes: int
    """Size of every window but the last; a multiple of 64, so that no element is cut."""

    def open(self) -> None:
        """Make all ready that the first window needs: not to be waited for before it is read.

        Raises:
            StorageError: The file cannot be created.
        """

    def has(self, start: int, nbytes: int) -> bool:
        """Whether the window that begins at a byte is there already."""

    def write(self, start: int, data: memoryview) -> None:
        """Write a window.

        Raises:
            StorageError: It cannot be written.
        """

    def fail(self, error: BaseException) -> None:
        """A window will never come, and why: let nobody wait for it."""

    def part_writer(self) -> PartWriter:
        """What other processes write windows with; all of them from now on.

        Raises:
            StorageError: One process alone can write the file.
        """

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Another process has written a window, and got this for it.

        Raises:
            StorageError: It cannot be written after all.
        """


class Output(Protocol):
    """Where a plan's files go."""

    def has(self, file: TargetFile) -> bool:
        """Whether a run before this one has completed the file."""

    def begin(self, file: TargetFile) -> Target:
        """Begin to write a file.

        Raises:
            StorageError: It cannot be created.
        """

    def place(self) -> Place | None:
        """The directory that other processes must see to write here; None where they need none.

        Raises:
            StorageError: It cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that other nodes are to write into as well."""

    directory: str
    """Its full path."""
    token: str
    """What the file SHARED in it holds: a directory of that name that is another node's own holds something else."""

    def is_here(self) -> bool:
        """Whether this process sees the directory that is meant."""
        try:
            with opened(self.directory) as directory, open(directory.open_file(SHARED, os.O_RDONLY), "rb") as file:
                return file.read() == self.token.encode()
        except (OSError, StorageError):
            return False
