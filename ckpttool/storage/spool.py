"""A scratch file without a name: it takes bytes whose number is not known yet, and is gone when it is closed."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import TYPE_CHECKING

from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.posix import write_at

if TYPE_CHECKING:
    from types import TracebackType


class Spool:
    """An unnamed file on local disk. Threads may share it; a killed process leaves nothing of it.

    Args:
        directory: A directory on the file system that has room for it; None for the system's temporary directory.

    Raises:
        StorageError: It cannot be created.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory or tempfile.gettempdir()
        with translate_os_errors(self._directory):
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  (closed by ``close``)
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes written."""

    @property
    def path(self) -> str:
        """A path that this process, and no other, can open it by.

        Source: Linux, proc(5): ``/proc/self/fd/N`` opens the file of the descriptor, with or without a name.
        """
        return f"/proc/self/fd/{self._file.fileno()}"

    def append(self, data: memoryview) -> int:
        """Write bytes at the end; return the offset of the first.

        Raises:
            StorageError: Writing failed; names the directory.
        """
        with self._lock:
            start = self.nbytes
            self.nbytes += len(data)
        write_at(self._file.fileno(), data, start, os.path.join(self._directory, "temporary file"))
        return start

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
