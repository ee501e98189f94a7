"""Create, open and remove files in a directory of this user, beside directories that other users can write to.

Every lookup is relative to the descriptor of the open directory: another user may rename it, or put a link in its
place, and the files are not affected.

Source: Linux, open(2): ``O_NOFOLLOW``, ``O_EXCL``, ``openat``; Linux, proc(5): ``fs.protected_symlinks``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass

from ckpttool.errors import StorageError
from ckpttool.storage.removal import proof_of_name
from ckpttool.storage.system_calls import CREATE

MOVE = "move it out of the way, or choose another OUT"
"""Hint for an existing file that blocks the output."""
MAX_NAME_BYTES = 255
PARTIAL = ".partial"
"""Suffix of the temporary name of an incomplete file."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IS_LINK = {errno.ELOOP, errno.EMLINK}
"""Errors of opening a link with ``O_NOFOLLOW``."""
_IS_DIRECTORY = {errno.EISDIR, errno.EPERM}
"""Errors of ``unlink`` on a directory."""


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory."""

    path: str
    """Path, as error messages show it."""
    fd: int
    """Its descriptor."""

    @classmethod
    def open(cls, path: str) -> Directory:
        """Open a directory; the last component of its path must not be a link.

        Raises:
            OSError: The directory cannot be opened, or is a link.
        """
        return cls(path, os.open(path, _DIRECTORY))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self, name: str) -> Directory:
        """Create and open a new directory in this one, which only this user may enter.

        Raises:
            OSError: The name exists, or the directory cannot be created.
        """
        os.mkdir(name, 0o700, dir_fd=self.fd)
        return self.enter(name)

    def enter(self, name: str) -> Directory:
        """Open a directory in this one.

        Raises:
            OSError: The directory cannot be opened, or is a link.
        """
        return Directory(os.path.join(self.path, name), os.open(name, _DIRECTORY, dir_fd=self.fd))

    def names(self) -> list[str]:
        """Return all names in the directory."""
        return os.listdir(self.fd)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the stat of a name without following links; None if the name does not exist."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return None

    def create(self, name: str, mode: int = 0o666) -> int:
        """Create a file and its missing parent directories; return its descriptor for reading and writing.

        Args:
            name: Relative path, with "/" between directories.
            mode: Permissions before the umask.

        Raises:
            FileExistsError: The name exists.
            OSError: The file cannot be created.
        """
        with contextlib.suppress(FileNotFoundError):  # most directories exist
            return os.open(name, CREATE, mode, dir_fd=self.fd)
        for at, character in enumerate(name):
            if character == "/":
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name[:at], 0o777, dir_fd=self.fd)
        return os.open(name, CREATE, mode, dir_fd=self.fd)

    def open_file(self, name: str, flags: int) -> int:
        """Open an existing regular file; return its descriptor.

        Raises:
            StorageError: The name is a link, or not a regular file.
            OSError: The file cannot be opened.
        """
        path = os.path.join(self.path, name)
        try:
            opened = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _IS_LINK:
                raise StorageError(path, "is a link", MOVE) from error
            raise
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise StorageError(path, "is not a regular file", MOVE)
        return opened

    def remove(self, name: str) -> None:
        """Remove a file, a link, or a directory tree.

        Raises:
            OSError: The name cannot be removed.
        """
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in _IS_DIRECTORY:
                raise
        else:
            return
        with self.enter(name) as directory:
            for inner in directory.names():
                directory.remove(inner)
        os.rmdir(name, dir_fd=self.fd)

    def move(self, name: str, to: Directory) -> None:
        """Move a file into another directory under the same name; replace a file there.

        Raises:
            OSError: The file cannot be moved.
        """
        os.replace(name, name, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def rename(self, name: str, to: str) -> None:
        """Rename a file in the directory; replace a file of the new name.

        Raises:
            OSError: The file cannot be renamed.
        """
        os.replace(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)


def check_plain(directory: Directory) -> None:
    """Refuse a directory tree with entries other than regular files and directories of one owner.

    Raises:
        StorageError: The tree has a link, a device, a pipe, a file with a second name, or an entry of another user.
        OSError: The tree cannot be read.
    """
    owner = os.fstat(directory.fd).st_uid
    for above, directories, files, fd in os.fwalk(".", dir_fd=directory.fd):
        for name in [*directories, *files]:
            path = os.path.normpath(os.path.join(directory.path, above, name))
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if info.st_uid != owner:
                raise StorageError(path, f"belongs to another user (number {info.st_uid})", MOVE)
            if stat.S_ISDIR(info.st_mode):
                continue
            if not stat.S_ISREG(info.st_mode):
                what = "a link" if stat.S_ISLNK(info.st_mode) else "not a regular file"
                raise StorageError(path, f"is {what}", MOVE)
            if info.st_nlink != 1:
                raise StorageError(path, "has a second name (a hard link)", MOVE)


def check_link(path: str) -> None:
    """Refuse an output path that is a link of another user.

    The kernel refuses to follow such links in directories like ``/tmp``, but ``realpath`` follows them.

    Raises:
        StorageError: The path is a link whose owner is not this user, root or the owner of the directory.
    """
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            owners = {os.geteuid(), 0, os.stat(os.path.dirname(path) or ".").st_uid}
            if info.st_uid not in owners:
                raise StorageError(path, f"is a link of another user (number {info.st_uid})", "choose another OUT")
    except OSError:
        return  # a later use of the path reports the error


def temporary_name(name: str) -> str:
    """Return an unguessable name for a file that is not complete yet.

    Args:
        name: Final name of the file.
    """
    ending = f".{os.urandom(4).hex()}"
    begin = os.fsdecode(os.fsencode(name)[: MAX_NAME_BYTES - len(ending) - 17 - len(PARTIAL)]) + ending
    return f"{begin}.{proof_of_name('written', begin)}{PARTIAL}"


def is_temporary(name: str) -> bool:
    """Return whether a name is one of ``temporary_name``, and not a user's name with the same suffix."""
    begin, _, proof = name.removesuffix(PARTIAL).rpartition(".")
    return name.endswith(PARTIAL) and proof == proof_of_name("written", begin)


def umask() -> int:
    """Return the umask of this process."""
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
    """Return the permissions of a file or directory on local disk; follows links.

    Raises:
        OSError: The path does not exist.
    """
    return os.stat(path).st_mode & 0o777
