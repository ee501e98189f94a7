"""Any storage that fsspec reaches, read by ranges.

What costs here is not bytes but round trips: directories are listed once and remembered, a listing tells size and
version of every file in it, and where several ranges are wanted they are asked for at once.
"""

from __future__ import annotations

import logging
import posixpath
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError, StorageError
from ckpttool.storage.base import NO_NAMES, Entry, check_text, decode_text
from ckpttool.storage.error_texts import ExistsError
from ckpttool.storage.fsspec_reader import RemoteReader
from ckpttool.storage.fsspec_writers import SmallWriter, StreamWriter
from ckpttool.storage.listings import entry_of, in_order, name_of, tree_of
from ckpttool.storage.removal import remove_remote
from ckpttool.storage.retry import MISSING, T, Tally, call
from ckpttool.storage.urls import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckpttool.storage.base import Writer

LOG = logging.getLogger("ckpttool")
CONNECTIONS = 32
"""Requests in flight at once, for one storage."""
PART_BYTES = 8 << 20
"""What a file is written in at a time, where it fits into MAX_PARTS of these."""
MAX_PARTS = 50_000
"""Parts of a file in a container of Azure."""
PART_UNIT = 1 << 18
"""What the size of Google's parts is a multiple of."""
FAR_APART = 8
"""Directories, none within another, that are listed one by one; more of them are listed with all that lies between."""


