"""Write one file on local disk, under a temporary name until it is complete.

A save waits until its bytes are durable. Measured with checksums, 1 GB takes 0.25 s of CPU time with direct I/O, and
through the page cache 0.5 s with enough free memory and 3 s without.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from ckpttool.storage.base import Writer
from ckpttool.storage.direct_io import ALIGNMENT, FILE_SYSTEMS, file_system_of, open_direct, write_direct
from ckpttool.storage.error_texts import ExistsError, translate_os_errors
from ckpttool.storage.posix import CREATE, rename_new, reserve, write_all
from ckpttool.storage.safe_files import temporary_name

if TYPE_CHECKING:
    from collections.abc import Sequence


PARTIAL = ".partial"
"""Suffix of the temporary name of an incomplete file."""
PART_BYTES = 1 << 23
"""Bytes of one write."""


class LocalWriter(Writer):
    """Writes one file on local disk in parts.

    Args:
        path: The file.
        nbytes: Its size in bytes.
        new: Whether it must not replace a file.
        mode: Its permissions before the umask.
        reserved: Whether to allocate its blocks now, so that a full disk fails at once.

    Raises:
        StorageError: The file cannot be created.
    """

    part_bytes = PART_BYTES

    def __init__(self, path: str, nbytes: int, *, new: bool = False, mode: int = 0o666, reserved: bool = False) -> None:
        self.path = path
        self._new = new
        self._left = nbytes
        self._lock = threading.Lock()
        self._direct = -1
        above, name = os.path.split(path)
        self._partial = os.path.join(above, temporary_name(name, PARTIAL))  # another process may write the same file
        with translate_os_errors(path):
            self._fd = os.open(self._partial, CREATE, mode)
            try:
                if reserved:
                    reserve(self._fd, nbytes, path)
                if nbytes >= PART_BYTES and file_system_of(self._partial) in FILE_SYSTEMS:
                    self._direct = open_direct(self._partial)
            except BaseException:
                self.discard()
                raise

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at byte ``start``; the last one syncs the file.

        Raises:
            StorageError: The part cannot be written.
        """
        with translate_os_errors(self.path):
            done = 0
            if self._direct >= 0 and len(data) == PART_BYTES and start % ALIGNMENT == 0:
                done = write_direct(self._direct, memoryview(data), start)
            write_all(self._fd, memoryview(data)[done:], start + done)
            with self._lock:
                self._left -= len(data)
                if not self._left:
                    os.fsync(self._fd)

    def append(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write all parts of a file in order.

        Raises:
            StorageError: A part cannot be written.
        """
        start = 0
        for part in parts:
            self.write(start, part)
            start += len(part)

    def commit(self) -> None:
        """Rename the file to its final name.

        Raises:
            ExistsError: ``new`` is set, and the path exists.
            StorageError: The rename failed.
        """
        with translate_os_errors(self.path):
            self._close()
            if not self._new:
                os.rename(self._partial, self.path)
                return
            try:
                rename_new(self._partial, self.path)
            except FileExistsError as error:
                raise ExistsError(self.path, "exists already", "choose another name") from error

    def discard(self) -> None:
        """Remove the temporary file."""
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._partial)

    def _close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
