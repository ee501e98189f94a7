"""Stage a local output directory and commit it by rename, or remove it."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import stat
from typing import TYPE_CHECKING

from ckpttool.arguments import checked_path
from ckpttool.errors import StorageError
from ckpttool.storage.base import MARK, WHOLE
from ckpttool.storage.error_texts import translate_os_errors
from ckpttool.storage.journal import JOURNAL
from ckpttool.storage.posix import write_at
from ckpttool.storage.safe_files import MOVE, Directory, check_link, check_own, check_plain, umask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

SUFFIX = ".partial"
"""Suffix of the staging directory, ``OUT.partial``."""
SHARED = ".ckpttool-shared"
"""Name of a file whose content identifies this directory to workers on other nodes."""
ASIDE = ".ckpttool-replaced"
"""Name of the directory that holds replaced files of an existing OUT until the commit is done."""
MOVES = ".ckpttool-moves"
"""Name of a directory with an empty file for each name that a commit moves into an existing OUT."""
KEPT = ".replaced"
"""Suffix of the name under which a replaced sidecar file is kept."""
MAX_KEPT_BYTES = 1 << 28
"""Most bytes of a sidecar file that are compared and kept."""
OWN = frozenset({MARK, WHOLE, JOURNAL, SHARED, ASIDE, MOVES})
"""Names in the staging directory that are no part of the output."""
ATTEMPTS = 10
"""Maximum number of attempts to lock the staging directory while other runs create and remove it."""


def not_empty(out: str, *, overwrite: bool | None) -> StorageError:
    """Return the error of an OUT that is not empty; it offers ``overwrite`` unless that is None."""
    problem = "already exists and is not empty"
    if overwrite is None:
        return StorageError(out, problem, "choose another OUT")
    return StorageError(out, problem, "choose another OUT or pass overwrite=True", ("overwrite",))


def check_target(out: str, *, overwrite: bool | None) -> None:
    """Refuse an OUT that cannot or must not be written, before any work is done.

    Args:
        out: The output directory.
        overwrite: Whether OUT may hold files; None if the command offers no ``overwrite``.

    Raises:
        StorageError: OUT is not a directory, is not empty, or its parent cannot be written.
    """
    checked_path("out", out)
    check_link(out)
    if os.path.lexists(out) and not os.path.isdir(out):
        raise StorageError(out, "already exists and is not a directory", "choose another OUT")
    with translate_os_errors(out):
        if os.path.isdir(out) and not overwrite and set(os.listdir(out)) - {SUFFIX} - _moved(_staging(out)):
            raise not_empty(out, overwrite=overwrite)
        aside = os.path.join(_staging(out), ASIDE)
        if not overwrite and os.path.isdir(aside) and os.listdir(aside):
            problem, hint = "holds files of OUT that a killed run set aside", "choose another OUT, or move them back"
            raise (
                StorageError(aside, problem, hint)
                if overwrite is None
                else StorageError(aside, problem, f"{hint}, or pass overwrite=True", ("overwrite",))
            )
    parent = _existing_parent(_staging(out))
    if not os.path.isdir(parent):
        raise StorageError(parent, "is not a directory", "choose another OUT")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(parent, "permission denied", f"cannot create {out} in it; choose another OUT")


def free_bytes(out: str) -> int:
    """Return the bytes that an output can take: those that are free, and those of files that a killed run left.

    Raises:
        StorageError: The file system cannot be asked.
    """
    staging = _staging(out)
    parent = _existing_parent(staging)
    with translate_os_errors(parent):
        info = os.statvfs(parent)
        # The files of a killed run are removed first, or reused.
        trees = [] if os.path.islink(staging) else os.walk(staging)
        held = (os.path.join(place, name) for place, _, names in trees for name in names)
        left = sum(512 * os.lstat(path).st_blocks for path in held)
    return info.f_bavail * info.f_frsize + left


def check_space(out: str, nbytes: int) -> None:
    """Refuse an output that does not fit.

    Raises:
        StorageError: The file system has less than ``nbytes`` bytes free.
    """
    free = free_bytes(out)
    if free < nbytes:
        raise StorageError(
            out, f"needs {nbytes:,} bytes, but only {free:,} are free", "free some space or choose another OUT"
        )


def check_apart(out: str, source: str) -> None:
    """Refuse to overwrite the source.

    Raises:
        StorageError: OUT, or its staging directory, is the source or contains it.
    """
    inside = os.path.realpath(source)
    for path in (os.path.realpath(out), _staging(out)):
        if os.path.commonpath([path, inside]) == path:
            raise StorageError(out, f"would be written over the checkpoint in {source}", "choose another OUT")


@contextlib.contextmanager
def staged(
    out: str, *, overwrite: bool | None, replaces: Callable[[str], bool], last: Sequence[str] = (), mark: str = "",
    resume: bool = False, mode: int = 0o777, parent_mode: int = 0o777,
) -> Iterator[Directory]:  # fmt: skip
    """Context manager: yield a staging directory; move it to ``out`` if the body succeeds, remove it if not.

    One rename creates a new OUT. Into an existing OUT the commit moves files one by one: first new files, then files
    selected by ``replaces``, then ``last`` (an index, say). Meanwhile OUT holds an in-progress marker: no reader takes
    a mixture for a complete output. If a move fails, the commit restores the old files.

    Only this user may enter the staging directory, so that no other user can put a link or a file into it.

    Nothing is synced to disk, like ``cp``: these outputs can be made again after a power failure.

    Args:
        out: The output directory.
        overwrite: As for ``check_target``: another run may have written OUT meanwhile.
        replaces: Whether a file name in an existing OUT belongs to the files being replaced.
        last: Names of files to move last, in this order.
        mark: Content of the in-progress marker: a run with the same one can resume.
        resume: Whether to resume an earlier run with the same marker, and to keep the files if the body fails.
        mode: Permissions of a new OUT, before the umask.
        parent_mode: Permissions of OUT's parent directory, if this creates it, before the umask.

    Raises:
        StorageError: Another run writes to OUT, writing fails, or another user may have changed the directory.
    """
    check_link(out)
    out = os.path.realpath(out)
    staging = _staging(out)
    existing = _existing_parent(out)
    with translate_os_errors(staging):
        if not os.path.isdir(above := os.path.dirname(out)):
            os.makedirs(os.path.dirname(above), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(above, parent_mode | 0o700)
    try:
        directory = _open_staging(staging, out, mark if resume else None)
    except BaseException:
        _remove_empty(os.path.dirname(out), existing)
        raise
    keep = False
    try:
        with translate_os_errors(staging):
            _write_mark(directory, mark)
        try:
            yield directory
        except BaseException:
            keep = resume
            raise
        with translate_os_errors(out):
            _commit(directory, out, replaces, last, mode, overwrite=overwrite)
    except _NotRestoredError:
        keep = True
        raise
    finally:
        # After the rename, another run may have created a directory of this name.
        if not keep and _is_at(staging, directory.fd):
            _remove_staging(directory)
            _remove_empty(os.path.dirname(out), existing)
        directory.close()


def write_token(directory: Directory) -> str:
    """Write the file SHARED with a new token, and return the token: a process that reads it sees this directory.

    Raises:
        StorageError: The file cannot be written.
    """
    token = os.urandom(16).hex()
    path = os.path.join(directory.path, SHARED)
    with translate_os_errors(path):
        with contextlib.suppress(FileNotFoundError):  # left by an earlier run
            directory.remove(SHARED)
        fd = directory.create(SHARED)
        try:
            write_at(fd, token.encode(), 0, path)
        finally:
            os.close(fd)
    return token


def _write_mark(directory: Directory, mark: str) -> None:
    fd = directory.open_file(MARK, os.O_WRONLY)
    try:
        os.ftruncate(fd, 0)
        write_at(fd, mark.encode(), 0, os.path.join(directory.path, MARK))
    finally:
        os.close(fd)


def _remove_staging(directory: Directory) -> None:
    """Remove the files of the staging directory, then its marker and itself; the marker stays if a file stays."""
    with contextlib.suppress(OSError, StorageError):
        if directory.stat(WHOLE) is not None:  # the rename failed
            directory.rename(WHOLE, MARK)
        for name in sorted(directory.names(), key=lambda name: (name == MARK, name == MOVES)):
            directory.remove(name)
        os.rmdir(directory.path)


def _remove_empty(path: str, existing: str) -> None:
    """Remove empty directories from ``path`` up to ``existing``, which stays."""
    with contextlib.suppress(OSError):
        while path != existing and path.startswith(existing):
            os.rmdir(path)
            path = os.path.dirname(path)


class _NotRestoredError(StorageError):
    """Replacing files of OUT failed, and so did restoring them: the staging directory holds the only copies."""


def _staging(out: str) -> str:
    """Return the staging directory: a sibling of OUT, so that a rename commits it.

    It lies inside OUT if OUT is a mount point, or its parent is not writable.
    """
    out = os.path.realpath(out)
    if os.path.isdir(out) and (os.path.ismount(out) or not os.access(os.path.dirname(out), os.W_OK | os.X_OK)):
        return os.path.join(out, SUFFIX)
    return out + SUFFIX


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _open_staging(staging: str, out: str, mark: str | None) -> Directory:
    """Create and lock the staging directory, private and empty except for the files of a run with the same ``mark``.

    Files of another killed run are removed. A directory without the in-progress marker, or one that another user may
    have written to, is refused and left unchanged.
    """
    for _ in range(ATTEMPTS):
        with translate_os_errors(staging):
            made = _create(staging)
        try:
            with translate_os_errors(staging):
                directory = _lock(staging)
        except BaseException:
            if made:
                _discard(staging)
            raise
        # Between opening and locking, the run that held the lock may have renamed the directory.
        if _is_at(staging, directory.fd):
            break
        directory.close()
    else:
        raise StorageError(staging, "other runs keep writing it", "wait for them, or choose another OUT")
    try:
        with translate_os_errors(staging):
            check_own(directory)
            _undo_commit(directory, out)
            _take_over(directory, mark, made=made)
    except BaseException:
        if made:
            _discard(staging)
        directory.close()
        raise
    return directory


def _discard(staging: str) -> None:
    """Remove the staging directory that this run just created."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(staging, MARK))
    with contextlib.suppress(OSError):
        os.rmdir(staging)


