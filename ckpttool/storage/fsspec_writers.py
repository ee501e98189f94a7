"""Write one file of an fsspec storage, in one request or as a stream."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.errors import StorageError
from ckpttool.storage.base import Writer
from ckpttool.storage.error_texts import ExistsError
from ckpttool.storage.retry import T, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpttool.storage.base import Entry, WritableStorage


class SmallWriter(Writer):
    """Buffers a small file and writes it with one request.

    Args:
        storage: Storage of the file.
        path: URL of the file.
        nbytes: Its size in bytes.
        part_bytes: Size of a part in bytes.
        new: Whether it must not replace a file.
    """

    def __init__(self, storage: WritableStorage, path: str, nbytes: int, part_bytes: int, *, new: bool) -> None:
        self.path = path
        self.part_bytes = part_bytes
        self._storage = storage
        self._new = new
        self._data = bytearray(nbytes)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Buffer a part."""
        self._data[start : start + len(data)] = data

    def commit(self) -> None:
        """Write the file.

        Raises:
            ExistsError: ``new`` is set, and the path exists.
            StorageError: The storage fails.
        """
        data = bytes(self._data)
        if not self._new:
            self._storage.put(self.path, data)
        elif not self._storage.put_new(self.path, data):
            raise ExistsError(self.path, "exists already", "choose another name")

    def discard(self) -> None:
        """Do nothing: no part is stored before ``commit``."""


class UploadStorage(Protocol):
    """The members of ``RemoteStorage`` that a stream writer uses."""

    fs: Any
    """The file system of fsspec."""

    def call(self, path: str, function: Callable[[], T]) -> T:
        """Make a request; see ``RemoteStorage.call``."""

    def key(self, path: str) -> str:
        """Return the path that fsspec uses."""

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""

    def entry(self, path: str) -> Entry:
        """Return the entry of a file."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files."""

    def forget(self) -> None:
        """Drop cached listings."""


class StreamWriter(Writer):
    """Writes a file sequentially from its first byte to its last, which every fsspec file system supports.

    Args:
        storage: Storage of the file.
        path: URL of the file.
        part_bytes: Size of a part in bytes.
    """

    def __init__(self, storage: UploadStorage, path: str, part_bytes: int) -> None:
        self._storage = storage
        self.path = path
        self.part_bytes = part_bytes
        self._changed = threading.Condition()
        self._at = 0
        self._failed: BaseException | None = None
        self._before = self._entry()
        # One part per block: some file systems buffer tens of MB by default.
        options = {"block_size": part_bytes, "autocommit": False}
        self._file = storage.call(path, partial(storage.fs.open, storage.key(path), "wb", **options))

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Wait until all earlier parts are written, then write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or self._at == start)
            if self._failed is not None:
                raise self._failed  # all threads raise the same error, so that the caller may report any of them
            try:
                self._file.write(data)  # no second attempt: the first may have sent some of the bytes
            except Exception as error:
                problem = f"could not be written: {type(error).__name__}"
                self._failed = explain(self.path, error) or StorageError(self.path, problem, "try again")
                raise self._failed from error
            finally:
                self._at = start + len(data)
                self._changed.notify_all()

    def commit(self) -> None:
        """Make the complete file visible to readers."""
        self._file.close()
        # A file system that writes to the final path has no commit.
        if hasattr(self._file, "commit"):
            self._file.commit()
        self._storage.forget()

    def discard(self) -> None:
        """Abort the upload, and delete the file if the storage has written to the final path."""
        self.fail(StorageError(self.path, "was discarded", "try again"))
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # otherwise garbage collection would flush and commit it
        self._storage.forget()
        # Only some storages write to the final path before the commit; with others the previous file is still there.
        if self._before is None or self._entry() != self._before:
            self._storage.delete([self.path])

    def _entry(self) -> Entry | None:
        return self._storage.entry(self.path) if self._storage.exists(self.path) else None

    def fail(self, error: BaseException) -> None:
        """Wake threads that wait for an earlier part, and raise ``error`` in them."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()
