"""An output directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage import MARK, translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SUFFIX = ".partial"
"""What is being written lies in ``OUT.partial`` until it is whole."""
JOURNAL = ".ckpttool-done"
"""Names the files that are complete, a line each, so that a run can go on from what another has left."""
SHARED = ".ckpttool-shared"
"""Tells processes on other nodes that what they see is this directory, and not one of their own of the same name."""
ASIDE = ".ckpttool-replaced"
"""Where files of an existing OUT wait until those that replace them are in place."""
ATTEMPTS = 10
"""How often to try again when other runs come and go."""


NOT_EMPTY = ("choose another OUT or pass --overwrite", "choose another OUT")
"""What to do about an OUT that is not empty, where --overwrite is offered, and where it is not."""


def check_target(out: str, *, overwrite: bool | None) -> None:
    """Refuse an output that cannot or must not be written, before any work is done.

    Raises:
        StorageError: OUT is no local directory, holds something that is not to be overwritten (None: cannot be), or its
            parent cannot be written.
    """
    if not out:
        raise StorageError("OUT", "is an empty name", "name a directory to write")
    if os.path.lexists(out) and not os.path.isdir(out):
        raise StorageError(out, "already exists and is not a directory", "choose another OUT")
    with translate_os_errors(out):
        if os.path.isdir(out) and not overwrite and set(os.listdir(out)) - {SUFFIX}:
            raise StorageError(out, "already exists and is not empty", NOT_EMPTY[overwrite is None])
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
        # What a killed run has left will be removed first, or gone on with.
        held = (os.path.join(place, name) for place, _, names in os.walk(staging) for name in names)
        left = sum(512 * os.lstat(path).st_blocks for path in held)
    free = info.f_bavail * info.f_frsize + left
    if free < nbytes:
        raise StorageError(
            out, f"needs {nbytes:,} bytes, but only {free:,} are free", "free some space or choose another OUT"
        )


def check_apart(out: str, source: str) -> None:
    """Refuse to write where the source lies.

    Raises:
        StorageError: OUT, or the directory it is staged in, is the source or holds it.
    """
    inside = os.path.realpath(source)
    for path in (os.path.realpath(out), _staging(out)):
        if os.path.commonpath([path, inside]) == path:
            raise StorageError(out, f"would be written over the checkpoint in {source}", "choose another OUT")


@contextlib.contextmanager
def staged(
    out: str, *, replaces: Callable[[str], bool], last: Sequence[str] = (), key: str = "", resume: bool = False
) -> Iterator[str]:
    """Yield a directory to write into; move it to ``out`` if the body succeeds, remove it if not.

    A new OUT appears by one rename. Into an OUT that is there, files are moved one by one, those that ``replaces``
    names after the others and ``last`` (an index, say) at the very end, so that no reader takes a mixture for a whole;
    if that fails, what was there is put back.

    Nothing is synced to disk, as ``cp`` does not: this is for outputs that can be made again after a power cut.

    Args:
        out: The directory that is to appear.
        replaces: Whether a file name in an existing OUT belongs to what is being replaced.
        last: Names of files to move last, in this order.
        key: What is going to be written: what a run with the same key has left can be gone on with.
        resume: Go on from it, and leave what there is if the body fails.

    Raises:
        StorageError: Another run is writing to the same OUT, or writing fails.
    """
    out = os.path.realpath(out)
    staging = _staging(out)
    existing = _existing_parent(out)
    with translate_os_errors(staging):
        os.makedirs(os.path.dirname(out), exist_ok=True)
    try:
        lock = _enter(staging, key if resume else None)
    except BaseException:
        _remove_empty(os.path.dirname(out), existing)
        raise
    keep = False
    try:
        with translate_os_errors(staging), open(os.path.join(staging, MARK), "w", encoding="utf-8") as mark:
            mark.write(key)
        try:
            yield staging
        except BaseException:
            keep = resume
            raise
        with translate_os_errors(out):
            _commit(staging, out, replaces, last)
    except _NotPutBackError:
        keep = True
        raise
    finally:
        # Once it was moved, another run may have made a directory of that name.
        if not keep and _is_at(staging, lock):
            shutil.rmtree(staging, ignore_errors=True)
            _remove_empty(os.path.dirname(out), existing)
        os.close(lock)


def _remove_empty(path: str, existing: str) -> None:
    """Remove the directories from a path up to one that was there before, as far as they are empty."""
    with contextlib.suppress(OSError):
        while path != existing and path.startswith(existing):
            os.rmdir(path)
            path = os.path.dirname(path)


class _NotPutBackError(StorageError):
    """Replacing files of OUT failed, and so did putting them back: the staging directory holds the only copies."""


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


def _enter(staging: str, key: str | None) -> int:
    """Make the staging directory, empty (but for what ``key`` left) and ours alone; returns the lock on it.

    What a killed run has left is cleared away. A directory without the mark of this tool is somebody else's: it is left
    as it is.
    """
    for _ in range(ATTEMPTS):
        with translate_os_errors(staging):
            made = _make(staging)
        try:
            with translate_os_errors(staging):
                lock = _lock(staging)
        except BaseException:
            if made:
                _discard(staging)
            raise
        # Between opening and locking, the run that held it may have moved it away.
        if _is_at(staging, lock):
            break
        os.close(lock)
    else:
        raise StorageError(staging, "other runs keep writing it", "wait for them, or choose another OUT")
    try:
        with translate_os_errors(staging):
            _claim(staging, key, made=made)
    except BaseException:
        if made:
            _discard(staging)
        os.close(lock)
        raise
    return lock


def _discard(staging: str) -> None:
    """Remove what was made just now."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(staging, MARK))
    with contextlib.suppress(OSError):
        os.rmdir(staging)


