"""An output directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.checksums import crc32
from ckpttool.concurrency import in_threads
from ckpttool.errors import StorageError
from ckpttool.storage import MARK, translate_os_errors, write_at
from ckpttool.storage.safe_files import MOVE, Directory, check_link, check_own, check_plain, umask

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
READ_BYTES = 1 << 20
"""Bytes that are read at a time where they are hashed: they are still in the core's cache then."""
_ENTRY = re.compile(r"[0-9a-f]{8} \d{1,20} [^\n]+\n")
"""A line of the journal: CRC-32, bytes, name."""
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
    check_link(out)
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
        trees = [] if os.path.islink(staging) else os.walk(staging)
        held = (os.path.join(place, name) for place, _, names in trees for name in names)
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
    out: str, *, replaces: Callable[[str], bool], last: Sequence[str] = (), key: str = "", resume: bool = False,
    mode: int = 0o777, parent_mode: int = 0o777,
) -> Iterator[Directory]:  # fmt: skip
    """Yield a directory to write into; move it to ``out`` if the body succeeds, remove it if not.

    A new OUT appears by one rename. Into an OUT that is there, files are moved one by one, those that ``replaces``
    names after the others and ``last`` (an index, say) at the very end, so that no reader takes a mixture for a whole;
    if that fails, what was there is put back.

    Until then nobody but this user may enter the directory: no other can put a link or a file into it.

    Nothing is synced to disk, as ``cp`` does not: this is for outputs that can be made again after a power cut.

    Args:
        out: The directory that is to appear.
        replaces: Whether a file name in an existing OUT belongs to what is being replaced.
        last: Names of files to move last, in this order.
        key: What is going to be written: what a run with the same key has left can be gone on with.
        resume: Go on from it, and leave what there is if the body fails.
        mode: Permissions of a new OUT, before the umask.
        parent_mode: Those of the directory that OUT lies in, if it is made.

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
        directory = _enter(staging, key if resume else None)
    except BaseException:
        _remove_empty(os.path.dirname(out), existing)
        raise
    keep = False
    try:
        with translate_os_errors(staging):
            _write_mark(directory, key)
        try:
            yield directory
        except BaseException:
            keep = resume
            raise
        with translate_os_errors(out):
            _commit(directory, out, replaces, last, mode)
    except _NotPutBackError:
        keep = True
        raise
    finally:
        # Once it was moved, another run may have made a directory of that name.
        if not keep and _is_at(staging, directory.fd):
            _remove_staging(directory)
            _remove_empty(os.path.dirname(out), existing)
        directory.close()


def _write_mark(directory: Directory, key: str) -> None:
    fd = directory.open_file(MARK, os.O_WRONLY)
    try:
        os.ftruncate(fd, 0)
        write_at(fd, key.encode(), 0, os.path.join(directory.path, MARK))
    finally:
        os.close(fd)


def _remove_staging(directory: Directory) -> None:
    """Remove what was staged, as far as that can be done."""
    with contextlib.suppress(OSError):
        for name in directory.names():
            with contextlib.suppress(OSError, StorageError):
                directory.remove(name)
    with contextlib.suppress(OSError):
        os.rmdir(directory.path)


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
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _enter(staging: str, key: str | None) -> Directory:
    """Make the staging directory, empty (but for what ``key`` left) and ours alone, and lock it.

    What a killed run has left is cleared away. A directory without the mark of this tool is somebody else's: it is left
    as it is. So is one that another user can have put something into.
    """
    for _ in range(ATTEMPTS):
        with translate_os_errors(staging):
            made = _make(staging)
        try:
            with translate_os_errors(staging):
                directory = _lock(staging)
        except BaseException:
            if made:
                _discard(staging)
            raise
        # Between opening and locking, the run that held it may have moved it away.
        if _is_at(staging, directory.fd):
            break
        directory.close()
    else:
        raise StorageError(staging, "other runs keep writing it", "wait for them, or choose another OUT")
    try:
        with translate_os_errors(staging):
            check_own(directory)
            _claim(directory, key, made=made)
    except BaseException:
        if made:
            _discard(staging)
        directory.close()
        raise
    return directory


def _discard(staging: str) -> None:
    """Remove what was made just now."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(staging, MARK))
    with contextlib.suppress(OSError):
        os.rmdir(staging)


def _make(staging: str) -> bool:
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
        pass  # a file system without locks: two runs at once are then the user's affair
    return directory


def _claim(directory: Directory, key: str | None, *, made: bool) -> None:
    held = directory.names()
    mark = directory.stat(MARK)
    if held and not made and mark is None:
        raise StorageError(directory.path, "was not made by ckpttool", MOVE)
    if mark is not None and not stat.S_ISREG(mark.st_mode):
        raise StorageError(os.path.join(directory.path, MARK), "is not a regular file", MOVE)
    os.fchmod(directory.fd, 0o700)  # of a release that made it with the permissions of OUT
    if mark is not None and key is not None and _read(directory, MARK, len(key) + 1) == key.encode():
        check_plain(directory)
        return
    for name in held:
        if name != MARK:
            directory.remove(name)
    if mark is not None:
        directory.remove(MARK)
    os.close(directory.create(MARK))


def _read(directory: Directory, name: str, nbytes: int) -> bytes:
    fd = directory.open_file(name, os.O_RDONLY)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


