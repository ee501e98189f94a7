"""The storage seam: list, open and read ranges of files, and move bytes between files.

Paths are ``str``: ``pathlib.Path`` would turn ``s3://`` into ``s3:/``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat as stat_module
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpttool.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange

MAX_TEXT_BYTES = 1 << 20
"""Small text files (``latest``) larger than this are not what their name says."""

WAIT = "wait until the save is over, then try again"

KERNEL_COPY_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
"""What ``copy_file_range`` answers where this pair of file systems cannot do it; plain reads and writes can."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory."""

    name: str
    """The last component of the path."""
    is_dir: bool
    """True for a directory, or a link to one."""
    nbytes: int
    """Size of a file in bytes; 0 for a directory."""


class RangeReader(Protocol):
    """An open file of which ranges can be read. Threads may share it."""

    path: str
    """What error messages call the file."""
    nbytes: int
    """Size of the file when it was opened."""
    version: str
    """Differs when the file was written anew: its modification time, or what a remote store has in its place."""

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
        """

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; one call, so that a remote store may coalesce and overlap them."""

    def close(self) -> None:
        """Release the file."""


class LocalReader:
    """A file on local disk, opened once, read with ``pread``."""

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
        self.version = str(info.st_mtime_ns)

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
        with translate_os_errors(self.path):
            while done < len(buffer):
                got = os.preadv(self.fd, [buffer[done:]], start + done)
                if got == 0:
                    raise self._shrunk(start + done)
                done += got

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        return [self.read(r.start, r.end) for r in ranges]

    def check_unchanged(self) -> None:
        """Make sure that the file is still the one that was opened.

        Raises:
            StorageError: Its size or modification time changed since.
        """
        with translate_os_errors(self.path):
            info = os.fstat(self.fd)
        if (info.st_size, str(info.st_mtime_ns)) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Release the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _shrunk(self, position: int) -> StorageError:
        return StorageError(self.path, f"ended at byte {position} while it was being read", WAIT)


class LocalStorage:
    """Files on local disk."""

    def list(self, path: str) -> list[Entry]:
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
                    entries.append(Entry(item.name, is_dir, 0 if is_dir else item.stat().st_size))
        return sorted(entries, key=lambda e: e.name)

    def is_dir(self, path: str) -> bool:
        """Whether the path is a directory that can be looked at."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything at the path, a dangling link included."""
        return os.path.lexists(path)

    def open(self, path: str) -> LocalReader:
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
            if reader.nbytes > MAX_TEXT_BYTES:
                raise StorageError(path, f"is {reader.nbytes} bytes long, too large for a text file", "is it damaged?")
            data = reader.read(0, reader.nbytes)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise StorageError(path, "is not text", "is it damaged? pass --tag to choose a checkpoint") from error


def open_storage(url: str) -> LocalStorage:
    """The storage that a path or URL lives in.

    Raises:
        StorageError: The URL's scheme is not supported.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme.isalnum():
        raise StorageError(url, f"{scheme}:// is not supported yet", "use a local directory")
    return LocalStorage()


@contextlib.contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Turn an OSError of the body into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: str, error: OSError) -> StorageError:
    """Say an OSError in plain words."""
    if error.errno == errno.ENOENT:
        return StorageError(path, "does not exist", "check the path")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return StorageError(path, "permission denied", "check who may read and write it")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(path, "no space left on the device", "free some space or choose another place")
    if error.errno == errno.ENOTDIR:
        return StorageError(path, "is not a directory", "pass a checkpoint's directory")
    if error.errno == errno.EROFS:
        return StorageError(path, "is on a read-only file system", "choose another place")
    if error.errno in {errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY}:
        return StorageError(path, (error.strerror or "is in the way").lower(), "move it out of the way")
    if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
        return StorageError(path, (error.strerror or "cannot be found").lower(), "choose another path")
    if error.errno == errno.EFBIG:
        return StorageError(path, "is larger than a file may be here", "raise the limit or choose another place")
    return StorageError(path, (error.strerror or str(error)).lower(), "check the disk and try again")


def copy_range(source: LocalReader, start: int, target_fd: int, target_start: int, nbytes: int, target: str) -> bool:
    """Let the kernel copy bytes from one file to another; no byte enters this process.

    Returns:
        False if this pair of file systems cannot do it; nothing was copied then.

    Raises:
        StorageError: The source ended early, or writing failed; names the file.
    """
    done = 0
    while done < nbytes:
        try:
            got = os.copy_file_range(source.fd, target_fd, nbytes - done, start + done, target_start + done)
        except OSError as error:
            if done == 0 and error.errno in KERNEL_COPY_UNSUPPORTED:
                return False
            raise storage_error(target, error) from error
        if got == 0:
            if start + done < source.nbytes and done == 0 and os.fstat(source.fd).st_size == source.nbytes:
                return False  # some file systems answer 0 instead of an error
            raise StorageError(source.path, f"ended at byte {start + done} while it was being read", "try again")
        done += got
    return True


def write_at(fd: int, data: bytes | memoryview, start: int, target: str) -> None:
    """Write all of ``data`` at an offset.

    Raises:
        StorageError: Writing failed; names the target.
    """
    view = memoryview(data)
    done = 0
    with translate_os_errors(target):
        while done < len(view):
            done += os.pwrite(fd, view[done:], start + done)
