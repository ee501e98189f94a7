"""Read and write files of any fsspec storage.

Round trips cost more than bytes: the storage caches listings, takes size and version of every file from them, and
requests several ranges concurrently.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import posixpath
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ckpttool.concurrency import Tally
from ckpttool.errors import CkptError, StorageError
from ckpttool.ranges import coalesced
from ckpttool.storage.base import (
    MISSING,
    NO_NAMES,
    WAIT,
    Described,
    Entry,
    ExistsError,
    Reader,
    WritableStorage,
    Writer,
    walk,
)
from ckpttool.storage.removal import remove_remote
from ckpttool.storage.retry import P, ShortReadError, T, call, explain
from ckpttool.storage.urls import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Storage


def tree_of(root: str, infos: Iterable[Mapping[str, Any]]) -> dict[str, list[Entry]]:
    """Build the entries of all directories of a tree from a listing of its files.

    Args:
        root: Key of the directory.
        infos: fsspec's infos of all files below it.
    """
    listed: dict[str, dict[tuple[str, bool], Entry]] = {root: {}}
    for info in infos:
        directory, name = _split(root, str(info["name"]))
        if name_of(info) == root or _is_marker(info):
            continue
        listed.setdefault(directory, {})[name, False] = entry_of(info)._replace(name=name)
        while directory != root and len(directory) > len(root):
            above, base = posixpath.split(directory)
            listed.setdefault(above, {}).setdefault((base, True), Entry(base, is_dir=True, nbytes=0))
            directory = above
    return {directory: in_order(entries.values()) for directory, entries in listed.items()}


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries by name; a directory comes before an object of the same name."""
    return sorted(entries, key=lambda e: (e.name, not e.is_dir))


def _split(root: str, key: str) -> tuple[str, str]:
    """Split the key of a file below a root into its directory and its name."""
    if key.startswith(f"{root}/"):
        parts = key[len(root) + 1 :].split("/")
        for number, part in enumerate(parts):
            if part in NO_NAMES:
                return "/".join([root, *parts[:number]]), "/".join(parts[number:])
    return posixpath.split(key)


def name_of(info: Mapping[str, Any]) -> str:
    """Return the key of a file or directory without a trailing slash."""
    return str(info["name"]).rstrip("/")


def _is_marker(info: Mapping[str, Any]) -> bool:
    """Return whether an info is an empty object that stands for a directory; web consoles create them."""
    return str(info["name"]).endswith("/") and info["type"] != "directory" and not info["size"]


