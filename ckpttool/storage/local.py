"""The local disk: files, links and directories, and the system calls that rename, copy, sync and remove them.

A directory is removed so that readers refuse the remaining files after a failure.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import stat as stat_module
import zlib
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.concurrency import Tally
from ckpttool.errors import CkptError, StorageError
from ckpttool.storage.base import (
    MARK,
    MISSING,
    PIN,
    WAIT,
    Described,
    Entry,
    ExistsError,
    PinnedError,
    check_text,
    decode_text,
    find_text,
    storage_error,
    translate_os_errors,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Reader, Storage, WritableStorage
    from ckpttool.storage.local_writer import LocalWriter


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


class CopySource(Protocol):
    """A source file of ``copy_range``."""

    path: str
    """Path, for errors."""
    nbytes: int
    """Its size in bytes when it was opened."""
    fd: int
    """File descriptor."""


def copy_range(source: CopySource, start: int, target_fd: int, target_start: int, nbytes: int, target: str) -> bool:
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


MAX_HOPS = 40
"""Most links in a chain of links, as in Linux: a longer chain is a loop."""
ATTEMPTS = 10
"""Maximum number of attempts to write a small file while other processes remove incomplete files."""


class LocalReader:
    """An open file on local disk, read with ``pread``.

    Args:
        path: The file.

    Raises:
        StorageError: The file is missing, not a regular file, or not readable.
    """

    remote = False

    def __init__(self, path: str) -> None:
        self.path = path
        with translate_os_errors(path):
            # Non-blocking: opening a named pipe would wait for a writer.
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            info = os.fstat(self.fd)
        if not stat_module.S_ISREG(info.st_mode):
            self.close()
            raise StorageError(path, "is not a regular file", "remove it or choose another path")
        self.nbytes = info.st_size
        self.version = _version(info)

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The file ends before ``end``, or the disk fails.
        """
        parts: list[bytes] = []
        position = start
        while position < end:
            try:  # not translate_os_errors: the largest checkpoints take a million calls
                data = os.pread(self.fd, end - position, position)
            except OSError as error:
                raise storage_error(self.path, error) from error
            if not data:
                raise self._shrunk(position)
            if len(data) == end - start:
                return data
            parts.append(data)
            position += len(data)
        return b"".join(parts)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The file ends too early, or the disk fails.
        """
        done = 0
        while done < len(buffer):
            try:  # as in ``read``
                got = os.preadv(self.fd, [buffer[done:] if done else buffer], start + done)
            except OSError as error:
                raise storage_error(self.path, error) from error
            if got == 0:
                raise self._shrunk(start + done)
            done += got

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        return [self.read(r.start, r.end) for r in ranges]

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Do nothing: local reads need no prefetch."""

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: Its size or modification time changed.
        """
        with translate_os_errors(self.path):
            info = os.fstat(self.fd)
        if (info.st_size, _version(info)) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Release the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _shrunk(self, position: int) -> StorageError:
        return StorageError(self.path, f"ended at byte {position} while it was being read", WAIT)


def _version(info: os.stat_result) -> str:
    return f"{info.st_mtime_ns}-{info.st_ino}"


class LocalStorage(Described):
    """The storage of local files."""

    remote = False
    reads_versions = False
    parts_at_once = 1
    retries = Tally()
    """Always 0: the kernel retries local operations."""

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its arguments."""
        return _local, ()

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name.

        Raises:
            StorageError: The directory does not exist or cannot be read.
        """
        entries = []
        with translate_os_errors(path), os.scandir(path) as names:
            for item in names:
                try:
                    is_dir, info = item.is_dir(), item.stat()
                except OSError as error:
                    # A link that leads nowhere, or to itself, has no size; ``open`` reports it.
                    if error.errno in {errno.ENOENT, errno.ELOOP}:
                        continue
                    raise
                nbytes = 0 if is_dir else info.st_size
                entries.append(Entry(item.name, is_dir, nbytes, _version(info), info.st_mtime))
        return sorted(entries, key=lambda e: e.name)

    def list_tree(self, path: str) -> None:
        """Do nothing: local listings need no prefetch."""

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory."""
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists, even as a dangling link."""
        return os.path.lexists(path)

    def open(self, path: str, *, ahead: bool = False) -> LocalReader:
        """Open a file for reading ranges.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
        """
        return LocalReader(path)

    def read_text(self, path: str) -> str:
        """Return the content of a small text file.

        Raises:
            StorageError: The file cannot be read, is larger than 1 MiB or is not text.
        """
        with self.open(path) as reader:
            return decode_text(path, reader.read(0, check_text(path, reader.nbytes)))

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> list[bytes]:
        """Return the bytes [start, end) of each reader."""
        return [reader.read(start, end) for reader, start, end in wanted]

    def refresh(self, paths: Sequence[str]) -> None:
        """Do nothing: local listings are not cached."""

    # ------------------------------------------------------------------------------------------- writing

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents.

        Raises:
            StorageError: The directory cannot be created.
        """
        with translate_os_errors(path):
            missing = []
            above = path
            while above and not os.path.isdir(above):
                missing.append(above)
                above = os.path.dirname(above)
            for one in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(one)
                sync_directory(os.path.dirname(one))

    def free_bytes(self, path: str) -> int | None:
        """Return the free bytes of the file system of a directory."""
        with translate_os_errors(path):
            info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write or replace a small file atomically. A link is replaced itself, not its target.

        Raises:
            StorageError: The file cannot be written.
        """
        self._put(path, parts, mode, new=False)

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other process has written it; see ``WritableStorage.put_new``.

        Raises:
            StorageError: The file cannot be written.
        """
        try:
            if over is not None and _version(os.stat(path)) != over:
                return False
            return self._put(path, parts, mode, new=over is None, over=over)
        except (ExistsError, FileNotFoundError):
            return False

    def _put(
        self, path: str, parts: Sequence[bytes | memoryview], mode: int, *, new: bool, over: str | None = None
    ) -> bool:
        for left in reversed(range(ATTEMPTS)):
            try:
                written = _put_once(path, parts, mode, new=new, over=over)
                break
            except StorageError as error:
                # A process that clears away leftovers may have removed the incomplete file.
                if error.problem != MISSING or not left or not os.path.isdir(os.path.dirname(path) or "."):
                    raise
        self.sync(os.path.dirname(path))
        return written

    def writer(self, path: str, nbytes: int, *, new: bool = False, mode: int = 0o666) -> LocalWriter:
        """Open a writer for a file of known size.

        Raises:
            StorageError: The file cannot be created.
        """
        from ckpttool.storage.local_writer import LocalWriter  # as in ``_put``

        return LocalWriter(path, nbytes, new=new, mode=mode, reserved=True)

    def sync(self, path: str) -> None:
        """Make the file names in a directory durable.

        Raises:
            StorageError: The disk fails.
        """
        with translate_os_errors(path):
            sync_directory(path)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Raises:
            StorageError: A file cannot be deleted.
        """
        for path in paths:
            with translate_os_errors(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                sync_directory(os.path.dirname(path))

    def rename(self, path: str, to: str) -> bool:
        """Rename a directory.

        Raises:
            StorageError: The rename failed.
        """
        with translate_os_errors(path):
            os.rename(path, to)
            sync_directory(os.path.dirname(path))
        return True

    def move_tree(self, path: str, to: str) -> None:
        """Rename a directory.

        Raises:
            StorageError: The rename failed.
        """
        self.rename(path, to)

    def remove_tree(self, path: str, *, unless_pinned: bool = False) -> None:
        """Remove a directory and all files below it.

        Raises:
            PinnedError: It is pinned.
            StorageError: A file cannot be removed.
        """
        remove_local(path.rstrip("/"), unless_pinned=unless_pinned)

    def abandon(self, path: str) -> None:
        """Do nothing: temporary files are in the directory itself."""


def _put_once(path: str, parts: Sequence[bytes | memoryview], mode: int, *, new: bool, over: str | None) -> bool:
    from ckpttool.storage.local_writer import LocalWriter  # most commands write nothing

    writer = LocalWriter(path, sum(map(len, parts)), new=new, mode=mode)
    try:
        writer.append(parts)
        if over is not None and _version(os.stat(path)) != over:
            writer.discard()
            return False
        writer.commit()
    except BaseException:
        writer.discard()
        raise
    return True


def is_link(storage: Storage, path: str) -> bool:
    """Return whether a path is a symbolic link; only local disks have links."""
    return not storage.remote and os.path.islink(path)


def dead_links(storage: Storage, path: str) -> list[str]:
    """Return the names of the links in a directory that lead nowhere, or to themselves; a listing omits them."""
    if storage.remote or not os.path.isdir(path):
        return []
    with os.scandir(path) as names:
        return sorted(one.name for one in names if one.is_symlink() and not os.path.exists(one.path))


def is_linked(storage: Storage, root: str, path: str) -> bool:
    """Return whether a component of a path below a root is a symbolic link.

    Args:
        storage: Storage of both; only local disks have links.
        root: A directory; the path to it may contain links.
        path: A path below it.
    """
    if storage.remote:
        return False
    below = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    return os.path.realpath(path) != os.path.normpath(os.path.join(os.path.realpath(root), below))


def links_below(root: str) -> list[tuple[str, str]]:
    """Return the symbolic links below a directory and their targets; empty for a URL.

    Returns:
        For each link its path relative to the directory, and the resolved path of its target. A link to another link
        has a pair for each of the two targets.
    """
    found = []
    for above, directories, names in os.walk(root):
        for name in sorted((*directories, *names)):
            hop = os.path.join(above, name)
            for _ in range(MAX_HOPS):
                if not os.path.islink(hop):
                    break
                hop = os.path.join(os.path.dirname(hop), os.readlink(hop))
                hop = os.path.join(os.path.realpath(os.path.dirname(hop)), os.path.basename(hop))
                hop = os.path.realpath(hop) if os.path.basename(hop) in {"", ".", ".."} else hop
                found.append((os.path.relpath(os.path.join(above, name), root), hop))
    return found


def link_into(links: Sequence[tuple[str, str]], root: str, path: str) -> str | None:
    """Return a link, relative to the root, that would dangle without a directory; None if there is not one.

    Args:
        links: ``links_below`` the root.
        root: A directory.
        path: The directory below it. Links inside it are removed with it.
    """
    real, base = os.path.realpath(path), os.path.realpath(root)
    for name, target in links:
        place = os.path.join(base, name)
        inside = f"{target}/".startswith(f"{real}/")
        above = f"{real}/".startswith(f"{target}/") and target.startswith(f"{base}/")  # for a tag "a/b", such as "a"
        if (inside or above) and not f"{place}/".startswith((f"{real}/", f"{target}/")):
            return name
    return None


def _local() -> LocalStorage:
    return LOCAL


LOCAL = LocalStorage()
LOCAL_SPEC = LOCAL.spec
