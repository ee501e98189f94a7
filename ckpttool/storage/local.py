"""Files on local disk: read and written by offset, copied by the kernel where it can."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat as stat_module
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.base import WAIT, Entry, check_text, decode_text
from ckpttool.storage.error_texts import storage_error, translate_os_errors
from ckpttool.storage.safe_files import temporary_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Reader, Storage

CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""How to open a new file: what lies there already, a link that somebody planted for instance, is never written."""
PARTIAL = ".partial"
"""Behind the name of a file that is being written."""
KERNEL_COPY_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
"""What ``copy_file_range`` answers where this pair of file systems cannot do it; plain reads and writes can."""


class LocalReader:
    """A file on local disk, opened once, read with ``pread``."""

    distant = False

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
        """Nothing is distant here."""

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

    distant = False
    reads_versions = False

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
        """Nothing is distant here."""

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


def is_linked(storage: Storage, root: str, path: str) -> bool:
    """Whether a symbolic link lies between a root and what is below it, so that it may be anywhere.

    Args:
        storage: Where both lie; only local disks have links.
        root: A directory, which may itself be reached through links.
        path: What is below it.
    """
    if storage.distant:
        return False
    below = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    return os.path.realpath(path) != os.path.normpath(os.path.join(os.path.realpath(root), below))


LOCAL = LocalStorage()
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_SUCH_RENAME = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""What answers where a kernel or file system cannot rename without replacing."""


def rename_new(before: str, after: str) -> None:
    """Give a file a name that no other has.

    Source: Linux, renameat2(2), ``RENAME_NOREPLACE``; elsewhere link(2), which replaces nothing.

    Raises:
        FileExistsError: One has it.
        OSError: It cannot be renamed.
    """
    call = _renameat2()
    if call is not None:
        if not call(_AT_FDCWD, os.fsencode(before), _AT_FDCWD, os.fsencode(after), _RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
        if code not in _NO_SUCH_RENAME:
            raise OSError(code, os.strerror(code), after)
    try:
        os.link(before, after)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(after):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), after) from None
        os.rename(before, after)
        return
    os.unlink(before)


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return found


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


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Linux's own call; None elsewhere.

    Not os.posix_fallocate: where the file system cannot do it, the C library writes to every block instead.
    """
    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def reserve(fd: int, nbytes: int, target: str) -> None:
    """Give a new file its size, and its place on the disk where the file system can do so at once.

    Writing then costs a third less, the file lies in one piece, and a disk that is too small says so now.

    Raises:
        StorageError: There is no room; names the target.
    """
    with translate_os_errors(target):
        os.ftruncate(fd, nbytes)
        fallocate = _fallocate()
        if fallocate is None or not nbytes:
            return
        if fallocate(fd, 0, 0, nbytes) and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_NO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP}
"""What file systems of networks answer that sync no directories: names are safe there when they were made."""


def sync_directory(path: str) -> None:
    """Make the names in a directory safe.

    Raises:
        StorageError: The disk failed.
    """
    with translate_os_errors(path):
        fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(fd)


def write_new(path: str, parts: Sequence[bytes | memoryview], *, overwrite: bool, mode: int = 0o666) -> None:
    """Write a small file whole or not at all.

    Args:
        path: Where to.
        parts: What is in it.
        overwrite: Whether it may replace a file of that name; a link is replaced itself, not what it leads to.
        mode: Its permissions, before the umask.

    Raises:
        StorageError: It is there already and not to be replaced, or cannot be written.
    """
    exists = StorageError(path, "exists already", "choose another name, or pass --overwrite")
    if not overwrite and os.path.lexists(path):
        raise exists
    above, name = os.path.split(path)
    partial = os.path.join(above, temporary_name(name, PARTIAL))
    with translate_os_errors(path):
        fd = os.open(partial, CREATE, mode)
        try:
            at = 0
            for part in parts:
                write_at(fd, part, at, path)
                at += len(part)
            if overwrite:
                os.replace(partial, path)
            else:
                rename_new(partial, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            if isinstance(error, FileExistsError):
                raise exists from error
            raise
        finally:
            os.close(fd)


def write_at(fd: int, data: bytes | memoryview, start: int, target: str) -> None:
    """Write all of ``data`` at an offset.

    Raises:
        StorageError: Writing failed; names the target.
    """
    view = memoryview(data)
    done = 0
    while done < len(view):
        try:  # not translate_os_errors: this is called for every buffer
            done += os.pwrite(fd, view[done:] if done else view, start + done)
        except OSError as error:
            raise storage_error(target, error) from error
