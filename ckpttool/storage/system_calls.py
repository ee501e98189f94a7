"""System calls on files of the local disk: create, rename, copy, reserve, write and sync."""

from __future__ import annotations

import errno
import functools
import os
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.base import (
    storage_error,
    translate_os_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.storage.local_reader import LocalReader


CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that create a new file and refuse an existing one, such as a link that another user has planted."""
KERNEL_COPY_UNSUPPORTED = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
"""Errors of ``copy_file_range`` for a pair of file systems that needs plain reads and writes."""
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NO_SUCH_RENAME = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
"""Errors of a kernel or file system that cannot rename without replacing."""


def rename_new(before: str, after: str) -> None:
    """Rename a file; never replace another.

    Source: Linux, renameat2(2), ``RENAME_NOREPLACE``; elsewhere link(2), which replaces nothing.

    Raises:
        FileExistsError: The new name exists.
        OSError: The rename failed.
    """
    call = _renameat2()
    if call is not None:
        if not call(_AT_FDCWD, os.fsencode(before), _AT_FDCWD, os.fsencode(after), _RENAME_NOREPLACE):
            return
        import ctypes  # as in ``_renameat2``

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


def replace_files(source: str, target: str, names: Sequence[str]) -> None:
    """Move files into another directory of the same file system, in order; files of these names are replaced.

    Raises:
        StorageError: A file cannot be moved.
    """
    for name in names:
        path = os.path.join(target, name)
        with translate_os_errors(path):
            os.replace(os.path.join(source, name), path)


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    import ctypes  # importing it takes longer than reading a small checkpoint

    found = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return found


def copy_range(source: LocalReader, start: int, target_fd: int, target_start: int, nbytes: int, target: str) -> bool:
    """Copy bytes from one file to another in the kernel.

    Returns:
        False if this pair of file systems cannot do it; nothing was copied then.

    Raises:
        StorageError: The source ended early, or writing failed; names the file.
    """
    if not hasattr(os, "copy_file_range"):  # macOS
        return False
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
    """Return Linux's ``fallocate``; None on other systems.

    Not os.posix_fallocate: on file systems without support, the C library writes to every block instead.
    """
    import ctypes  # as in ``_renameat2``

    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def reserve(fd: int, nbytes: int, target: str) -> None:
    """Set the size of a new file, and allocate its blocks if the file system supports that.

    Writes then cost a third less, the file is contiguous, and a full disk fails at once.

    Raises:
        StorageError: The disk has too little space; names the target.
    """
    with translate_os_errors(target):
        os.ftruncate(fd, nbytes)
        fallocate = _fallocate()
        if fallocate is None or not nbytes:
            return
        import ctypes  # as in ``_renameat2``

        if fallocate(fd, 0, 0, nbytes) and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_NO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP}
"""Errors of network file systems that cannot sync directories; there a name is durable when its creation returns."""


def sync_directory(path: str) -> None:
    """Make the file names in a directory durable.

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
        try:  # not translate_os_errors: each buffer takes a call
            done += os.pwrite(fd, view[done:] if done else view, start + done)
        except OSError as error:
            raise storage_error(target, error) from error


_SYNC_FILE_RANGE_WRITE = 2


def write_all(fd: int, data: bytes | memoryview, start: int) -> None:
    """Write through the page cache and start writeback at once, so that a later sync is short.

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
    import ctypes  # as in ``_renameat2``

    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found