def _make(staging: str) -> bool:
    try:
        os.mkdir(staging)
    except FileExistsError:
        return False
    return True


def _lock(staging: str) -> int:
    if os.path.islink(staging):
        raise StorageError(staging, "is a link", "move it out of the way")
    fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StorageError(staging, "another run is writing it", "wait for that run, or choose another OUT") from error
    except OSError:
        pass  # a file system without locks: two runs at once are then the user's affair
    return fd


def _claim(staging: str, key: str | None, *, made: bool) -> None:
    mark = os.path.join(staging, MARK)
    held = os.listdir(staging)
    if held and not made and not os.path.isfile(mark):
        raise StorageError(staging, "was not made by ckpttool", "move it out of the way, or choose another OUT")
    if held and key is not None:
        with open(mark, encoding="utf-8", errors="replace") as file:
            if file.read(len(key) + 1) == key:
                return
    for name in held:
        path = os.path.join(staging, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif name != MARK:
            os.unlink(path)
    os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))


def _commit(staging: str, out: str, replaces: Callable[[str], bool], last: Sequence[str]) -> None:
    if not os.path.lexists(out):
        for name in (JOURNAL, SHARED, MARK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(staging, name))
        os.replace(staging, out)
        return
    # What makes the output look whole comes last: weights after their companions, an index after the weights.
    order = {name: i for i, name in enumerate(last)}
    new = [n for n in os.listdir(staging) if n not in {MARK, JOURNAL, SHARED}]
    new.sort(key=lambda name: (order.get(name, -1), replaces(name), name))
    old = [n for n in os.listdir(out) if (replaces(n) or n in new) and n != SUFFIX]
    old.sort(key=lambda name: (name not in last, not replaces(name), name))  # and it goes first
    for name in old:
        if os.path.isdir(os.path.join(out, name)):
            raise StorageError(os.path.join(out, name), "is a directory", "move it out of the way")
    aside = os.path.join(staging, ASIDE)
    os.mkdir(aside)
    moves = [(os.path.join(out, n), os.path.join(aside, n)) for n in old]
    moves += [(os.path.join(staging, n), os.path.join(out, n)) for n in new]
    done: list[tuple[str, str]] = []
    try:
        for source, target in moves:
            done.append((source, target))
            os.replace(source, target)
    except BaseException:
        _put_back(staging, done)
        raise


def _put_back(staging: str, done: Sequence[tuple[str, str]]) -> None:
    try:
        for source, target in reversed(done):
            with contextlib.suppress(FileNotFoundError):  # the move that failed
                os.replace(target, source)
    except OSError as error:
        # Without the mark no later run clears it away.
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(staging, MARK))
        problem = "holds files of OUT that could be neither replaced nor put back"
        raise _NotPutBackError(staging, problem, f"move those in {ASIDE} back to OUT by hand") from error


class Journal:
    """The files of a staging directory that are complete.

    Args:
        staging: The directory.
    """

    def __init__(self, staging: str) -> None:
        self._staging = staging
        self._left = bool({*os.listdir(staging)} - {MARK})
        self._path = os.path.join(staging, JOURNAL)
        self._done: set[str] = set()
        with contextlib.suppress(FileNotFoundError), open(self._path, encoding="utf-8") as file:
            # A line without its end was being written when its run was killed.
            self._done = {line[:-1] for line in file if line.endswith("\n")}

    def has(self, name: str, nbytes: int) -> bool:
        """Whether a file is complete; what is there of one that is not is removed."""
        if not self._left:
            return False
        path = os.path.join(self._staging, name)
        with contextlib.suppress(FileNotFoundError):
            if name in self._done and os.path.getsize(path) == nbytes:
                return True
            os.unlink(path)
        return False

    def forget(self) -> None:
        """Take no file for complete any more."""
        with translate_os_errors(self._path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def add(self, name: str) -> None:
        """Note that a file is complete."""
        with translate_os_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(name + "\n")


def _existing_parent(out: str) -> str:
    parent = os.path.dirname(os.path.realpath(out))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent
