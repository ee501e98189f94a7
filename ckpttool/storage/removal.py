"""Remove a directory so that readers refuse the remaining files after a failure."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from typing import TYPE_CHECKING

from ckpttool.errors import CkptError, StorageError
from ckpttool.storage.base import (
    MARK,
    MISSING,
    PIN,
    PinnedError,
    find_text,
    storage_error,
    translate_os_errors,
    walk,
)
from ckpttool.storage.system_calls import rename_new, sync_directory

if TYPE_CHECKING:
    from ckpttool.storage.base import Storage, WritableStorage


REMOVED = ".removed"
"""Suffix of a directory that is being removed; see ``aside_name``."""
MAX_NAME_BYTES = 255
REMOVAL_MARK = '{"key": "removed", "files": []}'
"""Content of the in-progress marker in a remote directory that is being removed."""
HALF_REMOVED = "half removed by a run that was killed"
"""Error message for such a directory."""


class PartlyRemovedError(StorageError):
    """A removal has failed after it removed some files, or could not rename the directory back."""


def is_half_removed(storage: Storage, path: str) -> bool:
    """Return whether a killed run has removed only a part of a directory.

    Raises:
        StorageError: The directory cannot be read.
    """
    if not storage.remote:
        return _is_aside(os.path.basename(path))
    # A save may commit and delete its marker between the two requests.
    return any(e.name == MARK for e in storage.listing(path)) and find_text(storage, f"{path}/{MARK}") == REMOVAL_MARK


def is_gone(storage: Storage, error: CkptError) -> bool:
    """Return whether an error is about a path that does not exist, or not any more."""
    return not storage.exists(error.path) and not storage.is_dir(error.path)


def _is_aside(name: str) -> bool:
    """Return whether a name is one of ``aside_name``."""
    return name.startswith(".") and name == _checked(name[1:].removesuffix(REMOVED).rpartition(".")[0])


def aside_name(name: str) -> str:
    """Return the name of a directory during its removal.

    It contains a checksum, so that a user's directory with the same suffix is never removed. A marker file would need
    space, and a removal must succeed on a full disk.
    """
    aside = _checked(name)
    return aside if len(os.fsencode(aside)) <= MAX_NAME_BYTES else _checked(f"{zlib.crc32(os.fsencode(name)):08x}")


def _checked(name: str) -> str:
    return f".{name}.{proof_of_name('removed', name)}{REMOVED}"


def proof_of_name(what: str, name: str) -> str:
    """Return a checksum in a name that ckpttool gives, which distinguishes it from a name that a user gives.

    Args:
        what: What ckpttool does with the file or directory.
        name: The rest of the name.
    """
    import hashlib  # most commands write and remove nothing

    return hashlib.sha256(f"{what} by ckpttool: ".encode() + os.fsencode(name)).hexdigest()[:16]


def remove_tree(path: str) -> None:
    """Remove a directory on local disk and all below it."""
    import shutil  # importing it takes longer than listing a checkpoint

    shutil.rmtree(path)


def remove_local(path: str, *, unless_pinned: bool = False) -> None:
    """Rename a directory on local disk, then remove it; rename it back if that fails before any file is removed.

    Args:
        path: The directory.
        unless_pinned: As for ``WritableStorage.remove_tree``.

    Raises:
        PinnedError: It is pinned; nothing is removed.
        StorageError: The directory cannot be removed.
    """
    above, name = os.path.split(path)
    if os.path.islink(path):
        raise StorageError(path, "is a link, and ckpttool does not remove its target", "remove the link by hand")
    try:
        count = _check_removable(path)
    except OSError as error:
        raise storage_error(error.filename or path, error) from error
    aside = path if _is_aside(name) else os.path.join(above, aside_name(name))
    if aside != path:
        with contextlib.suppress(OSError):  # left by a killed run
            remove_tree(aside)
        if os.path.lexists(aside):
            aside = os.path.join(above, aside_name(f"{zlib.crc32(os.fsencode(name)):08x}.{os.urandom(4).hex()}"))
        with translate_os_errors(path):
            os.rename(path, aside)
    try:
        if unless_pinned and any(PIN in (*folders, *files) for _, folders, files in os.walk(aside)):
            raise PinnedError(path)
        sync_directory(above)  # otherwise a power failure might bring back some files under the old name
        with translate_os_errors(path):
            remove_tree(aside)
    except StorageError as error:
        if error.problem == MISSING:  # another process removes it
            raise
        left = sum(len(folders) + len(files) for _, folders, files in os.walk(aside))
        if left < count:
            raise _removed_in_part(error, path, count - left, count, aside) from error
        if aside != path:
            try:
                rename_new(aside, path)
            except OSError:
                raise _removed_in_part(error, path, 0, count, aside) from error
            sync_directory(above)
        raise


def _removed_in_part(error: StorageError, path: str, gone: int, count: int, rest: str) -> PartlyRemovedError:
    what = f"when {gone:,} of its {count:,} files and directories were removed; the others are in {rest}"
    return PartlyRemovedError(path, f"{error.problem}, {what}", error.hint)


def _check_removable(path: str) -> int:
    """Return the number of files and directories below a directory.

    Raises:
        OSError: A missing permission forbids removing one of them, or the directory itself.
    """
    _check_deletable(os.path.dirname(path) or ".", [os.path.basename(path)])
    count = 0
    for directory, folders, files in os.walk(path, onerror=_raise):
        _check_deletable(directory, [*folders, *files])
        count += len(folders) + len(files)
    return count


def _raise(error: OSError) -> None:
    raise error


def _check_deletable(directory: str, names: list[str]) -> None:
    """Check that the entries of a directory may be deleted, as far as that is known without trying.

    Raises:
        OSError: An entry may not be deleted.
    """
    if names and not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)
    above, user = os.stat(directory), os.geteuid()
    sticky = above.st_mode & stat.S_ISVTX and user not in (0, above.st_uid)
    for path in (os.path.join(directory, name) for name in names):
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            info = os.lstat(path)
            # A file that its owner may write by its mode, and yet cannot, is immutable.
            own = info.st_uid == user
            locked = stat.S_ISREG(info.st_mode) and own and info.st_mode & stat.S_IWUSR and not os.access(path, os.W_OK)
            if locked or (sticky and not own):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)


def remove_remote(storage: WritableStorage, path: str, *, unless_pinned: bool = False) -> None:
    """Remove all files below a remote path; write the marker that makes readers refuse it first, delete it last.

    Args:
        storage: Its storage.
        path: The directory.
        unless_pinned: As for ``WritableStorage.remove_tree``.

    Raises:
        PinnedError: It is pinned; nothing is removed.
        StorageError: A file cannot be removed. If no file was removed, the directory is unchanged.
    """
    names = [name for name, _ in walk(storage, path) if name != MARK]
    mark = f"{path}/{MARK}"
    # Deleting a missing file needs the same permission. Without it, the marker must not be written.
    storage.delete([f"{mark}.probe"])
    before = _read(storage, mark)
    storage.put(mark, REMOVAL_MARK.encode())
    storage.abandon(path)  # before the marker is deleted: after a crash here the next run repeats the removal
    try:
        storage.refresh([])
        if unless_pinned and any(name.rpartition("/")[2] == PIN for name, _ in walk(storage, path)):
            raise PinnedError(path)
        storage.delete([f"{path}/{name}" for name in names])
    except StorageError as error:
        storage.refresh([])
        left = {name for name, _ in walk(storage, path)}
        gone = sum(name not in left for name in names)
        if gone:
            raise _removed_in_part(error, path, gone, len(names), path) from error
        if before is None:
            storage.delete([mark])
        else:
            storage.put(mark, before)
        raise
    storage.delete([mark])


def _read(storage: Storage, path: str) -> bytes | None:
    """Return the content of a file; None without one."""
    try:
        with storage.open(path) as reader:
            return reader.read(0, reader.nbytes)
    except StorageError as error:
        if error.problem == MISSING:
            return None
        raise
