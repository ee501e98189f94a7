"""System calls on local files: names that replace nothing, kernel copies, reserved space, synced directories."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.error_texts import storage_error, translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.storage.local import LocalReader

CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""How to open a new file: what lies there already, a link that somebody planted for instance, is never written."""
KERNEL_COPY_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
"""What ``copy_file_range`` answers where this pair of file systems cannot do it; plain reads and writes can."""
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


_SYNC_FILE_RANGE_WRITE = 2


def write_all(fd: int, data: bytes | memoryview, start: int) -> None:
    """Write through the page cache, and let the disk begin with it, so that it has little left to do when synced.

    Raises:
        OSError: Writing failed.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:] if done else data, start + done)
    call = _sync_file_range()
    if call is not None and data:
        call(fd, start, len(data), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found