def entry_of(info: Mapping[str, Any]) -> Entry:
    """Convert fsspec's info of a file or directory to an entry."""
    is_dir = info["type"] == "directory"
    keys = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "mtime", "modified", "created")
    known = next((info[k] for k in keys if info.get(k)), "")
    # Some file systems give a time as a datetime for a file, and as a number in a listing.
    version = str(known.timestamp() if isinstance(known, datetime) else known)
    times = (info.get(k) for k in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"))
    modified = next((_seconds(t) for t in times if t), None)
    return Entry(
        posixpath.basename(name_of(info)), is_dir, 0 if is_dir else int(info["size"] or 0), version.strip('"'), modified
    )


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    return value.timestamp() if isinstance(value, datetime) else None


AHEAD_BYTES = 1 << 16
"""Bytes to read ahead at either end of a file; the directory of a torch archive with hundreds of records fits."""


class RemoteReader(Reader):
    """An open remote file. Threads may share it.

    Args:
        storage: Storage of the file.
        path: URL of the file.
        entry: Its entry in the listing of its directory.
        ahead: Whether to read ahead at both ends of the file and cache the bytes.
    """

    remote = True

    def __init__(self, storage: RemoteStorage, path: str, entry: Entry, *, ahead: bool) -> None:
        self.storage = storage
        self.path = path
        self.nbytes = entry.nbytes
        self.version = entry.version
        self._ahead = ahead
        self._cache: list[tuple[int, bytes]] = []

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The file ends before ``end``, was rewritten, or the store keeps failing.
        """
        return bytes(self.fetch(start, end))

    def fetch(self, start: int, end: int) -> bytes | memoryview:
        """Like ``read``, but may return the buffer of the response: a copy would take longer than all other steps."""
        if start >= end:
            return b""
        if end > self.nbytes:
            raise StorageError(self.path, f"ended at byte {self.nbytes} while it was being read", WAIT)
        if (cached := self._cached(start, end)) is not None:
            return cached
        first, last = self._widened(start, end) if self._ahead else (start, end)
        data = self.storage.call(self.path, self._get, first, last)
        if self._ahead:
            self._store(first, bytes(data))
        return data[start - first : end - first] if (first, last) != (start, end) else data

    def _cached(self, start: int, end: int) -> bytes | None:
        for at, data in self._cache[max(0, bisect.bisect_right(self._cache, start, key=itemgetter(0)) - 2) :]:
            if at > start:
                break
            if end <= at + len(data):
                return data[start - at : end - at]
        return None

    def _store(self, start: int, data: bytes) -> None:
        bisect.insort(self._cache, (start, data), key=itemgetter(0))

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Read ranges concurrently, and cache the bytes until the file is closed."""
        wanted = coalesced(ranges, gap=AHEAD_BYTES)
        for where, data in zip(wanted, self.read_many(wanted), strict=True):
            self._store(where.start, data)

    def _widened(self, start: int, end: int) -> tuple[int, int]:
        if self.nbytes <= 2 * AHEAD_BYTES:
            return 0, self.nbytes
        if end <= AHEAD_BYTES:
            return 0, AHEAD_BYTES
        if start >= self.nbytes - AHEAD_BYTES:
            return self.nbytes - AHEAD_BYTES, self.nbytes
        return start, end

    def _get(self, start: int, end: int) -> bytes | memoryview:
        data = self.storage.get(self.path, start, end, self.version)
        if len(data) != end - start:
            raise ShortReadError(f"{len(data):,} bytes instead of {end - start:,}")
        return data

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; the requests run concurrently."""
        return [bytes(data) for data in self.storage.read_all([(self, r.start, r.end) for r in ranges])]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The file is too short, was rewritten, or the store keeps failing.
        """
        buffer[:] = self.fetch(start, start + len(buffer))

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: Its size or version in the listing changed.
        """
        entry = self.storage.entry(self.path)
        if (entry.nbytes, entry.version) != (self.nbytes, self.version):
            raise StorageError(self.path, "changed while it was being read", WAIT)

    def close(self) -> None:
        """Drop the cached bytes."""
        self._cache.clear()


class SmallWriter(Writer):
    """Buffers a small file and writes it with one request; no part is stored before.

    Args:
        storage: Storage of the file.
        path: URL of the file.
        nbytes: Its size in bytes.
        part_bytes: Size of a part in bytes.
        new: Whether it must not replace a file.
    """

    def __init__(self, storage: RemoteStorage, path: str, nbytes: int, part_bytes: int, *, new: bool) -> None:
        self.path = path
        self.part_bytes = part_bytes
        self._storage = storage
        self._new = new
        self._data = bytearray(nbytes)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Buffer a part."""
        self._data[start : start + len(data)] = data

    def commit(self) -> None:
        """Write the file.

        Raises:
            ExistsError: ``new`` is set, and the path exists.
            StorageError: The storage fails.
        """
        data = bytes(self._data)
        if not self._new:
            self._storage.put(self.path, data)
        elif not self._storage.put_new(self.path, data):
            raise ExistsError(self.path, "exists already", "choose another name")


class StreamWriter(Writer):
    """Writes a file sequentially from its first byte to its last, which every fsspec file system supports.

    Args:
        storage: Storage of the file.
        path: URL of the file.
        part_bytes: Size of a part in bytes.
    """

    def __init__(self, storage: RemoteStorage, path: str, part_bytes: int) -> None:
        self._storage = storage
        self.path = path
        self.part_bytes = part_bytes
        self._changed = threading.Condition()
        self._at = 0
        self._failed: BaseException | None = None
        self._before = self._entry()
        # One part per block: some file systems buffer tens of MB by default.
        options = {"block_size": part_bytes, "autocommit": False}
        self._file = storage.call(path, storage.fs.open, storage.key(path), "wb", **options)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Wait until all earlier parts are written, then write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None or self._at == start)
            if self._failed is not None:
                raise self._failed  # all threads raise the same error, so that the caller may report any of them
            try:
                self._file.write(data)  # no second attempt: the first may have sent some of the bytes
            except Exception as error:
                problem = f"could not be written: {type(error).__name__}"
                self._failed = explain(self.path, error) or StorageError(self.path, problem, "try again")
                raise self._failed from error
            finally:
                self._at = start + len(data)
                self._changed.notify_all()

    def commit(self) -> None:
        """Make the complete file visible to readers."""
        self._file.close()
        # A file system that writes to the final path has no commit.
        if hasattr(self._file, "commit"):
            self._file.commit()
        self._storage.forget()

    def discard(self) -> None:
        """Abort the upload, and delete the file if the storage has written to the final path."""
        self.fail(StorageError(self.path, "was discarded", "try again"))
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # otherwise garbage collection would flush and commit it
        self._storage.forget()
        # Only some storages write to the final path before the commit; with others the previous file is still there.
        if self._before is None or self._entry() != self._before:
            self._storage.delete([self.path])

    def _entry(self) -> Entry | None:
        return self._storage.entry(self.path) if self._storage.exists(self.path) else None

    def fail(self, error: BaseException) -> None:
        """Wake threads that wait for an earlier part, and raise ``error`` in them."""
        with self._changed:
            self._failed = self._failed or error
            self._changed.notify_all()


