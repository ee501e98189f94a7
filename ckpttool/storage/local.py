"""Files on local disk.

Source of the order of steps of a durable write: POSIX, rename() and fsync(): the bytes of a file are safe after fsync
of the file, its name after fsync of the directory.
"""

from __future__ import annotations

import contextlib
import os
import stat as stat_module
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.base import WAIT, Entry, check_text, decode_text
from ckpttool.storage.error_texts import ExistsError, storage_error, translate_os_errors
from ckpttool.storage.local_writer import LocalWriter
from ckpttool.storage.posix import sync_directory
from ckpttool.storage.removal import remove_local
from ckpttool.storage.retry import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Reader, Storage


class LocalReader:
    """A file on local disk, opened once, read with ``pread``."""

    remote = False

    def __init__(self, path: str) -> None:
        self.path = path
        with translate_os_errors(path):
            # Not blocking: opening a named pipe would wait for a writer for ever.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            info = os.fstat(self.fd)
        if not stat_module.S_ISREG(info.st_mode):
            self.close()
            raise StorageError(path, "is not a regular file", "remove it or choose another checkpoint")
        self.nbytes = info.st_size
        self.version = _version(info)

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The file ends before ``end``, or the disk fails.
        """
        parts: list[bytes] = []
        position = start
        while position < end:
            try:  # not translate_os_errors: this is called a million times for the largest checkpoints
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

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        return [self.read(r.start, r.end) for r in ranges]

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Nothing is remote here."""

    def check_unchanged(self) -> None:
        """Make sure that the file is still the one that was opened.

        Raises:
            StorageError: Its size or modification time changed since.
        """
        with translate_os_errors(self.path):
            info = os.fstat(self.fd)
        if (info.st_size, _version(info)) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Release the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _shrunk(self, position: int) -> StorageError:
        return StorageError(self.path, f"ended at byte {position} while it was being read", WAIT)


def _version(info: os.stat_result) -> str:
    return f"{info.st_mtime_ns}-{info.st_ino}"


class LocalStorage:
    """Files on local disk."""

    remote = False
    reads_versions = False
    parts_at_once = 1
    retries = Tally()
    """Stays 0: the kernel repeats what can be repeated."""

    def listing(self, path: str) -> list[Entry]:
        """The names in a directory, sorted.

        Raises:
            StorageError: There is no such directory, or it cannot be read.
        """
        entries = []
        with translate_os_errors(path), os.scandir(path) as names:
            for item in names:
                is_dir = item.is_dir()
                # A dangling link has no size; opening it later says what is wrong.
                with contextlib.suppress(FileNotFoundError):
                    info = item.stat()
                    nbytes = 0 if is_dir else info.st_size
                    entries.append(Entry(item.name, is_dir, nbytes, _version(info), info.st_mtime))
        return sorted(entries, key=lambda e: e.name)

    def list_tree(self, path: str) -> None:
        """Nothing is remote here."""

    def is_dir(self, path: str) -> bool:
        """Whether the path is a directory that can be looked at."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything at the path, a dangling link included."""
        return os.path.lexists(path)

    def open(self, path: str, *, ahead: bool = False) -> LocalReader:
        """Open a file for reading ranges.

        Raises:
            StorageError: It is missing, not a file, or not permitted.
        """
        return LocalReader(path)

    def read_text(self, path: str) -> str:
        """The content of a small text file.

        Raises:
            StorageError: It cannot be read, is larger than 1 MiB or is not text.
        """
        with self.open(path) as reader:
            return decode_text(path, reader.read(0, check_text(path, reader.nbytes)))

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> list[bytes]:
        """The bytes [start, end) of each reader."""
        return [reader.read(start, end) for reader, start, end in wanted]

    def refresh(self, paths: Sequence[str]) -> None:
        """Nothing is remembered here."""

    # ------------------------------------------------------------------------------------------- writing

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents.

        Raises:
            StorageError: It cannot be created.
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
        """Bytes that can still be written below a directory."""
        with translate_os_errors(path):
            info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write a small file, or replace it, in one step. A link is replaced itself, not its target.

        Raises:
            StorageError: It cannot be written.
        """
        self._put(path, parts, mode, new=False)

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other writer was faster; see ``WritableStorage.put_new``.

        Raises:
            StorageError: It cannot be written.
        """
        try:
            if over is not None and _version(os.stat(path)) != over:
                return False
            self._put(path, parts, mode, new=over is None)
        except (ExistsError, FileNotFoundError):
            return False
        return True

    def _put(self, path: str, parts: Sequence[bytes | memoryview], mode: int, *, new: bool) -> None:
        writer = LocalWriter(path, sum(map(len, parts)), new=new, mode=mode)
        try:
            writer.append(parts)
            writer.commit()
        except BaseException:
            writer.discard()
            raise
        self.sync(os.path.dirname(path))

    def writer(self, path: str, nbytes: int, *, new: bool = False) -> LocalWriter:
        """Begin to write a file of known size in parts.

        Raises:
            StorageError: It cannot be created.
        """
        return LocalWriter(path, nbytes, new=new, reserved=True)

    def sync(self, path: str) -> None:
        """Make the names in a directory durable.

        Raises:
            StorageError: The disk fails.
        """
        with translate_os_errors(path):
            sync_directory(path)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Raises:
            StorageError: One cannot be deleted.
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

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all files below it.

        Raises:
            StorageError: A file cannot be removed.
        """
        remove_local(path.rstrip("/"))

    def abandon(self, path: str) -> None:
        """Nothing: unfinished files lie in the directory itself."""


def is_linked(storage: Storage, root: str, path: str) -> bool:
    """Whether a symbolic link lies between a root and what is below it, so that it may be anywhere.

    Args:
        storage: Where both lie; only local disks have links.
        root: A directory, which may itself be reached through links.
        path: What is below it.
    """
    if storage.remote:
        return False
    below = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    return os.path.realpath(path) != os.path.normpath(os.path.join(os.path.realpath(root), below))


LOCAL = LocalStorage()