class RemoteStorage:
    """A storage behind an fsspec file system. Threads may share it.

    Args:
        fs: The file system, without a cache of its own.
    """

    remote = True
    reads_versions = False
    parts_at_once = 8
    parts_from_anywhere = False
    """Whether several processes can write parts of one file, in any order."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        self._listed: dict[str, list[Entry]] = {}
        self._single: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self.retries = Tally()
        """Requests that were repeated."""
        self._pool: ThreadPoolExecutor | None = None

    def call(self, path: str, function: Callable[[], T]) -> T:
        """Make a request, and repeat it with growing pauses while failures may pass; see ``retry.call``."""
        return call(path, function, self.retries)

    def __reduce__(self) -> tuple[Any, ...]:
        # For other processes: with what the file system was made with, and nothing that was listed.
        return type(self), (self.fs,)

    # ------------------------------------------------------------------------------------------- looking

    def listing(self, path: str) -> list[Entry]:
        """The names in a directory, sorted.

        Raises:
            StorageError: There is no such directory, or it cannot be read.
        """
        key = self.key(path)
        found = self._listed.get(key)
        return self._remember(path, key, self.call(path, partial(self.look, key))) if found is None else found

    def look(self, key: str) -> list[dict[str, Any]]:
        """What fsspec tells of all that lies in a directory, or of the file that lies there instead."""
        infos: list[dict[str, Any]] = self.fs.ls(key, detail=True)
        return infos

    def _remember(self, path: str, key: str, infos: Iterable[Mapping[str, Any]]) -> list[Entry]:
        infos = [info for info in infos if not str(info["name"]).endswith("/") or info["type"] == "directory"]
        if len(infos) == 1 and name_of(infos[0]) == key.rstrip("/") and infos[0]["type"] != "directory":
            self._single[key] = entry_of(infos[0])
            raise StorageError(path, "is not a directory", "pass a checkpoint's directory")
        entries = [entry_of(info) for info in infos if name_of(info) != key.rstrip("/")]
        found = self._listed[key] = in_order(e for e in entries if e.name not in NO_NAMES)
        return found

    def list_tree(self, path: str) -> None:
        """List a directory and all below it with few requests, and remember them."""
        root = self.key(path).rstrip("/")
        infos = self.call(path, partial(self.fs.find, root, detail=True))
        self._listed |= tree_of(root, infos.values())

    def is_dir(self, path: str) -> bool:
        """Whether the path is a directory that can be looked at."""
        known, entry = self._lookup(path)
        if known:
            return entry is not None and entry.is_dir
        try:
            return bool(self.listing(path))
        except StorageError as error:
            if error.problem == MISSING:
                self._listed[self.key(path).rstrip("/")] = []  # nothing is there: not to be asked again
                return False
            if self.key(path) in self._single:
                return False
            raise

    def exists(self, path: str) -> bool:
        """Whether there is anything at the path."""
        known, entry = self._lookup(path)
        return entry is not None if known else self.is_dir(path) or self.is_file(path)

    def is_file(self, path: str) -> bool:
        """Whether a file is at a path that was found to be no directory."""
        return self.key(path) in self._single

    def refresh(self, paths: Sequence[str]) -> None:
        """Forget what was listed where these files lie, and list it anew with few requests; without any, forget all."""
        if not paths:
            self.forget()
        directories = {posixpath.dirname(self.key(path)): posixpath.dirname(path) for path in paths}
        # Those with others below them are listed with all that is there; between two that lie far apart may lie much.
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
        """What is known of a file.

        Raises:
            StorageError: It is missing, or is a directory.
        """
        known, found = self._lookup(path)
        if not known:
            key = self.key(path)
            found = self._single[key] = entry_of(self.call(path, partial(self.fs.info, key)))
        if found is None:
            raise StorageError(path, MISSING, "check the path")
        if found.is_dir:  # an object may have the name of a directory
            above, name = posixpath.split(self.key(path).rstrip("/"))
            files = (e for e in self._listed.get(above, ()) if e.name == name and not e.is_dir)
            found = next(files, found)
        if found.is_dir:
            raise StorageError(path, "is not a regular file", "remove it or choose another checkpoint")
        return found

    def _lookup(self, path: str) -> tuple[bool, Entry | None]:
        """Whether listings tell what is at a path, and what they tell."""
        key = self.key(path).rstrip("/")
        listed = self._listed.get(key)
        if listed is not None:
            return True, Entry(posixpath.basename(key), is_dir=True, nbytes=0) if listed else None
        single = self._single.get(key)
        if single is not None:
            return True, single
        beside = self._listed.get(posixpath.dirname(key))
        if beside is None:
            return False, None
        return True, next((e for e in beside if e.name == posixpath.basename(key)), None)

    def key(self, path: str) -> str:
        """What the file system calls a path."""
        scheme = scheme_of(path)
        return str(self.fs._strip_protocol(scheme + path[len(scheme) :]))

    def is_same(self, other: object) -> bool:
        """Whether one path means the same here and there."""
        return isinstance(other, RemoteStorage) and type(self.fs) is type(other.fs)

    # ------------------------------------------------------------------------------------------- reading

    def open(self, path: str, *, ahead: bool = False) -> RemoteReader:
        """Open a file for reading ranges; no request where its directory was listed.

        Raises:
            StorageError: It is missing, not a file, or not permitted.
        """
        entry = self.entry(path)
        return RemoteReader(self, path, entry, ahead=ahead)

    def read_text(self, path: str) -> str:
        """The content of a small text file.

        Raises:
            StorageError: It cannot be read, is larger than 1 MiB or is not text.
        """
        with self.open(path) as reader:
            return decode_text(path, reader.read(0, check_text(path, reader.nbytes)))

    def get(self, path: str, start: int, end: int, version: str) -> bytes | memoryview:
        """The bytes [start, end) of a file; one request."""
        return bytes(self.fs.cat_file(self.key(path), start=start, end=end))

    def read_all(self, wanted: Sequence[tuple[Any, int, int]]) -> list[bytes | memoryview]:
        """The bytes [start, end) of each reader, which is one of this storage's; many at once."""
        return self.at_once([partial(reader.fetch, start, end) for reader, start, end in wanted])

    def at_once(self, calls: Sequence[partial[Any]]) -> list[Any]:
        """Make calls, each of one request, at the same time; their results in order."""
        if len(calls) <= 1:
            return [one() for one in calls]
        futures = [self._requests.submit(c) for c in calls]
        try:
            return [f.result() for f in futures]
        finally:
            for future in futures:
                future.cancel()
            # What has begun may still change the store: nobody is to clean up before it has ended.
            wait(futures)

    @property
    def _requests(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ckpttool-requests")
            return self._pool

    # ------------------------------------------------------------------------------------------- writing

    def make_directory(self, path: str) -> None:
        """Nothing: names of files make directories."""
        self.forget()

    def free_bytes(self, path: str) -> int | None:
        """None: stores do not tell."""
        return None

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write a small file, or replace it.

        Raises:
            StorageError: It cannot be written.
        """
        try:
            self.call(path, partial(self.fs.pipe_file, self.key(path), b"".join(parts)))
        except StorageError as error:
            if error.problem != MISSING:
                raise
            problem = "cannot be written: what it is to lie in does not exist"
            raise StorageError(path, problem, "create the bucket or directory first, or check the name") from error
        self.forget()

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other writer was faster; see ``WritableStorage.put_new``.

        Raises:
            StorageError: It cannot be written.
        """
        self.forget()  # fsspec has no conditional writes: this only makes a collision unlikely
        there = self.entry(path).version if self.exists(path) else None
        if there != over:
            return False
        self.put(path, *parts)
        return True

    def writer(self, path: str, nbytes: int, *, new: bool = False) -> Writer:
        """Begin to write a file of known size in parts.

        Raises:
            ExistsError: The file must be new, and one is there already.
            StorageError: It cannot be begun.
        """
        size = self.part_bytes(nbytes)
        return SmallWriter(self, path, nbytes, size, new=new) if nbytes <= size else self.upload(path, nbytes, new=new)

    def upload(self, path: str, nbytes: int, key: str = "", *, new: bool = False) -> Writer:
        """Begin to write a file that is too large for one request.

        Args:
            path: The file.
            nbytes: Its size in bytes.
            key: Number of the upload to go on with; only for storages that have ``uploads``.
            new: Whether it must not replace a file.

        Raises:
            ExistsError: The file must be new, and one is there already.
            StorageError: It cannot be begun.
        """
        self.forget()
        if new and self.exists(path):
            raise ExistsError(path, "exists already", "choose another name")
        return StreamWriter(self, path, self.part_bytes(nbytes))

    def part_bytes(self, nbytes: int) -> int:
        """How large the parts are that a file of this size is written in."""
        if nbytes <= MAX_PARTS * PART_BYTES:
            return PART_BYTES
        return -(-nbytes // MAX_PARTS // PART_UNIT) * PART_UNIT

    def object_name(self, path: str) -> str:
        """What ``uploads`` calls a file."""
        return self.key(path)

    def uploads(self, path: str) -> dict[str, str]:
        """Uploads below a path that can be gone on with."""
        return {}

    def abort_uploads(self, path: str, names: Iterable[str]) -> None:
        """Give up what killed runs have left of uploads of these files below a path; most stores do so themselves."""

    def delete(self, paths: Iterable[str]) -> None:
        """Remove files; those that are not there are none of its business.

        Raises:
            StorageError: One cannot be removed.
        """
        self.at_once([partial(self._delete, path) for path in paths])
        self.forget()

    def _delete(self, path: str) -> None:
        try:
            self.call(path, partial(self.fs.rm_file, self.key(path)))
        except StorageError as error:
            if error.problem != MISSING:
                raise

    def sync(self, path: str) -> None:
        """Nothing: a store has answered when a file is durable."""

    def rename(self, path: str, to: str) -> bool:
        """False: objects have no directories."""
        return False

    def remove_tree(self, path: str) -> None:
        """Remove all files below a directory; the in-progress marker comes first and goes last.

        Raises:
            StorageError: One cannot be removed.
        """
        path = path.rstrip("/")
        self.forget()
        self.abandon(path)  # before the marker goes: after a crash here the removal is repeated
        remove_remote(self, path)

    def abandon(self, path: str) -> None:
        """Discard the uploads that killed processes have left below a directory."""
        prefix = f"{self.object_name(path)}/"
        try:
            begun = [key.removeprefix(prefix) for key in self.uploads(path)]
            if begun:
                self.abort_uploads(path, begun)
        except CkptError as error:  # these credentials may not list them
            LOG.warning("uploads of a killed save were not aborted: %s", error)

    def forget(self) -> None:
        """Remember no listing: something was written."""
        self._listed.clear()
        self._single.clear()


def _tops(directories: Iterable[str]) -> dict[str, bool]:
    """The directories that lie in none of the others, and whether others lie in them."""
    tops: dict[str, bool] = {}
    for key in sorted(directories, key=lambda d: d.split("/")):
        top = next(reversed(tops), None)
        if top is not None and (not top or key.startswith(f"{top}/")):
            tops[top] = True
        else:
            tops[key] = False
    return tops
