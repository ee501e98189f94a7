"""Output on local disk: the staging directory and its files."""

from __future__ import annotations

import os
import secrets
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.storage.directory_writer import DirectoryWriter
from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.staging import SHARED

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

    def __init__(self, directory: Directory, journal: Journal | None) -> None:
        self.directory = directory
        self.journal = journal
        self._begun: list[DirectoryWriter] = []

    def __enter__(self) -> DirectoryOutput:
        return self

    def __exit__(self, *_: object) -> None:
        for target in self._begun:
            target.commit()

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""
        return self.journal is not None and self.journal.has(file.name, file.nbytes)

    def begin(self, file: TargetFile) -> DirectoryWriter:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """
        completed = None if self.journal is None else partial(self.journal.add, file.name, file.nbytes)
        target = DirectoryWriter(self.directory, file.name, file.nbytes, file.mode, completed)
        self._begun.append(target)
        return target

    def shared_file(self) -> str:
        """Create a file with a random name, and return its path: a worker that sees it sees the same directory.

        Raises:
            StorageError: The file cannot be created.
        """
        name = f"{SHARED}/{secrets.token_hex(8)}"
        with translate_os_errors(self.directory.path):
            os.close(self.directory.create(name))
        return os.path.join(os.path.abspath(self.directory.path), name)
