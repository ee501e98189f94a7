"""Stage a local output directory and commit it by rename, or remove it.

A new OUT is one rename. An existing OUT may be a mount point or a working directory, and may contain other files of the
user, so its files are moved one by one. The next run to the same OUT clears away after a killed one:

================================================  =====================================================================
killed                                            the next run
================================================  =====================================================================
while files are written                           removes the staging directory, or resumes with its completed files
                                                  (``journal``); OUT is as it was
new OUT: after MARK became WHOLE                  renames it back to MARK, then as above
new OUT: after the rename                         nothing: OUT is complete, and readers ignore WHOLE
existing OUT: before MOVES and ASIDE both exist   as while files are written: nothing was moved
existing OUT: while files are moved               moves the files that MOVES names from OUT back into the staging
                                                  directory, and the files in ASIDE back into OUT, then as above
existing OUT: after MARK is back in MOVES         removes the staging directory: OUT is complete
================================================  =====================================================================

Between the first and the last move OUT has MARK, so that no reader accepts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import stat
from typing import TYPE_CHECKING

from ckpttool.arguments import checked_path
from ckpttool.errors import StorageError
from ckpttool.storage.base import MARK, WHOLE, storage_error, translate_os_errors
from ckpttool.storage.journal import JOURNAL
from ckpttool.storage.removal import proof_of_name
from ckpttool.storage.safe_files import MAX_NAME_BYTES, MOVE, Directory, check_link, check_plain, umask
from ckpttool.storage.system_calls import write_at
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence


SUFFIX = ".partial"
"""Suffix of the staging directory, ``.OUT.RANDOM.partial``."""
SHARED = ".ckpttool-shared"
"""Name of a directory with a file of a random name, by which workers on other nodes recognise the staging directory."""
ASIDE = ".ckpttool-replaced"
"""Name of the directory that contains replaced files of an existing OUT until the commit is done."""
MOVES = ".ckpttool-moves"
"""Name of a directory with an empty file for each name that a commit moves into an existing OUT."""
KEPT = ".replaced"
"""Suffix of the name under which a replaced sidecar file is kept."""
MAX_KEPT_BYTES = 1 << 28
"""Most bytes of a sidecar file that are compared and kept."""
OWN = frozenset({MARK, WHOLE, JOURNAL, SHARED, ASIDE, MOVES})
"""Names in the staging directory that are not part of the output."""
_RANDOM = r"[0-9a-f]{16}"
_INSIDE = re.compile(rf"\.{_RANDOM}{re.escape(SUFFIX)}")
"""Name of a staging directory inside OUT."""
_KIND = 0o170777
"""Bits of a mode: the kind of file, and permissions without the set-group-ID bit that a new directory inherits."""


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
        overwrite: Whether OUT may contain files; None if the command has no ``overwrite``.

    Raises:
        StorageError: OUT is not a directory, is not empty, or its parent cannot be written.
    """
    checked_path("out", out)
    check_link(out)
    if os.path.lexists(out) and not os.path.isdir(out):
        raise StorageError(out, "already exists and is not a directory", "choose another OUT")
    with translate_os_errors(out):
        found = _leftovers(out)
        if os.path.isdir(out) and not overwrite and _names(os.listdir(out)).difference(*map(_moved, found)):
            raise not_empty(out, overwrite=overwrite)
        for aside in () if overwrite else (os.path.join(path, ASIDE) for path in found):
            if os.path.isdir(aside) and os.listdir(aside):
                problem, hint = (
                    "holds files of OUT that a killed run set aside",
                    "choose another OUT, or move them back",
                )
                if overwrite is None:
                    raise StorageError(aside, problem, hint)
                raise StorageError(aside, problem, f"{hint}, or pass overwrite=True", ("overwrite",))
    parent = _existing(_place(out)[0])
    if not os.path.isdir(parent):
        raise StorageError(parent, "is not a directory", "choose another OUT")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(parent, "permission denied", f"cannot create {out} in it; choose another OUT")


