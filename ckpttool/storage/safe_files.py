"""Creates, opens and removes files where other users may write too.

Every name is looked up relative to the descriptor of an open directory, one component at a time, and never through a
symbolic link: what was planted under a name is refused, whatever it leads to.

Source: Linux, open(2): ``O_NOFOLLOW``, ``O_EXCL``, ``openat``; Linux, proc(5): ``fs.protected_symlinks``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import StorageError
from ckpttool.storage.error_texts import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

MOVE = "move it out of the way, or choose another OUT"
"""What to do about something in the way."""
MAX_NAME_BYTES = 255
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_IS_LINK = {errno.ELOOP, errno.EMLINK}
"""What opening a link with ``O_NOFOLLOW`` answers."""
_IS_DIRECTORY = {errno.EISDIR, errno.EPERM}
"""What removing a directory as a file answers."""


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory."""

    path: str
    """What errors call it."""
    fd: int
    """Its descriptor."""

    @classmethod
    def open(cls, path: str) -> Directory:
        """Open a directory; its last component may be no link.

        Raises:
            StorageError: It is a link.
            OSError: It cannot be opened.
        """
        return cls(path, _open_directory(path, path))

    def close(self) -> None:
        """Release it."""
        os.close(self.fd)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self, name: str, mode: int = 0o777) -> Directory:
        """Make a directory in it, which must not be there, and open it.

        Raises:
            OSError: It cannot be made.
        """
        os.mkdir(name, mode, dir_fd=self.fd)
        path = os.path.join(self.path, name)
        return Directory(path, _open_directory(name, path, self.fd))

    def names(self) -> list[str]:
        """All names in it."""
        return os.listdir(self.fd)

    def stat(self, name: str) -> os.stat_result | None:
        """What a name is, a link as such; None if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._holding(name) as (fd, last):
            return os.stat(last, dir_fd=fd, follow_symlinks=False)
        return None

    def create(self, name: str, mode: int = 0o666) -> int:
        """Create a file, and the directories above it; returns its descriptor for reading and writing.

        Args:
            name: Relative, with "/" between directories.
            mode: Permissions, before the umask.

        Raises:
            FileExistsError: Something has that name.
            OSError: It cannot be created.
        """
        with self._holding(name, make=True) as (fd, last):
            return os.open(last, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=fd)

    def open_file(self, name: str, flags: int) -> int:
        """Open a file that is there.

        Raises:
            StorageError: It is a link, or no regular file.
            OSError: It cannot be opened.
        """
        with self._holding(name) as (fd, last):
            path = os.path.join(self.path, name)
            try:
                opened = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
            except OSError as error:
                if error.errno in _IS_LINK:
                    raise StorageError(path, "is a link", MOVE) from error
                raise
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise StorageError(path, "is not a regular file", MOVE)
        return opened

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a directory and all in it.

        Raises:
            OSError: It cannot be removed.
        """
        with self._holding(name) as (fd, last):
            _remove(fd, last, os.path.join(self.path, name))

    @contextlib.contextmanager
    def _holding(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The directory that directly holds a name, and the name's last component."""
        *above, last = name.split("/")
        fd, path = self.fd, self.path
        try:
            for part in above:
                path = os.path.join(path, part)
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o777, dir_fd=fd)
                inner = _open_directory(part, path, fd)
                if fd != self.fd:
                    os.close(fd)
                fd = inner
            yield fd, last
        finally:
            if fd != self.fd:
                os.close(fd)


def _open_directory(name: str, path: str, at: int | None = None) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=at)
    except OSError as error:
        # A link to a directory answers ENOTDIR, for O_DIRECTORY is looked at first.
        linked = error.errno in _IS_LINK
        with contextlib.suppress(OSError):
            linked = linked or stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
        if linked:
            raise StorageError(path, "is a link", MOVE) from error
        raise


