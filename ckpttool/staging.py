"""An output directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage import open_storage, translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SUFFIX = ".partial"
"""What is being written lies in ``OUT.partial`` until it is whole."""


def check_target(out: str, *, overwrite: bool) -> None:
    """Refuse an output that cannot or must not be written, before any work is done.

    Raises:
        StorageError: OUT is no local directory, holds something and ``overwrite`` is False, or its parent cannot be
            written.
    """
    if not out:
        raise StorageError("OUT", "is an empty name", "name a directory to write")
    open_storage(out)
    if os.path.lexists(out) and not os.path.isdir(out):
        raise StorageError(out, "already exists and is not a directory", "choose another OUT")
    with translate_os_errors(out):
        if os.path.isdir(out) and not overwrite and set(os.listdir(out)) - {SUFFIX}:
            raise StorageError(out, "already exists and is not empty", "choose another OUT or pass --overwrite")
    parent = _existing_parent(_staging(out))
    if not os.path.isdir(parent):
        raise StorageError(parent, "is not a directory", "choose another OUT")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(parent, "permission denied", f"cannot create {out} in it; choose another OUT")


def check_space(out: str, nbytes: int) -> None:
    """Refuse to begin what cannot fit.

    Raises:
        StorageError: The file system has less than ``nbytes`` bytes free.
    """
    staging = _staging(out)
    parent = _existing_parent(staging)
    with translate_os_errors(parent):
        info = os.statvfs(parent)
        # What a killed run has left will be removed first.
        left = [e.stat(follow_symlinks=False) for e in os.scandir(staging)] if os.path.isdir(staging) else []
    free = info.f_bavail * info.f_frsize + sum(512 * s.st_blocks for s in left)
    if free < nbytes:
        raise StorageError(
            out, f"needs {nbytes:,} bytes, but only {free:,} are free", "free some space or choose another OUT"
        )


@contextlib.contextmanager
def staged(out: str, *, replaces: Callable[[str], bool], last: Sequence[str] = ()) -> Iterator[str]:
    """Yield a directory to write into; move it to ``out`` if the body succeeds, remove it if not.

    A new or empty OUT appears by one rename. Into an OUT that holds something, files are moved one by one: first the
    old files that ``replaces`` names go, then the new ones come, those that ``replaces`` names after the others, and
    ``last`` (an index, say) at the very end, so that no reader takes a mixture for a whole.

    Args:
        out: The directory that is to appear.
        replaces: Whether a file name in an existing OUT belongs to what is being replaced.
        last: Names of files to move last, in this order.

    Raises:
        StorageError: Another run is writing to the same OUT, or writing fails.
    """
    out = os.path.realpath(out)
    staging = _staging(out)
    with translate_os_errors(staging):
        os.makedirs(os.path.dirname(out), exist_ok=True)
        os.makedirs(staging, exist_ok=True)
        if os.path.islink(staging):
            raise StorageError(staging, "is a link", "move it out of the way")
    lock = _lock(staging)
    try:
        # A killed run may have left something: the lock says that nobody is writing it any more.
        _empty(staging)
        try:
            yield staging
            with translate_os_errors(out):
                _commit(staging, out, replaces, last)
        finally:
            # Once it was moved, another run may have made a directory of that name.
            if _is_at(staging, lock):
                shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def _staging(out: str) -> str:
    """The directory to write into: beside OUT, where a rename makes it OUT.

    Inside OUT if that is a file system of its own, or nothing may be created beside it.
    """
    out = os.path.realpath(out)
    if os.path.isdir(out) and (os.path.ismount(out) or not os.access(os.path.dirname(out), os.W_OK | os.X_OK)):
        return os.path.join(out, SUFFIX)
    return out + SUFFIX


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _lock(staging: str) -> int:
    try:
        with translate_os_errors(staging):
            fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(staging)  # it was made just now; what is not empty stays
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StorageError(staging, "another run is writing it", "wait for that run, or choose another OUT") from error
    except OSError:
        pass  # a file system without locks: two runs at once are then the user's affair
    return fd


def _empty(staging: str) -> None:
    with translate_os_errors(staging):
        for entry in sorted(os.scandir(staging), key=lambda e: e.is_file(follow_symlinks=False)):
            if not entry.is_file(follow_symlinks=False):
                raise StorageError(entry.path, "was not written by ckpttool", f"move {staging} out of the way")
            os.unlink(entry.path)


def _commit(staging: str, out: str, replaces: Callable[[str], bool], last: Sequence[str]) -> None:
    if not os.path.lexists(out) or (os.path.dirname(staging) != out and not os.listdir(out)):
        os.replace(staging, out)
        return
    # What makes the output look whole comes last: weights after their companions, an index after the weights.
    order = {name: i for i, name in enumerate(last)}
    new = sorted(os.listdir(staging), key=lambda name: (order.get(name, -1), replaces(name), name))
    old = [name for name in os.listdir(out) if replaces(name) and not os.path.isdir(os.path.join(out, name))]
    for name in new:
        if os.path.isdir(os.path.join(out, name)):
            raise StorageError(os.path.join(out, name), "is a directory", "move it out of the way")
    # And it goes first.
    for name in sorted(old, key=lambda name: (name not in last, name)):
        os.unlink(os.path.join(out, name))
    for name in new:
        os.replace(os.path.join(staging, name), os.path.join(out, name))


def _existing_parent(out: str) -> str:
    parent = os.path.dirname(os.path.realpath(out))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent
