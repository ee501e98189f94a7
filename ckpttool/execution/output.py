"""The output of a run in a directory on local disk."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.storage.base import translate_os_errors
from ckpttool.storage.local_writer import SHARING, DirectoryWriter, file_system_of
from ckpttool.storage.staging import SHARED

if TYPE_CHECKING:
    from ckpttool.plan import TargetFile
    from ckpttool.storage.journal import Journal
    from ckpttool.storage.safe_files import Directory


class DirectoryOutput:
    """A directory on local disk.

    Args:
        directory: An existing directory, not yet visible to readers.
        journal: Lists the files that an earlier run completed; completed files are added to it. None without.
        file_system: Type of its file system; None to ask for it.
    """

    any_offset = True

    def __init__(self, directory: Directory, journal: Journal | None, *, file_system: str | None = None) -> None:
        self._directory = directory
        self.path = directory.path
        """Path of the directory, for readers before the commit."""
        self._journal = journal
        self._shares = (file_system_of(directory.path) if file_system is None else file_system) in SHARING
        self._begun: list[DirectoryWriter] = []

    def __enter__(self) -> DirectoryOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.complete()

    def complete(self) -> None:
        """Close all files, after the last write."""
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

    def shared_file(self) -> str:
        """Create a file with a random name, and return its path: a worker that sees it sees the same directory.

        Raises:
            StorageError: The file cannot be created.
        """
        name = f"{SHARED}/{os.urandom(8).hex()}"
        with translate_os_errors(self._directory.path):
            os.close(self._directory.create(name))
        return os.path.join(os.path.abspath(self._directory.path), name)
