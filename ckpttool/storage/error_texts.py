"""Translate errors of the operating system to error messages."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator


MISSING = "does not exist"
"""Error message for a missing path."""
WAIT = "wait until the save is over, then try again"
"""Hint where a file changed while it was being read."""


class ExistsError(StorageError):
    """A new file cannot be written because its path exists."""


@contextlib.contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Raise an OSError of the body as a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: str, error: OSError) -> StorageError:
    """Return the StorageError for an OSError."""
    if error.errno == errno.ENOENT:
        return StorageError(path, MISSING, "check the path")
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