def _commit(directory: Directory, out: str, replaces: Callable[[str], bool], last: Sequence[str], mode: int) -> None:
    staging = directory.path
    if not _is_at(staging, directory.fd):
        raise StorageError(staging, "was moved away while it was being written", "see who did, and try again")
    if not os.path.lexists(out):
        for name in (JOURNAL, SHARED, MARK):
            with contextlib.suppress(FileNotFoundError):
                directory.remove(name)
        os.replace(staging, out)
        kept = os.fstat(directory.fd).st_mode & 0o7000
        os.fchmod(directory.fd, kept | 0o700 | (mode & ~umask()))
        return
    # What makes the output look whole comes last: weights after their companions, an index after the weights.
    order = {name: i for i, name in enumerate(last)}
    new = [n for n in directory.names() if n not in {MARK, JOURNAL, SHARED}]
    new.sort(key=lambda name: (order.get(name, -1), replaces(name), name))
    with Directory.open(out) as target:
        old = [n for n in target.names() if (replaces(n) or n in new) and n != SUFFIX]
        old.sort(key=lambda name: (name not in last, not replaces(name), name))  # and it goes first
        for name in old:
            found = target.stat(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                raise StorageError(os.path.join(out, name), "is a directory", "move it out of the way")
        with directory.make(ASIDE, 0o700) as aside:
            _move(directory, [(target, aside, n) for n in old] + [(directory, target, n) for n in new])


def _move(directory: Directory, moves: Sequence[tuple[Directory, Directory, str]]) -> None:
    """Move names from one directory to another, all or none."""
    done: list[tuple[Directory, Directory, str]] = []
    try:
        for source, target, name in moves:
            done.append((source, target, name))
            os.replace(name, name, src_dir_fd=source.fd, dst_dir_fd=target.fd)
    except BaseException:
        _put_back(directory, done)
        raise


def _put_back(directory: Directory, done: Sequence[tuple[Directory, Directory, str]]) -> None:
    try:
        for source, target, name in reversed(done):
            with contextlib.suppress(FileNotFoundError):  # the move that failed
                os.replace(name, name, src_dir_fd=target.fd, dst_dir_fd=source.fd)
    except OSError as error:
        # Without the mark no later run clears it away.
        with contextlib.suppress(OSError):
            directory.remove(MARK)
        problem = "holds files of OUT that could be neither replaced nor put back"
        raise _NotPutBackError(directory.path, problem, f"move those in {ASIDE} back to OUT by hand") from error


class Journal:
    """The files of a staging directory that are complete, each with its CRC-32.

    Args:
        directory: The directory.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._left = bool({*self._directory.names()} - {MARK})
        self._path = os.path.join(self._directory.path, JOURNAL)
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, int]] = {}
        self._sound: dict[str, bool] = {}
        for line in self._lines():
            crc, nbytes, name = line.split(" ", 2)
            self._done[name] = int(crc, 16), int(nbytes)

    def _lines(self) -> list[str]:
        try:
            fd = self._directory.open_file(JOURNAL, os.O_RDONLY)
        except FileNotFoundError:
            return []
        with open(fd, encoding="utf-8", errors="replace") as file:
            # A line without its end was being written when its run was killed.
            return [line[:-1] for line in file if _ENTRY.fullmatch(line)]

    def check(self, files: Sequence[tuple[str, int]], jobs: int) -> None:
        """Compare files that a run before this one has completed with their checksums, several at once.

        Args:
            files: Name and size in bytes of each file that is going to be written.
            jobs: Threads.

        Raises:
            StorageError: One cannot be read.
        """
        with contextlib.closing(in_threads((partial(self._check, *file) for file in files), jobs)) as results:
            self._sound.update(results)

    def _check(self, name: str, nbytes: int) -> tuple[str, bool]:
        found = self._directory.stat(name)
        if found is None or found.st_size != nbytes or self._done.get(name, (0, -1))[1] != nbytes:
            return name, False
        with translate_os_errors(os.path.join(self._directory.path, name)):
            return name, self._crc32(name, nbytes) == self._done[name][0]

    def has(self, name: str, nbytes: int) -> bool:
        """Whether a file is complete and as it was written; what is there of one that is not is removed."""
        if not self._left:
            return False
        sound = self._sound.pop(name, None)
        if self._check(name, nbytes)[1] if sound is None else sound:
            return True
        with translate_os_errors(os.path.join(self._directory.path, name)), contextlib.suppress(FileNotFoundError):
            self._directory.remove(name)
        return False

    def forget(self) -> None:
        """Take no file for complete any more."""
        with translate_os_errors(self._path), contextlib.suppress(FileNotFoundError):
            self._directory.remove(JOURNAL)

    def add(self, name: str, nbytes: int) -> None:
        """Note that a file is complete; it is read back for its checksum, for the kernel may have copied it."""
        with translate_os_errors(self._path):
            line = f"{self._crc32(name, nbytes):08x} {nbytes} {name}\n".encode()
            with self._lock:
                try:
                    fd = self._directory.open_file(JOURNAL, os.O_WRONLY | os.O_APPEND)
                except FileNotFoundError:
                    fd = self._directory.create(JOURNAL, 0o600)
                try:
                    os.write(fd, line)
                finally:
                    os.close(fd)

    def _crc32(self, name: str, nbytes: int) -> int:
        fd = self._directory.open_file(name, os.O_RDONLY)
        try:
            crc = at = 0
            while data := os.pread(fd, min(READ_BYTES, nbytes - at), at):
                crc, at = crc32(data, crc), at + len(data)
            return crc
        finally:
            os.close(fd)


def _existing_parent(out: str) -> str:
    parent = os.path.dirname(os.path.realpath(out))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent
