"""Define the protocols of storages, readers and writers, the names of ckpttool's files, and texts of system errors.

Paths are ``str``: ``pathlib.Path`` would turn ``s3://`` into ``s3:/``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckpttool.errors import CkptError, LayoutError, LinkError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Self

    from ckpttool.concurrency import Tally
    from ckpttool.ranges import ByteRange


PINNED = "pinned meanwhile"
"""Why a checkpoint is kept that was to be removed."""
MISSING = "does not exist"
"""Error message for a missing path."""
DENIED = ("permission denied", "access denied")
"""Starts of the problems of files that may not be read, on disk and in a bucket."""
WAIT = "wait until the save is over, then try again"
"""Hint where a file changed while it was being read."""


class PinnedError(StorageError):
    """A checkpoint is not removed, because it was pinned meanwhile."""

    def __init__(self, path: str) -> None:
        super().__init__(path, PINNED, "remove the pin first")


class ExistsError(StorageError):
    """A new file cannot be written because its path exists."""


def is_unread(error: CkptError) -> bool:
    """Return whether an error is about a file that may not be read, which says nothing about its content."""
    return isinstance(error, LinkError) or (isinstance(error, StorageError) and error.problem.startswith(DENIED))


@contextlib.contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Raise an OSError of the body as a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: str, error: OSError) -> StorageError:
    """Return the StorageError for an OSError."""
    if error.errno == errno.ENOENT:
        return StorageError(path, MISSING, "check the path")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return StorageError(path, DENIED[0], "check its permissions")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(path, "no space left on the device", "free some space or choose another place")
    if error.errno == errno.ENOTDIR:
        return StorageError(path, "is not a directory", "pass a checkpoint's directory")
    if error.errno == errno.EROFS:
        return StorageError(path, "is on a read-only file system", "choose another place")
    if error.errno in {errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY}:
        return StorageError(path, (error.strerror or "is in the way").lower(), "move it out of the way")
    if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
        return StorageError(path, (error.strerror or "cannot be found").lower(), "choose another path")
    if error.errno == errno.EFBIG:
        return StorageError(path, "is larger than a file may be here", "raise the limit or choose another place")
    return StorageError(path, (error.strerror or str(error)).lower(), "check the disk and try again")


MAX_TEXT_BYTES = 1 << 20
"""Most bytes of a small text file such as ``latest``."""

MARK = ".ckpttool-staging"
"""Name of the in-progress marker: readers refuse the directory, and a later run of ckpttool may remove its files."""
MANIFEST = "ckpttool.json"
"""Name of the manifest: the last file of a save, which makes the directory a commit."""
LATEST = "latest"
"""The file in a root that names the newest tag."""
LATEST_UNIVERSAL = "latest_universal"
"""The same for universal checkpoints; it is read if ``latest`` is missing."""
PIN = ".ckpttool-pin"
"""Name of the file that pins a checkpoint: no retention rule removes or thins it."""
THINNING = ".ckpttool-thinning"
"""Name of the marker in a whole checkpoint while ``prune`` replaces its files with only its weights."""
WHOLE = ".ckpttool-whole"
"""Name of the in-progress marker of a local output once all is written and compared, until the directory is renamed."""
SET_ASIDE = ".ckpttool-set-aside"
"""Name of the marker in a checkpoint that a save has renamed, until its new one is committed."""
DAMAGED = ".ckpttool-damaged"
"""Name of the marker in a checkpoint that a restore has skipped and a save has moved; it contains the problem."""
BESIDE = frozenset({MARK, PIN, THINNING, WHOLE, SET_ASIDE, DAMAGED})
"""Names of files in the directory of a checkpoint that are not part of it."""
MAX_DEPTH = 32
"""Most levels of nested directories: no checkpoint has more, but a link to a parent directory nests without end."""
NO_NAMES = frozenset({"", ".", ".."})
"""Components that a key of an object may have, but a path of a file may not."""
FOLLOW_LINKS = "follow_links"
"""Option of ckpttool, not of a storage: symbolic links of local checkpoints may leave the root."""


class Entry(NamedTuple):
    """One name in a directory."""

    name: str
    """The last component of the path."""
    is_dir: bool
    """True for a directory, or a link to one."""
    nbytes: int
    """Size of a file in bytes; 0 for a directory."""
    version: str = ""
    """Changes when the file is rewritten: modification time and inode on local disk, ETag or the like elsewhere."""
    modified: float | None = None
    """Modification time in seconds since 1970; None if the storage does not report one."""


class RangeReader(Protocol):
    """An open file with reads of byte ranges. Threads may share it.

    Classes that inherit from it read ranges one by one, and leave the file open, unless they override methods.
    """

    path: str
    """Path or URL of the file, as error messages show it."""
    nbytes: int
    """Size of the file in bytes when it was opened."""
    version: str
    """``Entry.version`` when the file was opened."""
    remote: bool
    """Whether each read costs a round trip, so that few large reads are faster than many small ones."""

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
        """

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; a remote storage may coalesce and overlap the requests."""
        return [self.read(where.start, where.end) for where in ranges]

    def close(self) -> None:
        """Release the file."""
        return


class Reader(RangeReader, Protocol):
    """An open file of a storage. Classes that inherit from it are closed at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The range cannot be read whole.
        """

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Prefetch ranges if one batch of requests is faster than separate reads."""
        return

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: The file was rewritten.
        """


class StorageSpec:
    """The description of a storage, as data. Layouts and plans contain it instead of the open storage.

    It pickles without connections; ``connect`` opens it again in another process. Compares by
    identity: two specs may open the same storage with other options.

    Args:
        opener: Function or class at the top of a module.
        arguments: Positional arguments of the opener; may contain credentials.
        remote: ``Storage.remote``.
    """

    __slots__ = ("__weakref__", "arguments", "opener", "remote")

    def __init__(self, opener: Callable[..., Storage], arguments: tuple[Any, ...], remote: bool) -> None:
        self.opener = opener
        self.arguments = arguments
        self.remote = remote

    def __repr__(self) -> str:
        return f"StorageSpec({getattr(self.opener, '__qualname__', self.opener)}, remote={self.remote})"


class Storage(Protocol):
    """A storage that files are read from. Classes that inherit from it cache no listings by default."""

    remote: bool
    """Whether each call costs a round trip, so that concurrent calls are faster."""
    reads_versions: bool
    """Whether a read fails if the file has changed since it was listed."""

    @property
    def spec(self) -> StorageSpec:
        """This storage as data."""

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name.

        Raises:
            StorageError: The directory does not exist or cannot be read.
        """

    def list_tree(self, path: str) -> None:
        """Prefetch the listings of a directory tree if one request can return them."""
        return

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory."""

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges.

        Args:
            path: The file.
            ahead: Whether a remote storage reads ahead at both ends of the file and caches the bytes; for reads of a
                file's structure.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
        """

    def read_text(self, path: str) -> str:
        """Return the content of a small text file.

        Raises:
            StorageError: The file cannot be read, is larger than 1 MiB or is not text.
        """
        with self.open(path) as reader:
            return decode_text(path, reader.read(0, check_text(path, reader.nbytes)))

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> Sequence[bytes | memoryview]:
        """Return the bytes [start, end) of each reader of this storage; remote reads run concurrently."""
        return [reader.read(start, end) for reader, start, end in wanted]

    def refresh(self, paths: Sequence[str]) -> None:
        """Drop cached listings; with ``paths``, a remote storage lists their directories again."""
        return