def _create(staging: str) -> bool:
    try:
        os.mkdir(staging, 0o700)
    except FileExistsError:
        return False
    return True


def _lock(staging: str) -> Directory:
    directory = Directory.open(staging)
    try:
        fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        directory.close()
        raise StorageError(staging, "another run is writing it", "wait for that run, or choose another OUT") from error
    except OSError:
        pass  # a file system without locks cannot detect two runs at once
    return directory


def _take_over(directory: Directory, mark: str | None, *, made: bool) -> None:
    if directory.stat(WHOLE) is not None:  # readers accept the directory without MARK: nothing may change before
        directory.rename(WHOLE, MARK)
    held = directory.names()
    found = directory.stat(MARK)
    if held and not made and found is None:
        raise StorageError(directory.path, "was not made by ckpttool", MOVE)
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise StorageError(os.path.join(directory.path, MARK), "is not a regular file", MOVE)
    os.fchmod(directory.fd, 0o700)
    if found is not None and mark is not None and _read(directory, MARK, len(mark.encode()) + 1) == mark.encode():
        check_plain(directory)
        return
    for name in held:
        if name != MARK:
            directory.remove(name)
    if found is not None:
        directory.remove(MARK)
    os.close(directory.create(MARK))


def _read(directory: Directory, name: str, nbytes: int) -> bytes:
    fd = directory.open_file(name, os.O_RDONLY)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


def _commit(
    directory: Directory, out: str, replaces: Callable[[str], bool], last: Sequence[str], mode: int,
    *, overwrite: bool | None,
) -> None:  # fmt: skip
    staging = directory.path
    if not _is_at(staging, directory.fd):
        raise StorageError(staging, "was renamed by another process while it was being written", "try again")
    if not os.path.lexists(out):
        for name in (JOURNAL, SHARED):
            with contextlib.suppress(FileNotFoundError):
                directory.remove(name)
        # Without any file of its own a later run would not know the directory if this one is killed before the rename.
        directory.rename(MARK, WHOLE)
        os.replace(staging, out)
        with contextlib.suppress(OSError):  # readers ignore it
            directory.remove(WHOLE)
        kept = os.fstat(directory.fd).st_mode & 0o7000
        os.fchmod(directory.fd, kept | 0o700 | (mode & ~umask()))
        return
    # Readers take the last files as the sign of a complete OUT: weights after sidecar files, an index after weights.
    order = {name: i for i, name in enumerate(last)}
    new = [n for n in directory.names() if n not in OWN]
    new.sort(key=lambda name: (order.get(name, -1), replaces(name), name))
    with Directory.open(out) as target:
        if not overwrite and set(target.names()) - {SUFFIX}:
            raise not_empty(out, overwrite=overwrite)
        old = [n for n in target.names() if (replaces(n) or n in new or n == WHOLE) and n != SUFFIX]
        old.sort(key=lambda name: (name not in last, not replaces(name), name))  # removed in the opposite order
        for name in old:
            found = target.stat(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                raise StorageError(os.path.join(out, name), "is a directory", "move it out of the way")
        for name in old:
            if name in new and not replaces(name):
                _keep_other(directory, target, name)
        with directory.make(MOVES, 0o700) as moves:
            for name in [*new, MARK]:
                os.close(moves.create(name))
            _write_mark(moves, json.dumps({"key": "", "files": [], "over": new}))
            with directory.make(ASIDE, 0o700) as aside:
                # There is a marker if the staging directory of a killed commit was removed by hand.
                older = [(target, aside, MARK)] if target.stat(MARK) is not None else []
                files = [(target, aside, n) for n in old] + [(directory, target, n) for n in new]
                _move(directory, [*older, (moves, target, MARK), *files, (target, moves, MARK)])


def _keep_other(directory: Directory, target: Directory, name: str) -> None:
    """Copy a sidecar file of OUT to another name, if the file that replaces it differs: a user may have edited it."""
    held, new = (_read(place, name, MAX_KEPT_BYTES) for place in (target, directory))
    if held == new:
        return
    fd = target.create(kept_name(name, target.names()), 0o666)
    try:
        write_at(fd, held, 0, os.path.join(target.path, name))
    finally:
        os.close(fd)


def kept_name(name: str, taken: Collection[str]) -> str:
    """Return the name under which a replaced sidecar file is kept: one that is not taken."""
    numbers = itertools.chain([""], map(str, itertools.count(2)))
    return next(kept for n in numbers if (kept := f"{name}{KEPT}{n}") not in taken)


def _undo_commit(directory: Directory, out: str) -> None:
    """Move back what the commit of a killed run has moved, unless it had moved everything: then OUT is complete."""
    held = set(directory.names())
    if MARK not in held:
        return
    if moved := _moved(directory.path):
        os.makedirs(out, exist_ok=True)
        with Directory.open(out) as target, directory.enter(ASIDE) as aside:
            older = aside.names()
            for source, to, names in ((target, directory, moved - {MARK}), (aside, target, older)):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        source.move(name, to)
            if MARK not in older:
                with contextlib.suppress(FileNotFoundError):
                    target.remove(MARK)
    for name in (ASIDE, MOVES):  # in this order: see ``_moved``
        if name in held:
            directory.remove(name)


def _moved(staging: str) -> set[str]:
    """Return the names that a killed commit has moved into OUT; none if it had not begun, or had moved everything.

    The marker moves first, and back last. ASIDE is removed before MOVES, so that a part of MOVES is never believed.
    """
    moves = os.path.join(staging, MOVES)
    if not os.path.isdir(moves) or not os.path.isdir(os.path.join(staging, ASIDE)):
        return set()
    names = set(os.listdir(moves))
    return set() if MARK in names else {MARK, *names} - set(os.listdir(staging)).difference(OWN)


def _move(directory: Directory, moves: Sequence[tuple[Directory, Directory, str]]) -> None:
    """Rename files between directories, all or none."""
    done: list[tuple[Directory, Directory, str]] = []
    try:
        for source, target, name in moves:
            done.append((source, target, name))
            source.move(name, target)
    except BaseException:
        _restore_moved(directory, done)
        raise


def _restore_moved(directory: Directory, done: Sequence[tuple[Directory, Directory, str]]) -> None:
    try:
        for source, target, name in reversed(done):
            with contextlib.suppress(FileNotFoundError):  # the failed move
                target.move(name, source)
    except OSError as error:
        # Without the in-progress marker no later run removes it.
        with contextlib.suppress(OSError):
            directory.remove(MARK)
        problem = "holds files of OUT that could be neither replaced nor restored"
        hint = f"move those in {ASIDE} back to OUT by hand, and remove {MARK} there"
        raise _NotRestoredError(directory.path, problem, hint) from error


def _existing_parent(out: str) -> str:
    parent = os.path.dirname(os.path.realpath(out))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent
