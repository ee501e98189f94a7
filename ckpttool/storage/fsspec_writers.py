"""Writes one file of an fsspec storage."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.errors import StorageError
from ckpttool.storage.error_texts import ExistsError
from ckpttool.storage.retry import explain

if TYPE_CHECKING:
    from ckpttool.storage.base import Entry, PartWriter
    from ckpttool.storage.fsspec import RemoteStorage


class SmallWriter:
    """A file that one request writes, when all its bytes are there.

    Args:
        storage: Its storage.
        path: Its URL.
        nbytes: Its size in bytes.
        part_bytes: Size of a part.
        new: Whether it must not replace a file.
    """

    def __init__(self, storage: RemoteStorage, path: str, nbytes: int, part_bytes: int, *, new: bool) -> None:
        self.path = path
        self.part_bytes = part_bytes
        self._storage = storage
        self._new = new
        self._data = bytearray(nbytes)

    def has(self, start: int, nbytes: int) -> bool:
        """False: nothing was sent."""
        return False

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Keep the bytes."""
        self._data[start : start + len(data)] = data

    def fail(self, error: BaseException) -> None:
        """Nothing: no thread waits for another's part."""

    def part_writer(self) -> PartWriter:
        """Nothing that another process could use.

        Raises:
            StorageError: Always.
        """
        raise _one_process(self.path)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Never called: there is no part writer."""

    def commit(self) -> None:
        """Send the file.

        Raises:
            ExistsError: The file must be new, and another one has its name.
            StorageError: The storage fails.
        """
        data = bytes(self._data)
        if not self._new:
            self._storage.put(self.path, data)
        elif not self._storage.put_new(self.path, data):
            raise ExistsError(self.path, "exists already", "choose another name")

    def discard(self) -> None:
        """Nothing: nothing was sent."""


class StreamWriter:
    """A file that is written from its first byte to its last, as every fsspec file system can.

    Args:
        storage: Where.
        path: Its URL.
        part_bytes: How much is written at a time.
    """

    def __init__(self, storage: RemoteStorage, path: str, part_bytes: int) -> None:
        self._storage = storage
        self.path = path
        self.part_bytes = part_bytes
        self._turn = threading.Condition()
        self._at = 0
        self._failed: BaseException | None = None
        self._before = self._there()
        # As large as what is written at a time: more would be held back for nothing, tens of MB by some.
        options = {"block_size": part_bytes, "autocommit": False}
        self._file = storage.call(path, partial(storage.fs.open, storage.key(path), "wb", **options))

    def has(self, start: int, nbytes: int) -> bool:
        """No: such an upload cannot be gone on with."""
        return False

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at a byte, when all before it are written.

        Raises:
            StorageError: It cannot be written.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._failed is not None or self._at == start)
            if self._failed is not None:
                raise self._failed  # what the others are told as well, so that it does not matter whose error is seen
            try:
                self._file.write(data)  # not again if it fails: part of it may be on its way
            except Exception as error:
                problem = f"could not be written: {type(error).__name__}"
                self._failed = explain(self.path, error) or StorageError(self.path, problem, "try again")
                raise self._failed from error
            finally:
                self._at = start + len(data)
                self._turn.notify_all()

    def commit(self) -> None:
        """Let the file be seen."""
        self._file.close()
        # A file system that writes at once to the real place has nothing to commit.
        if hasattr(self._file, "commit"):
            self._file.commit()
        self._storage.forget()

    def discard(self) -> None:
        """Give it up."""
        self.fail(StorageError(self.path, "was given up", "try again"))
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # or it would be written when it is collected
        self._storage.forget()
        # What is there may be what was there before: only some storages write at once to the real place.
        if self._before is None or self._there() != self._before:
            self._storage.delete([self.path])

    def _there(self) -> Entry | None:
        return self._storage.entry(self.path) if self._storage.exists(self.path) else None

    def part_writer(self) -> PartWriter:
        """Nothing that another process could use.

        Raises:
            StorageError: Always.
        """
        raise _one_process(self.path)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Never called: there is no part writer."""

    def fail(self, error: BaseException) -> None:
        """Wake threads that wait for an earlier part, and raise ``error`` in them."""
        with self._turn:
            self._failed = self._failed or error
            self._turn.notify_all()


def _one_process(path: str) -> StorageError:
    return StorageError(path, "can be written by one process alone", "write it to S3, or to local disk")