def walk(storage: Storage, path: str) -> Iterator[tuple[str, Entry]]:
    """Yield every file below a directory: its relative name and its entry.

    Raises:
        StorageError: A directory cannot be read.
    """
    storage.list_tree(path)
    stack = [""]
    seen: set[str] = set()
    while stack:
        prefix = stack.pop()
        if not storage.remote:  # a link may lead to a parent directory
            real = os.path.realpath(f"{path}/{prefix}")
            if real in seen:
                continue
            seen.add(real)
        for entry in storage.listing(f"{path}/{prefix}".rstrip("/")):
            if not entry.is_dir:
                yield prefix + entry.name, entry
            elif prefix.count("/") < MAX_DEPTH:
                stack.append(f"{prefix}{entry.name}/")


def check_text(path: str, nbytes: int) -> int:
    """Return the size of a small text file; refuse a large one.

    Raises:
        StorageError: The file is larger than 1 MiB.
    """
    if nbytes > MAX_TEXT_BYTES:
        raise StorageError(path, f"is {nbytes} bytes long, too large for a text file", "is it damaged?")
    return nbytes


def find_text(storage: Storage, path: str) -> str | None:
    """Return the content of a small text file; None if it does not exist.

    Raises:
        StorageError: The file cannot be read, is larger than 1 MiB or is not text.
    """
    try:
        return storage.read_text(path)
    except StorageError as error:
        if error.problem == MISSING:
            return None
        raise


