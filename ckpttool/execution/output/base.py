"""Protocols of an output that executors write to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpttool.errors import StorageError
from ckpttool.storage.safe_files import opened
from ckpttool.storage.staging import SHARED

if TYPE_CHECKING:
    from ckpttool.plan import TargetFile
    from ckpttool.storage import Writer


class Output(Protocol):
    """The destination of a plan's files."""

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""

    def begin(self, file: TargetFile) -> Writer:
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
