"""Output on local disk: the staging directory and its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.direct_io import SHARING, file_system_of
from ckpttool.storage.directory_writer import DirectoryWriter
from ckpttool.storage.safe_files import opened
from ckpttool.storage.staging import SHARED, write_token

if TYPE_CHECKING:
    from ckpttool.plan import TargetFile
    from ckpttool.storage.journal import Journal
    from ckpttool.storage.safe_files import Directory


class DirectoryOutput:
    """A directory on local disk.

    Args:
        directory: An existing directory, not yet visible to readers.
        journal: Lists the files that an earlier run completed; completed files are added to it.
    """

    any_offset = True

    def __init__(self, directory: Directory, journal: Journal | None = None) -> None:
        self._directory = directory
        self._journal = journal
        self._shares = file_system_of(directory.path) in SHARING
        self._begun: list[DirectoryWriter] = []

    def __enter__(self) -> DirectoryOutput:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._begun:
            writer.commit()

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""
        return self._journal is not None and self._journal.has(file.name, file.nbytes)

    def begin(self, file: TargetFile) -> DirectoryWriter:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """
        completed = None if self._journal is None else partial(self._journal.add, file.name, file.nbytes)
        writer = DirectoryWriter(self._directory, file.name, file.nbytes, file.mode, completed, shares=self._shares)
        self._begun.append(writer)
        return writer

    def shared_directory(self) -> SharedDirectory:
        """Write the file SHARED into the directory, so that workers can tell that they see the same directory.

        Raises:
            StorageError: The file cannot be written.
        """
        return SharedDirectory(os.path.abspath(self._directory.path), write_token(self._directory))


@dataclass(frozen=True, slots=True)
class SharedDirectory:
    """A directory shared by all nodes."""

    path: str
    """Its full path."""
    token: str
    """Content of the file SHARED in it; another directory with the same path has other content, or no such file."""

    def is_here(self) -> bool:
        """Whether this process sees the shared directory."""
        try:
            with opened(self.path) as directory, open(directory.open_file(SHARED, os.O_RDONLY), "rb") as file:
                return file.read() == self.token.encode()
        except (OSError, StorageError):
            return False
