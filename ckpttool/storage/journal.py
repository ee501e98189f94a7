"""The journal of a staging directory: its completed files, by which another run resumes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.checksums import crc32
from ckpttool.concurrency import in_threads
from ckpttool.storage.base import MARK, translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.storage.safe_files import Directory

JOURNAL = ".ckpttool-done"
"""Name of the journal: it lists completed files, one a line."""
READ_BYTES = 1 << 20
"""Bytes of one read that is hashed: they fit into the core's cache."""
_ENTRY = re.compile(r"[0-9a-f]{8} \d{1,20} [^\n]+\n")
"""A line of the journal: CRC-32, bytes, name."""


class Journal:
    """The completed files of a staging directory, each with its CRC-32.

    Args:
        directory: The staging directory.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._left = bool({*self._directory.names()} - {MARK})
        self._path = os.path.join(self._directory.path, JOURNAL)
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, int]] = {}
        self._sound: dict[str, bool] = {}
        for line in self._lines():
            crc, nbytes, name = line.split(" ", 2)
            self._done[name] = int(crc, 16), int(nbytes)

    def _lines(self) -> list[str]:
        try:
            fd = self._directory.open_file(JOURNAL, os.O_RDONLY)
        except FileNotFoundError:
            return []
        with open(fd, encoding="utf-8", errors="replace") as file:
            # An unterminated line was being written when its run was killed.
            return [line[:-1] for line in file if _ENTRY.fullmatch(line)]

    def check(self, files: Sequence[tuple[str, int]], jobs: int) -> None:
        """Compare the files that an earlier run completed with their checksums, several at once.

        Args:
            files: Name and size in bytes of each file of the plan.
            jobs: Threads.

        Raises:
            StorageError: A file cannot be read.
        """
        with contextlib.closing(in_threads((partial(self._check, *file) for file in files), jobs)) as results:
            self._sound.update(results)

    def _check(self, name: str, nbytes: int) -> tuple[str, bool]:
        found = self._directory.stat(name)
        if found is None or found.st_size != nbytes or self._done.get(name, (0, -1))[1] != nbytes:
            return name, False
        with translate_os_errors(os.path.join(self._directory.path, name)):
            return name, self._crc32(name, nbytes) == self._done[name][0]

    def has(self, name: str, nbytes: int) -> bool:
        """Return whether a file is complete and matches its checksum; remove it otherwise."""
        if not self._left:
            return False
        sound = self._sound.pop(name, None)
        if self._check(name, nbytes)[1] if sound is None else sound:
            return True
        with translate_os_errors(os.path.join(self._directory.path, name)), contextlib.suppress(FileNotFoundError):
            self._directory.remove(name)
        return False

    def clear(self) -> None:
        """Remove the journal, so that no file counts as complete."""
        with translate_os_errors(self._path), contextlib.suppress(FileNotFoundError):
            self._directory.remove(JOURNAL)

    def add(self, name: str, nbytes: int) -> None:
        """Record a file as complete; reads it back for its checksum, since the kernel may have copied it."""
        with translate_os_errors(self._path):
            line = f"{self._crc32(name, nbytes):08x} {nbytes} {name}\n".encode()
            with self._lock:
                try:
                    fd = self._directory.open_file(JOURNAL, os.O_WRONLY | os.O_APPEND)
                except FileNotFoundError:
                    fd = self._directory.create(JOURNAL, 0o600)
                try:
                    os.write(fd, line)
                finally:
                    os.close(fd)

    def _crc32(self, name: str, nbytes: int) -> int:
        fd = self._directory.open_file(name, os.O_RDONLY)
        try:
            crc = at = 0
            while data := os.pread(fd, min(READ_BYTES, nbytes - at), at):
                crc, at = crc32(data, crc), at + len(data)
            return crc
        finally:
            os.close(fd)