def read_json(storage: Storage, path: str, what: str, hint: str, limit: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        storage: Storage of the file.
        path: The file.
        what: Its description, for errors.
        hint: The next step, for errors.
        limit: Most bytes of the file.

    Raises:
        StorageError: The file cannot be read.
        LayoutError: It is larger, or not a JSON object.
    """
    import json  # ``inspect`` does not need it

    with storage.open(path) as reader:
        if reader.nbytes > limit:
            raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large for {what}", hint)
        data = reader.read(0, reader.nbytes)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LayoutError(path, f"is not {what}", hint)
    return found


def decode_text(path: str, data: bytes) -> str:
    """Decode the content of a small text file.

    Raises:
        StorageError: The content is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(path, "is not text", "is it damaged? pass tag to choose a checkpoint", ("tag",)) from error


class PartWriter(Protocol):
    """Writes parts of one file in any process. Picklable."""

    def write(self, start: int, data: memoryview) -> Any:
        """Write the part that begins at byte ``start``; a repeated call has no further effect.

        Returns:
            A result for ``Writer.accept``.

        Raises:
            StorageError: The part cannot be written.
        """


class Writer(Protocol):
    """Writes one file in parts. Threads may share it. No reader sees the file before ``commit``.

    Classes that inherit from it take only parts of this process, in any order, unless they override methods.
    """

    path: str
    """Path or URL of the file."""
    part_bytes: int
    """Size of every part but the last, in bytes; a multiple of 64, so that no element spans two parts."""

    def open(self) -> None:
        """Prepare for the first part, in parallel with reading it.

        Raises:
            StorageError: The file cannot be created.
        """
        return

    def has(self, start: int, nbytes: int) -> bool:
        """Return whether an earlier process has written the part that begins at byte ``start``."""
        return False

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """

    def copy_from(self, source: Reader, start: int, nbytes: int, target: int) -> bool:
        """Copy bytes of a source without passing them on, if this writer can do that better than its caller.

        Args:
            source: The open source file.
            start: First byte in it.
            nbytes: Number of bytes.
            target: First byte in this file.

        Returns:
            Whether the bytes were copied.

        Raises:
            StorageError: Reading or writing failed.
        """
        return False

    def fail(self, error: BaseException) -> None:
        """Abort the file: wake threads that wait for an earlier part, and raise ``error`` in them."""
        return

    def part_writer(self) -> PartWriter:
        """Return an object that writes parts in other processes; from then on only they write parts.

        Raises:
            StorageError: Only one process can write this file.
        """
        raise StorageError(self.path, "can be written by only one process", "write it to S3, or to local disk")

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Record the result of ``PartWriter.write`` for a part.

        Raises:
            StorageError: The storage rejects the part.
        """
        return

    def commit(self) -> None:
        """Make the complete file visible to readers.

        Raises:
            ExistsError: ``new`` was requested, and the path exists.
            StorageError: The storage fails.
        """
        return

    def discard(self) -> None:
        """Remove all parts."""
        return


class WritableStorage(Storage, Protocol):
    """A storage that files are read from and written to. A call returns when its effect is durable.

    Classes that inherit from it rename no directories, and report no free bytes, unless they override methods.
    """

    parts_at_once: int
    """Number of parts of one file that are worth writing concurrently."""
    retries: Tally
    """Counts the repeated requests of this storage."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents.

        Raises:
            StorageError: The directory cannot be created.
        """

    def free_bytes(self, path: str) -> int | None:
        """Return the free bytes of the file system of a directory; None if the storage does not report them."""
        return None

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write or replace a small file atomically: readers see the old bytes or the new ones.

        Args:
            path: The file.
            *parts: Its bytes.
            mode: Its permissions before the umask, on storages with permissions.

        Raises:
            StorageError: The file cannot be written.
        """

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other process has written it meanwhile.

        Args:
            path: The file.
            *parts: Its bytes.
            over: ``Entry.version`` of the file to replace; None if the path must not exist.
            mode: As for ``put``.

        Returns:
            False if the path exists, or has another version than ``over``; nothing was written then.

        Raises:
            StorageError: The file cannot be written.
        """

    def writer(self, path: str, nbytes: int, *, new: bool = False, mode: int = 0o666) -> Writer:
        """Open a writer for a file of known size.

        Args:
            path: The file; its directory exists.
            nbytes: Its size in bytes.
            new: Whether ``Writer.commit`` must not replace a file.
            mode: As for ``put``.

        Raises:
            ExistsError: ``new`` is set, and the path exists.
            StorageError: The file cannot be created.
        """

    def sync(self, path: str) -> None:
        """Make the file names durable that ``Writer.commit`` has added to a directory.

        Raises:
            StorageError: The storage fails.
        """
        return

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Raises:
            StorageError: A file cannot be deleted.
        """

    def rename(self, path: str, to: str) -> bool:
        """Rename a directory atomically; return False if this storage cannot rename.

        Raises:
            StorageError: The rename failed.
        """
        return False

    def move_tree(self, path: str, to: str) -> None:
        """Rename a directory; without renames, copy its files within the storage, then delete the old ones.

        A killed move has deleted no file whose copy is not there.

        Args:
            path: The directory.
            to: Its new path, which does not exist.

        Raises:
            StorageError: A file cannot be moved.
        """

    def remove_tree(self, path: str, *, unless_pinned: bool = False) -> None:
        """Remove a directory and all files below it; after a crash readers refuse the remaining files.

        Args:
            path: The directory.
            unless_pinned: Look for a pin after readers refuse the directory, so that no later one is overlooked.

        Raises:
            PinnedError: It is pinned; nothing is removed.
            StorageError: A file cannot be removed.
        """

    def abandon(self, path: str) -> None:
        """Abort the multipart uploads that killed processes left below a directory."""
        return


class WrappedReader(Reader):
    """Forwards all methods that return no bytes. Subclasses add ``read``, ``read_many`` and ``read_into``.

    Args:
        reader: The wrapped reader.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        """The wrapped reader."""
        self.path = reader.path
        self.nbytes = reader.nbytes
        self.version = reader.version
        self.remote = reader.remote

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Prefetch ranges."""
        self.reader.read_ahead(ranges)

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: The file was rewritten.
        """
        self.reader.check_unchanged()

    def close(self) -> None:
        """Release the file."""
        self.reader.close()


class Described:
    """Base class of storages that have a spec."""

    remote: bool
    _spec: weakref.ref[StorageSpec] | None = None

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its positional arguments, both picklable."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        return self.describe()  # another process opens it again, without cached listings

    @property
    def spec(self) -> StorageSpec:
        """This storage as data. While the spec is in use, ``connect`` returns this storage."""
        with _LOCK:
            spec = None if self._spec is None else self._spec()
            if spec is None:
                opener, arguments = self.describe()
                spec = StorageSpec(opener, arguments, self.remote)
                # Weak, because the table below keeps the storage for as long as the spec lives.
                self._spec = weakref.ref(spec)
                _OPEN[spec] = self
            return spec


_LOCK = threading.RLock()
_OPEN: weakref.WeakKeyDictionary[StorageSpec, Any] = weakref.WeakKeyDictionary()
"""The open storage of each spec; dropped with the last layout or plan that names the spec."""


def connect(spec: StorageSpec) -> Storage:
    """Return the open storage of a spec; opened at the first call in a process.

    Raises:
        StorageError: The package of the storage is not installed.
    """
    with _LOCK:
        storage = _OPEN.get(spec)
        if storage is None:
            storage = _OPEN[spec] = spec.opener(*spec.arguments)
        return storage
