"""An open file on the local disk."""

from __future__ import annotations

import os
import stat as stat_module

from ckpttool.errors import StorageError
from ckpttool.storage.base import (
    WAIT,
    Reader,
    storage_error,
    translate_os_errors,
)


class LocalReader(Reader):
    """An open file on local disk, read with ``pread``.

    Args:
        path: The file.

    Raises:
        StorageError: The file is missing, not a regular file, or not readable.
    """

    remote = False

    def __init__(self, path: str) -> None:
        self.path = path
        with translate_os_errors(path):
            # Non-blocking: opening a named pipe would wait for a writer.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            info = os.fstat(self.fd)
        if not stat_module.S_ISREG(info.st_mode):
            self.close()
            raise StorageError(path, "is not a regular file", "remove it or choose another path")
        self.nbytes = info.st_size
        self.version = version_of(info)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The file ends before ``end``, or the disk fails.
        """
        parts: list[bytes] = []
        position = start
        while position < end:
            try:  # not translate_os_errors: the largest checkpoints take a million calls
                data = os.pread(self.fd, end - position, position)
            except OSError as error:
                raise storage_error(self.path, error) from error
            if not data:
                raise self._shrunk(position)
            if len(data) == end - start:
                return data
            parts.append(data)
            position += len(data)
        return b"".join(parts)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The file ends too early, or the disk fails.
        """
        done = 0
        while done < len(buffer):
            try:  # as in ``read``
                got = os.preadv(self.fd, [buffer[done:] if done else buffer], start + done)
            except OSError as error:
                raise storage_error(self.path, error) from error
            if got == 0:
                raise self._shrunk(start + done)
            done += got

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: Its size or modification time changed.
        """
        with translate_os_errors(self.path):
            info = os.fstat(self.fd)
        if (info.st_size, version_of(info)) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Release the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _shrunk(self, position: int) -> StorageError:
        return StorageError(self.path, f"ended at byte {position} while it was being read", WAIT)


def version_of(info: os.stat_result) -> str:
    """Return a text that changes when a file is written or replaced."""
    return f"{info.st_mtime_ns}-{info.st_ino}"