LOG = logging.getLogger("ckpttool")
CONNECTIONS = 32
"""Concurrent requests of one storage."""
PART_BYTES = 8 << 20
"""Bytes of a part, for files of at most MAX_PARTS such parts."""
MAX_PARTS = 50_000
"""Most parts of a file in Azure Blob Storage."""
PART_UNIT = 1 << 18
"""Google Cloud Storage requires part sizes that are multiples of this, in bytes."""
FAR_APART = 8
"""Most unrelated directories to list one by one; for more, one request lists their common parent directory."""


class RemoteStorage(Described, WritableStorage):
    """A storage behind an fsspec file system. Threads may share it.

    Args:
        fs: The file system, without a listings cache.
    """

    remote = True
    reads_versions = False
    parts_at_once = 8
    parts_from_anywhere = False
    """Whether several processes can write parts of one file in any order."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self._listed: dict[str, list[Entry]] = {}
        self._single: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self.retries = Tally()
        """Counts the repeated requests."""
        self._pool: ThreadPoolExecutor | None = None

    def call(self, path: str, request: Callable[P, T], /, *given: P.args, **named: P.kwargs) -> T:
        """Make a request, and retry temporary failures with growing pauses; see ``retry.call``."""
        return call(path, partial(request, *given, **named), self.retries)

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its arguments."""
        return _reopen, (type(self), type(self.fs), self.fs.storage_args, self.fs.storage_options)

    # ------------------------------------------------------------------------------------------- listing

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name.

        Raises:
            StorageError: The directory does not exist or cannot be read.
        """
        key = self.key(path)
        found = self._listed.get(key)
        return self._remember(path, key, self.call(path, self.look, key)) if found is None else found

    def look(self, key: str) -> list[dict[str, Any]]:
        """Return fsspec's infos of a directory's entries, or of the file at that key."""
        infos: list[dict[str, Any]] = self.fs.ls(key, detail=True)
        return infos

    def find(self, key: str) -> Iterable[dict[str, Any]]:
        """Return fsspec's infos of all files below a directory."""
        infos: dict[str, dict[str, Any]] = self.fs.find(key, detail=True)
        return infos.values()

    def info(self, key: str) -> dict[str, Any]:
        """Return fsspec's info of a file or directory."""
        info: dict[str, Any] = self.fs.info(key)
        return info

    def _remember(self, path: str, key: str, infos: Iterable[Mapping[str, Any]]) -> list[Entry]:
        infos = [info for info in infos if not str(info["name"]).endswith("/") or info["type"] == "directory"]
        if len(infos) == 1 and name_of(infos[0]) == key.rstrip("/") and infos[0]["type"] != "directory":
            self._single[key] = entry_of(infos[0])
            raise StorageError(path, "is not a directory", "pass a checkpoint's directory")
        entries = [entry_of(info) for info in infos if name_of(info) != key.rstrip("/")]
        found = self._listed[key] = in_order(e for e in entries if e.name not in NO_NAMES)
        return found

    def list_tree(self, path: str) -> None:
        """List a directory tree with few requests, and cache the listings."""
        root = self.key(path).rstrip("/")
        if self._is_listed(root):
            return
        self._listed |= tree_of(root, self.call(path, self.find, root))

    def _is_listed(self, key: str) -> bool:
        """Return whether the listings of a whole tree are cached."""
        entries = self._listed.get(key)
        return entries is not None and all(self._is_listed(f"{key}/{e.name}") for e in entries if e.is_dir)

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory."""
        known, entry = self._lookup(path)
        if known:
            return entry is not None and entry.is_dir
        try:
            return bool(self.listing(path))
        except StorageError as error:
            if error.problem == MISSING:
                self._listed[self.key(path).rstrip("/")] = []  # cached: the path does not exist
                return False
            if self.key(path) in self._single:
                return False
            raise

    def exists(self, path: str) -> bool:
        """Return whether the path exists."""
        known, entry = self._lookup(path)
        return entry is not None if known else self.is_dir(path) or self.is_file(path)

    def is_file(self, path: str) -> bool:
        """Return whether a path that is not a directory is a file."""
        return self.key(path) in self._single

    def refresh(self, paths: Sequence[str]) -> None:
        """Drop cached listings of these files' directories and list them again; without paths, drop all listings."""
        if not paths:
            self.forget()
        directories = {posixpath.dirname(self.key(path)): posixpath.dirname(path) for path in paths}
        # A directory with others below it is listed as a tree. A few unrelated directories are listed one by one: the
        # tree of their common parent may contain many other files.
        tops = _tops(directories)
        if len(tops) > FAR_APART and (shared := posixpath.commonpath(list(tops))).strip("/"):
            tops = {shared: True}
        for known in (self._listed, self._single):
            for key in [k for k in known if any(not top or k == top or k.startswith(f"{top}/") for top in tops)]:
                del known[key]
        calls: list[partial[Any]] = []
        for key, deep in tops.items():
            path = directories.get(key) or key
            calls.append(partial(self.list_tree, path) if deep else partial(self.listing, path))
        self.at_once(calls)

    def entry(self, path: str) -> Entry:
        """Return the entry of a file, from a cached listing or by a request.

        Raises:
            StorageError: The path does not exist or is a directory.
        """
        known, found = self._lookup(path)
        if not known:
            key = self.key(path)
            found = self._single[key] = entry_of(self.call(path, self.info, key))
        if found is None:
            raise StorageError(path, MISSING, "check the path")
        if found.is_dir:  # an object may have the same key as a directory
            above, name = posixpath.split(self.key(path).rstrip("/"))
            files = (e for e in self._listed.get(above, ()) if e.name == name and not e.is_dir)
            found = next(files, found)
        if found.is_dir:
            raise StorageError(path, "is not a regular file", "remove it or choose another path")
        return found

    def _lookup(self, path: str) -> tuple[bool, Entry | None]:
        """Return whether cached listings cover a path, and the entry in them."""
        key = self.key(path).rstrip("/")
        listed = self._listed.get(key)
        if listed is not None:
            return True, Entry(posixpath.basename(key), is_dir=True, nbytes=0) if listed else None
        single = self._single.get(key)
        if single is not None:
            return True, single
        siblings = self._listed.get(posixpath.dirname(key))
        if siblings is None:
            return False, None
        return True, next((e for e in siblings if e.name == posixpath.basename(key)), None)

    def key(self, path: str) -> str:
        """Return the key of a path in the file system."""
        scheme = scheme_of(path)
        return str(self.fs._strip_protocol(scheme + path[len(scheme) :]))

    def is_same(self, other: object) -> bool:
        """Return whether a path names the same file in another storage."""
        return isinstance(other, RemoteStorage) and type(self.fs) is type(other.fs)

    # ------------------------------------------------------------------------------------------- reading

    def open(self, path: str, *, ahead: bool = False) -> RemoteReader:
        """Open a file for reading ranges; without a request if its directory's listing is cached.

        Raises:
            StorageError: The file is missing, not a regular file, or not readable.
        """
        entry = self.entry(path)
        return RemoteReader(self, path, entry, ahead=ahead)

    def get(self, path: str, start: int, end: int, version: str) -> bytes | memoryview:
        """Return the bytes [start, end) of a file; one request."""
        return bytes(self.fs.cat_file(self.key(path), start=start, end=end))

    def read_all(self, wanted: Sequence[tuple[Any, int, int]]) -> list[bytes | memoryview]:
        """Return the bytes [start, end) of each reader of this storage; the requests run concurrently."""
        return self.at_once([partial(reader.fetch, start, end) for reader, start, end in wanted])

    def at_once(self, calls: Sequence[partial[Any]]) -> list[Any]:
        """Make calls of one request each concurrently; return their results in order."""
        if len(calls) <= 1:
            return [one() for one in calls]
        futures = [self._requests.submit(c) for c in calls]
        try:
            return [f.result() for f in futures]
        finally:
            for future in futures:
                future.cancel()
            # A running call may still change the storage: callers must not clean up before it has ended.
            wait(futures)

    @property
    def _requests(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ckpttool-requests")
            return self._pool

    # ------------------------------------------------------------------------------------------- writing

    def make_directory(self, path: str) -> None:
        """Do nothing but drop cached listings: a storage of objects has no directories."""
        self.forget()

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write or replace a small file.

        Raises:
            StorageError: The file cannot be written.
        """
        try:
            self.call(path, self.fs.pipe_file, self.key(path), b"".join(parts))
        except StorageError as error:
            if error.problem != MISSING:
                raise
            problem = "cannot be written: its bucket or directory does not exist"
            raise StorageError(path, problem, "create the bucket or directory first, or check the name") from error
        self.forget()

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other process has written it; see ``WritableStorage.put_new``.

        Raises:
            StorageError: The file cannot be written.
        """
        self.forget()  # fsspec has no conditional writes: this only makes a collision unlikely
        current = self.entry(path).version if self.exists(path) else None
        if current != over:
            return False
        self.put(path, *parts)
        return True

    def writer(self, path: str, nbytes: int, *, new: bool = False, mode: int = 0o666) -> Writer:
        """Open a writer for a file of known size.

        Raises:
            ExistsError: ``new`` is set, and the path exists.
            StorageError: The upload cannot begin.
        """
        size = self.part_bytes(nbytes)
        return SmallWriter(self, path, nbytes, size, new=new) if nbytes <= size else self.upload(path, nbytes, new=new)

    def upload(self, path: str, nbytes: int, key: str = "", *, new: bool = False) -> Writer:
        """Open a writer for a file that is too large for one request.

        Args:
            path: The file.
            nbytes: Its size in bytes.
            key: Identifier of the upload to resume; only for storages with ``uploads``.
            new: Whether the upload must not replace a file.

        Raises:
            ExistsError: ``new`` is set, and the path exists.
            StorageError: The upload cannot begin.
        """
        self.forget()
        if new and self.exists(path):
            raise ExistsError(path, "exists already", "choose another name")
        return StreamWriter(self, path, self.part_bytes(nbytes))

    def part_bytes(self, nbytes: int) -> int:
        """Return the part size in bytes for a file of ``nbytes`` bytes."""
        if nbytes <= MAX_PARTS * PART_BYTES:
            return PART_BYTES
        return -(-nbytes // MAX_PARTS // PART_UNIT) * PART_UNIT

    def object_name(self, path: str) -> str:
        """Return the name of a file in ``uploads``."""
        return self.key(path)

    def uploads(self, path: str) -> dict[str, str]:
        """Return the resumable uploads below a path: object name to upload identifier."""
        return {}

    def abort_uploads(self, path: str, names: Iterable[str]) -> None:
        """Abort the uploads of these files that killed runs left below a path; most storages do so on their own."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Raises:
            StorageError: A file cannot be deleted.
        """
        self.at_once([partial(self._delete, path) for path in paths])
        self.forget()

    def _delete(self, path: str) -> None:
        try:
            self.call(path, self.remove, self.key(path))
        except StorageError as error:
            if error.problem != MISSING:
                raise

    def remove(self, key: str) -> None:
        """Delete a file."""
        try:
            self.fs.rm_file(key)
        except NotImplementedError:  # adlfs 2025.8 and older
            self.fs.rm(key)

    def move_tree(self, path: str, to: str) -> None:
        """Copy the files of a directory within the storage, then delete the old ones.

        Raises:
            StorageError: A file cannot be copied or deleted.
        """
        self.forget()
        files = [(posixpath.join(path, name), posixpath.join(to, name), entry) for name, entry in walk(self, path)]
        self.at_once([partial(self.call, old, self.copy, self.key(old), self.key(new), e) for old, new, e in files])
        self.delete([old for old, _, _ in files])

    def copy(self, key: str, to: str, entry: Entry) -> None:
        """Copy a file within the storage.

        Args:
            key: Key of the file.
            to: Key of the copy.
            entry: Entry of the file.
        """
        self.fs.cp_file(key, to)

    def remove_tree(self, path: str, *, unless_pinned: bool = False) -> None:
        """Remove all files below a directory; write the in-progress marker first and delete it last.

        Raises:
            PinnedError: It is pinned.
            StorageError: A file cannot be removed.
        """
        path = path.rstrip("/")
        self.forget()
        remove_remote(self, path, unless_pinned=unless_pinned)

    def abandon(self, path: str) -> None:
        """Abort the uploads that killed processes left below a directory."""
        prefix = f"{self.object_name(path)}/"
        try:
            begun = [key.removeprefix(prefix) for key in self.uploads(path)]
            if begun:
                self.abort_uploads(path, begun)
        except CkptError as error:  # the credentials may lack the right to list uploads
            LOG.warning("uploads of a killed save were not aborted: %s", error)

    def forget(self) -> None:
        """Drop all cached listings; called after each write."""
        self._listed.clear()
        self._single.clear()


def _tops(directories: Iterable[str]) -> dict[str, bool]:
    """Return the directories without a parent among the others, and whether they contain others."""
    tops: dict[str, bool] = {}
    for key in sorted(directories, key=lambda d: d.split("/")):
        top = next(reversed(tops), None)
        if top is not None and (not top or key.startswith(f"{top}/")):
            tops[top] = True
        else:
            tops[key] = False
    return tops


def _reopen(
    kind: type[RemoteStorage], fs: type[Any], arguments: Sequence[Any], options: Mapping[str, Any]
) -> RemoteStorage:
    return kind(fs(*arguments, **options))