def _remove(at: int, name: str, path: str) -> None:
    try:
        os.unlink(name, dir_fd=at)
    except OSError as error:
        if error.errno not in _IS_DIRECTORY:
            raise
    else:
        return
    fd = _open_directory(name, path, at)
    try:
        for inner in os.listdir(fd):
            _remove(fd, inner, os.path.join(path, inner))
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=at)


def check_own(directory: Directory) -> None:
    """Refuse a directory into which another user may have put something.

    Raises:
        StorageError: It belongs to another user, or others may write into it.
        OSError: It cannot be looked at.
    """
    info = os.fstat(directory.fd)
    if info.st_uid == os.geteuid() and not info.st_mode & _OTHERS_WRITE:
        return
    # File systems without owners or modes (CIFS, a squashed NFS) give all files the same: a new file tells.
    made = _made_in(directory)
    if info.st_uid not in {os.geteuid(), made.st_uid}:
        raise StorageError(directory.path, f"belongs to another user (number {info.st_uid})", MOVE)
    if info.st_mode & _OTHERS_WRITE & ~made.st_mode:
        raise StorageError(directory.path, "can be written by other users, who may have put files into it", MOVE)


def _made_in(directory: Directory) -> os.stat_result:
    """What a file that this process creates in a directory looks like."""
    name = f".{secrets.token_hex(8)}.ckpttool"
    fd = directory.create(name, 0o600)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        directory.remove(name)


def check_plain(directory: Directory) -> None:
    """Refuse a directory in which anything is but files and directories of one owner.

    Raises:
        StorageError: There is a link, a device, a pipe, a file with a second name, or something of another user.
        OSError: It cannot be looked at.
    """
    _check_plain(directory.fd, directory.path, os.fstat(directory.fd).st_uid)


def _check_plain(fd: int, path: str, owner: int) -> None:
    for name in os.listdir(fd):
        inner = os.path.join(path, name)
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if info.st_uid != owner:
            raise StorageError(inner, f"belongs to another user (number {info.st_uid})", MOVE)
        if stat.S_ISDIR(info.st_mode):
            below = _open_directory(name, inner, fd)
            try:
                _check_plain(below, inner, owner)
            finally:
                os.close(below)
        elif not stat.S_ISREG(info.st_mode):
            what = "a link" if stat.S_ISLNK(info.st_mode) else "no regular file"
            raise StorageError(inner, f"is {what}", MOVE)
        elif info.st_nlink != 1:
            raise StorageError(inner, "has a second name (a hard link)", MOVE)


def check_link(path: str) -> None:
    """Refuse a link that another user has put where this one writes.

    The kernel refuses to follow such links in directories like ``/tmp``, but does not see what ``realpath`` does.

    Raises:
        StorageError: It is a link of somebody else than this user, root or the directory's owner.
    """
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            owners = {os.geteuid(), 0, os.stat(os.path.dirname(path) or ".").st_uid}
            if info.st_uid not in owners:
                raise StorageError(path, f"is a link of another user (number {info.st_uid})", "choose another OUT")
    except OSError:
        return  # what is wrong is found when it is used


@contextlib.contextmanager
def opened(directory: Directory | str) -> Iterator[Directory]:
    """A directory by its path, open for as long as the body runs; one that is open stays so."""
    if isinstance(directory, Directory):
        yield directory
        return
    with translate_os_errors(directory):
        found = Directory.open(directory)
    with found:
        yield found


def temporary_name(name: str, suffix: str) -> str:
    """A name that nobody can guess, for a file that is going to get another.

    Args:
        name: What it is going to be called.
        suffix: What the temporary name ends with.
    """
    ending = f".{secrets.token_hex(4)}{suffix}"
    return os.fsdecode(os.fsencode(name)[: MAX_NAME_BYTES - len(ending)]) + ending


def umask() -> int:
    """The permissions that this process gives to nobody."""
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


def permissions(path: str) -> int:
    """The permissions of a file or directory on local disk, or those of what a link leads to.

    Raises:
        OSError: It is not there.
    """
    return os.stat(path).st_mode & 0o777