def free_bytes(out: str) -> int:
    """Return the bytes that an output can take: free bytes, and leftovers, which are removed or reused first.

    Raises:
        StorageError: The file system cannot be asked.
    """
    parent = _existing(_place(out)[0])
    with translate_os_errors(parent):
        info = os.statvfs(parent)
        held = (os.path.join(p, name) for left in _leftovers(out) for p, _, names in os.walk(left) for name in names)
        return info.f_bavail * info.f_frsize + sum(512 * os.lstat(path).st_blocks for path in held)


def check_space(out: str, nbytes: int) -> None:
    """Refuse an output that does not fit.

    Raises:
        StorageError: The file system has less than ``nbytes`` bytes free.
    """
    free = free_bytes(out)
    if free < nbytes:
        problem = f"needs {format_size(nbytes)}, but only {format_size(free)} are free"
        raise StorageError(out, problem, "free some space or choose another OUT")


def check_apart(out: str, source: str) -> None:
    """Refuse to overwrite the source.

    Raises:
        StorageError: OUT, or a leftover of an interrupted run to OUT, is the source or contains it.
    """
    inside = os.path.realpath(source)
    for path in (os.path.realpath(out), *_leftovers(out)):
        if os.path.commonpath([path, inside]) == path:
            raise StorageError(out, f"would be written over the checkpoint in {source}", "choose another OUT")


@contextlib.contextmanager
def staged(
    out: str,
    *,
    overwrite: bool | None,
    replaces: Callable[[str], bool],
    last: Sequence[str] = (),
    mark: str = "",
    resume: bool = False,
    mode: int = 0o777,
    parent_mode: int = 0o777,
) -> Iterator[Directory]:
    """Context manager: yield a staging directory; move it to ``out`` if the body succeeds, remove it if not.

    One rename creates a new OUT. Into an existing OUT the commit moves files one by one: first new files, then files
    selected by ``replaces``, then ``last`` (an index, say). Meanwhile OUT contains an in-progress marker, so no reader
    accepts a mixture as a complete output. If a move fails, the commit restores the old files.

    The staging directory has a name that nobody can guess, and only this user may enter it: no other user can put a
    link or a file into it. The next run to the same OUT finds the staging directory of an interrupted run by its name.
    It moves back the files that the interrupted commit moved, and reuses (``resume``) or removes the directory. If two
    runs to one OUT start at the same moment, both may be refused.

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
    existing = _existing(os.path.dirname(out))
    with translate_os_errors(out):
        if not os.path.isdir(above := os.path.dirname(out)):
            os.makedirs(os.path.dirname(above), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(above, parent_mode | 0o700)
    try:
        with _open_staging(out, mark, resume=resume) as directory:
            keep = False
            try:
                try:
                    yield directory
                except BaseException:
                    keep = resume
                    raise
                with translate_os_errors(out):
                    _commit(directory, out, replaces, last, mode, overwrite=overwrite)
            finally:
                if not keep and _is_at(directory.path, directory.fd):  # not after the rename
                    try:
                        _remove_staging(directory, out)
                    except BaseException:  # interrupted: each step can be repeated
                        _remove_staging(directory, out)
                        raise
    except BaseException:
        _remove_empty(os.path.dirname(out), existing)
        raise


def _put(directory: Directory, name: str, data: bytes) -> None:
    """Write a new file; remove it on failure."""
    fd = directory.create(name)
    try:
        write_at(fd, data, 0, os.path.join(directory.path, name))
    except BaseException:
        directory.remove(name)
        raise
    finally:
        os.close(fd)


def _remove(directory: Directory) -> None:
    """Remove the files of a staging directory, then its marker and itself; keep the marker if a removal fails."""
    for name in sorted(directory.names(), key=lambda name: (name == MARK, name == MOVES)):
        directory.remove(name)
    with contextlib.suppress(FileNotFoundError):  # its run was refused, and removed it
        os.rmdir(directory.path)


def _remove_staging(directory: Directory, out: str) -> None:
    """Move back files of an interrupted commit, and remove the staging directory."""
    with contextlib.suppress(OSError):
        _recover(directory, out)
        _remove(directory)


def _remove_empty(path: str, existing: str) -> None:
    """Remove empty directories from ``path`` up to ``existing``, which is kept."""
    with contextlib.suppress(OSError):
        while path != existing and path.startswith(existing):
            os.rmdir(path)
            path = os.path.dirname(path)


def _place(out: str) -> tuple[str, str]:
    """Return the parent of OUT's staging directories, and how their names begin: siblings of OUT, for the rename.

    They are inside OUT if OUT is a mount point, or its parent is not writable.
    """
    out = os.path.realpath(out)
    above, name = os.path.split(out)
    if os.path.isdir(out) and (os.path.ismount(out) or not os.access(above, os.W_OK | os.X_OK)):
        return out, "."
    if len(os.fsencode(name)) + len(f"..{'0' * 16}{SUFFIX}") > MAX_NAME_BYTES:
        name = proof_of_name("staged", name)
    return above, f".{name}."


def _names(names: Iterable[str]) -> set[str]:
    """Return the names in OUT except staging directories."""
    return {name for name in names if not _INSIDE.fullmatch(name)}


def _leftovers(out: str, new: os.stat_result | None = None) -> list[str]:
    """Return the staging directories of all runs to OUT; directories that another user may have changed are left out.

    Args:
        out: The output directory.
        new: Stat of a new staging directory. File systems without owners or modes give all directories the same ones.

    Raises:
        StorageError: The directory above OUT cannot be listed.
    """
    above, prefix = _place(out)
    owner, mode = (os.geteuid(), stat.S_IFDIR | 0o700) if new is None else (new.st_uid, new.st_mode)
    is_named = re.compile(re.escape(prefix) + _RANDOM + re.escape(SUFFIX)).fullmatch
    found = []
    missing = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
    with translate_os_errors(above), missing:
        for path in (os.path.join(above, name) for name in sorted(os.listdir(above)) if is_named(name)):
            with contextlib.suppress(FileNotFoundError):
                info = os.lstat(path)
                if (info.st_uid, info.st_mode & _KIND) == (owner, mode & _KIND):
                    found.append(path)
    return found


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _open_staging(out: str, mark: str, *, resume: bool) -> Directory:
    """Create and lock a staging directory with the marker, or take over the one of an interrupted run (``resume``).

    It is locked before the search for leftovers, so that at least one of two runs sees the other.
    """
    above, prefix = _place(out)
    path = os.path.join(above, f"{prefix}{os.urandom(8).hex()}{SUFFIX}")
    with contextlib.ExitStack() as stack:
        with translate_os_errors(path):
            stack.callback(_remove_empty, path, above)  # keeps it if it has the marker
            os.mkdir(path, 0o700)
            new = found = stack.enter_context(_lock(path, out))
            leftovers = [left for left in _leftovers(out, os.fstat(new.fd)) if left != path]
        for left in leftovers:
            with translate_os_errors(left):
                directory = stack.enter_context(_lock(left, out))
                if (names := directory.names()) and not {MARK, WHOLE}.intersection(names):
                    raise StorageError(left, "was not made by ckpttool", MOVE)
                _recover(directory, out)
                if resume and names and found is new and _read(directory, MARK, len(mark) + 1) == mark.encode():
                    check_plain(directory)
                    found = directory
                else:
                    _remove(directory)
        if found is new:
            with translate_os_errors(path):
                _put(new, MARK, mark.encode())
        return Directory(found.path, os.dup(found.fd))  # with the lock


def _lock(path: str, out: str) -> Directory:
    """Open and lock a staging directory."""
    taken = StorageError(out, "another run is writing it", "wait for that run, or choose another OUT")
    try:
        directory = Directory.open(path)
    except FileNotFoundError as error:  # another run has just committed or removed it
        raise taken from error
    # A file system without locks cannot detect two runs at once.
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            directory.close()
            raise taken from error
    if not _is_at(path, directory.fd):
        directory.close()
        raise taken
    return directory


def _read(directory: Directory, name: str, nbytes: int) -> bytes:
    fd = directory.open_file(name, os.O_RDONLY)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


def _commit(
    directory: Directory,
    out: str,
    replaces: Callable[[str], bool],
    last: Sequence[str],
    mode: int,
    *,
    overwrite: bool | None,
) -> None:
    staging = directory.path
    if not _is_at(staging, directory.fd):
        raise StorageError(staging, "was renamed by another process while it was being written", "try again")
    if not os.path.lexists(out):
        for name in (JOURNAL, SHARED):
            with contextlib.suppress(FileNotFoundError):
                directory.remove(name)
        # A later run recognises the directory by this file if this run is killed before the rename.
        directory.rename(MARK, WHOLE)
        os.replace(staging, out)
        kept = os.fstat(directory.fd).st_mode & 0o7000
        os.fchmod(directory.fd, kept | 0o700 | (mode & ~umask()))
        try:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                directory.remove(WHOLE)
        except OSError as error:  # readers ignore it
            problem = f"cannot be removed: {storage_error(out, error).problem}"
            hint = f"{out} is complete: remove that file; if it is a copy, run cp again, which writes latest"
            raise StorageError(os.path.join(out, WHOLE), problem, hint) from error
        return
    # Readers take the last files as the sign of a complete OUT: weights after sidecar files, an index after weights.
    order = {name: i for i, name in enumerate(last)}
    new = [n for n in directory.names() if n not in OWN]
    new.sort(key=lambda name: (order.get(name, -1), replaces(name), name))
    with Directory.open(out) as target:
        if not overwrite and _names(target.names()):
            raise not_empty(out, overwrite=overwrite)
        old = [n for n in target.names() if replaces(n) or n in new or n == WHOLE]
        old.sort(key=lambda name: (name not in last, not replaces(name), name))  # removed in the opposite order
        for name in old:
            found = target.stat(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                raise StorageError(os.path.join(out, name), "is a directory", "move it out of the way")
        for name in old:
            if name in new and not replaces(name):
                _keep_other(directory, target, name)
        with directory.make(MOVES) as moves:
            for name in new:
                os.close(moves.create(name))
            _put(moves, MARK, json.dumps({"key": "", "files": [], "over": new}).encode())
            with directory.make(ASIDE) as aside:
                # There is a marker if the staging directory of a killed commit was removed by hand.
                older = [(target, aside, MARK)] if target.stat(MARK) is not None else []
                files = [(target, aside, n) for n in old] + [(directory, target, n) for n in new]
                for source, to, name in [*older, (moves, target, MARK), *files, (target, moves, MARK)]:
                    source.move(name, to)


def _keep_other(directory: Directory, target: Directory, name: str) -> None:
    """Copy a sidecar file of OUT to another name, if the file that replaces it differs: a user may have edited it."""
    held, new = (_read(place, name, MAX_KEPT_BYTES) for place in (target, directory))
    if held == new:
        return
    _put(target, kept_name(name, target.names()), held)


def kept_name(name: str, taken: Collection[str]) -> str:
    """Return the name under which a replaced sidecar file is kept: one that is not taken."""
    numbers = itertools.chain([""], map(str, itertools.count(2)))
    return next(kept for n in numbers if (kept := f"{name}{KEPT}{n}") not in taken)


def _recover(directory: Directory, out: str) -> None:
    """Move back the files that an interrupted commit moved. If it moved all of them, OUT is complete.

    Raises:
        StorageError: Files of OUT cannot be moved back.
        OSError: The directory cannot be changed.
    """
    if directory.stat(WHOLE) is not None:  # readers accept the directory without MARK: nothing may change before
        directory.rename(WHOLE, MARK)
    if moved := _moved(directory.path):
        try:
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
        except OSError as error:
            problem = "holds files of OUT that could be neither replaced nor restored"
            hint = "check the disk, then run the command again, which moves them back"
            raise StorageError(directory.path, problem, hint) from error
    for name in (ASIDE, MOVES):  # in this order: see ``_moved``
        with contextlib.suppress(FileNotFoundError):
            directory.remove(name)


def _moved(staging: str) -> set[str]:
    """Return the names that a killed commit has moved into OUT; empty if it had not begun, or had moved all files.

    The marker moves first, and back last. ASIDE is removed before MOVES, so that an incomplete MOVES is never used.
    """
    moves = os.path.join(staging, MOVES)
    if not os.path.isdir(moves) or not os.path.isdir(os.path.join(staging, ASIDE)):
        return set()
    names = set(os.listdir(moves))
    return set() if MARK in names else {MARK, *names} - set(os.listdir(staging)).difference(OWN)


def _existing(path: str) -> str:
    """Return the path, or else the nearest directory above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
