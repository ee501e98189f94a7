"""The local disk as a storage."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any

from ckpttool.concurrency import Tally
from ckpttool.errors import StorageError
from ckpttool.storage.base import (
    MISSING,
    Described,
    Entry,
    ExistsError,
    WritableStorage,
    translate_os_errors,
)
from ckpttool.storage.local_reader import LocalReader, version_of
from ckpttool.storage.removal import remove_local
from ckpttool.storage.system_calls import sync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckpttool.storage.base import Storage
    from ckpttool.storage.local_writer import LocalWriter


ATTEMPTS = 10
"""Maximum number of attempts to write a small file while other processes remove incomplete files."""


class LocalStorage(Described, WritableStorage):
    """The storage of local files."""

    remote = False
    reads_versions = False
    parts_at_once = 1
    retries = Tally()
    """Always 0: the kernel retries local operations."""

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its arguments."""
        return _local, ()

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name.

        Raises:
            StorageError: The directory does not exist or cannot be read.
        """
        entries = []
        with translate_os_errors(path), os.scandir(path) as names:
            for item in names:
                try:
                    is_dir, info = item.is_dir(), item.stat()
                except OSError as error:
                    # A link that leads nowhere, or to itself, has no size; ``open`` reports it.
                    if error.errno in {errno.ENOENT, errno.ELOOP}:
                        continue
                    raise
                nbytes = 0 if is_dir else info.st_size
                entries.append(Entry(item.name, is_dir, nbytes, version_of(info), info.st_mtime))
        return sorted(entries, key=lambda e: e.name)

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists, even as a dangling link."""
        return os.path.lexists(path)

    def open(self, path: str, *, ahead: bool = False) -> LocalReader:
        """Open a file for reading ranges.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
        """
        return LocalReader(path)

    # ------------------------------------------------------------------------------------------- writing

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents.

        Raises:
            StorageError: The directory cannot be created.
        """
        with translate_os_errors(path):
            missing = []
            above = path
            while above and not os.path.isdir(above):
                missing.append(above)
                above = os.path.dirname(above)
            for one in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(one)
                sync_directory(os.path.dirname(one))

    def free_bytes(self, path: str) -> int | None:
        """Return the free bytes of the file system of a directory."""
        with translate_os_errors(path):
            info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write or replace a small file atomically. A link is replaced itself, not its target.

        Raises:
            StorageError: The file cannot be written.
        """
        self._put(path, parts, mode, new=False)

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other process has written it; see ``WritableStorage.put_new``.

        Raises:
            StorageError: The file cannot be written.
        """
        try:
            if over is not None and version_of(os.stat(path)) != over:
                return False
            return self._put(path, parts, mode, new=over is None, over=over)
        except (ExistsError, FileNotFoundError):
            return False

    def _put(
        self, path: str, parts: Sequence[bytes | memoryview], mode: int, *, new: bool, over: str | None = None
    ) -> bool:
        for left in reversed(range(ATTEMPTS)):
            try:
                written = _put_once(path, parts, mode, new=new, over=over)
                break
            except StorageError as error:
                # A process that clears away leftovers may have removed the incomplete file.
                if error.problem != MISSING or not left or not os.path.isdir(os.path.dirname(path) or "."):
                    raise
        self.sync(os.path.dirname(path))
        return written

    def writer(self, path: str, nbytes: int, *, new: bool = False, mode: int = 0o666) -> LocalWriter:
        """Open a writer for a file of known size.

        Raises:
            StorageError: The file cannot be created.
        """
        from ckpttool.storage.local_writer import LocalWriter  # as in ``_put``

        return LocalWriter(path, nbytes, new=new, mode=mode, reserved=True)

    def sync(self, path: str) -> None:
        """Make the file names in a directory durable.

        Raises:
            StorageError: The disk fails.
        """
        with translate_os_errors(path):
            sync_directory(path)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Raises:
            StorageError: A file cannot be deleted.
        """
        for path in paths:
            with translate_os_errors(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                sync_directory(os.path.dirname(path))

    def rename(self, path: str, to: str) -> bool:
        """Rename a directory.

        Raises:
            StorageError: The rename failed.
        """
        with translate_os_errors(path):
            os.rename(path, to)
            sync_directory(os.path.dirname(path))
        return True

    def move_tree(self, path: str, to: str) -> None:
        """Rename a directory.

        Raises:
            StorageError: The rename failed.
        """
        self.rename(path, to)

    def remove_tree(self, path: str, *, unless_pinned: bool = False) -> None:
        """Remove a directory and all files below it.

        Raises:
            PinnedError: It is pinned.
            StorageError: A file cannot be removed.
        """
        remove_local(path.rstrip("/"), unless_pinned=unless_pinned)


def _put_once(path: str, parts: Sequence[bytes | memoryview], mode: int, *, new: bool, over: str | None) -> bool:
    from ckpttool.storage.local_writer import LocalWriter  # most commands write nothing

    writer = LocalWriter(path, sum(map(len, parts)), new=new, mode=mode)
    try:
        start = 0
        for part in parts:
            writer.write(start, part)
            start += len(part)
        if over is not None and version_of(os.stat(path)) != over:
            writer.discard()
            return False
        writer.commit()
    except BaseException:
        writer.discard()
        raise
    return True


def _local() -> LocalStorage:
    return LOCAL


LOCAL = LocalStorage()
LOCAL_SPEC = LOCAL.spec
