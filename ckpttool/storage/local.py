"""Read and write files on local disk.

Source: POSIX, rename() and fsync(), for the steps of a durable write: the bytes of a file are durable after fsync of
the file, its name after fsync of the directory.
"""

from __future__ import annotations

import contextlib
import os
import stat as stat_module
from typing import TYPE_CHECKING, Any

from ckpttool.errors import StorageError
from ckpttool.storage.base import Entry, check_text, decode_text
from ckpttool.storage.error_texts import MISSING, WAIT, ExistsError, storage_error, translate_os_errors
from ckpttool.storage.posix import sync_directory
from ckpttool.storage.removal import remove_local
from ckpttool.storage.retry import Tally
from ckpttool.storage.specs import Described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Reader, Storage
    from ckpttool.storage.local_writer import LocalWriter


MAX_HOPS = 40
"""Most links that a link leads through, as in Linux: more are a loop."""
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
            # Non-blocking: to open a named pipe would wait for a writer for ever.
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
                is_dir = item.is_dir()
                # A dangling link has no size; ``open`` reports it.
                with contextlib.suppress(FileNotFoundError):
                    info = item.stat()
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

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all files below it.

        Raises:
            StorageError: A file cannot be removed.
        """
        remove_local(path.rstrip("/"))

    def abandon(self, path: str) -> None:
        """Do nothing: temporary files lie in the directory itself."""


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
    """Return the symbolic links below a directory and what each leads to; none for a URL.

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
    """Return a link that would lead nowhere without a directory, relative to the root; None without one.

    Args:
        links: ``links_below`` the root.
        root: A directory.
        path: The directory below it. Links inside it go with it.
    """
    real, base = os.path.realpath(path), os.path.realpath(root)
    for name, target in links:
        place = os.path.join(base, name)
        inside = f"{target}/".startswith(f"{real}/")
        above = f"{real}/".startswith(f"{target}/") and target.startswith(f"{base}/")  # such as of a tag "a/b" the "a"
        if (inside or above) and not f"{place}/".startswith((f"{real}/", f"{target}/")):
            return name
    return None


def _local() -> LocalStorage:
    return LOCAL


LOCAL = LocalStorage()
LOCAL_SPEC = LOCAL.spec
