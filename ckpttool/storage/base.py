"""What the rest of ckpttool knows of storages: directories to list, and files of which ranges can be read.

Paths are ``str``: ``pathlib.Path`` would turn ``s3://`` into ``s3:/``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.retry import Tally

MAX_TEXT_BYTES = 1 << 20
"""Small text files (``latest``) larger than this are not what their name says."""

MARK = ".ckpttool-staging"
"""Says that a directory was made here, and may be cleared away; holds what it is to become."""
MANIFEST = "ckpttool.json"
"""Says that all of a directory is there: the last file of a save, and what makes it a commit."""
MAX_DEPTH = 32
"""Directories within directories: no checkpoint has more, a link to a directory above it endlessly many."""
NO_NAMES = frozenset({"", ".", ".."})
"""What cannot be the name of a file, though it may be a part of an object's key."""
FOLLOW_LINKS = "follow_links"
"""The option that lets links of checkpoints on local disk lead anywhere; stores have no links."""
OF_OPENING = {FOLLOW_LINKS, "open_budget"}
"""Options that are not the fsspec class's."""
WAIT = "wait until the save is over, then try again"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory."""

    name: str
    """The last component of the path."""
    is_dir: bool
    """True for a directory, or a link to one."""
    nbytes: int
    """Size of a file in bytes; 0 for a directory."""
    version: str = ""
    """Differs when the file was written anew: its modification time, or what a remote store has in its place."""
    modified: float | None = None
    """When it was last written, in seconds since 1970; None where nothing tells."""


class RangeReader(Protocol):
    """An open file of which ranges can be read. Threads may share it."""

    path: str
    """What error messages call the file."""
    nbytes: int
    """Size of the file when it was opened."""
    version: str
    """As ``Entry.version``, when it was opened."""
    remote: bool
    """Whether each read costs a round trip: better to read little often than not."""

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises:
            StorageError: The range cannot be read whole.
        """

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; one call, so that a remote store may coalesce and overlap them."""

    def close(self) -> None:
        """Release the file."""


class Reader(RangeReader, Protocol):
    """A file as a storage opens it."""

    def __enter__(self) -> Reader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``start`` on.

        Raises:
            StorageError: The range cannot be read whole.
        """

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Be ready to read these ranges, where it is faster to ask for all of them at once."""

    def check_unchanged(self) -> None:
        """Make sure that the file is still the one that was opened.

        Raises:
            StorageError: It was written anew since.
        """


class Storage(Protocol):
    """A place where files lie."""

    remote: bool
    """Whether each call costs a round trip, and many at once cost no more."""
    reads_versions: bool
    """Whether what is read of a file is of the version that was listed, or an error."""

    def listing(self, path: str) -> list[Entry]:
        """The names in a directory, sorted.

        Raises:
            StorageError: There is no such directory, or it cannot be read.
        """

    def list_tree(self, path: str) -> None:
        """Be ready to list a directory and all below it, where one request can do that."""

    def is_dir(self, path: str) -> bool:
        """Whether the path is a directory that can be looked at."""

    def exists(self, path: str) -> bool:
        """Whether there is anything at the path."""

    def open(self, path: str, *, ahead: bool = False) -> Reader:
        """Open a file for reading ranges.

        Args:
            path: The file.
            ahead: Where reads are remote, read more than is asked for at both ends and keep it: for who looks at the
                structure of a file.

        Raises:
            StorageError: It is missing, not a file, or not permitted.
        """

    def read_text(self, path: str) -> str:
        """The content of a small text file.

        Raises:
            StorageError: It cannot be read, is larger than 1 MiB or is not text.
        """

    def read_all(self, wanted: Sequence[tuple[Reader, int, int]]) -> Sequence[bytes | memoryview]:
        """The bytes [start, end) of each reader of this storage, many at once where that is faster."""

    def refresh(self, paths: Sequence[str]) -> None:
        """Look anew: forget what was listed, and see at once to these files where that is faster."""


def walk(storage: Storage, path: str) -> Iterator[tuple[str, Entry]]:
    """Every file below a directory, by its name relative to it, in order.

    Raises:
        StorageError: A directory cannot be read.
    """
    storage.list_tree(path)
    stack = [""]
    seen: set[str] = set()
    while stack:
        prefix = stack.pop()
        if not storage.remote:  # links may lead back to where they are
            place = os.path.realpath(f"{path}/{prefix}")
            if place in seen:
                continue
            seen.add(place)
        for entry in storage.listing(f"{path}/{prefix}".rstrip("/")):
            if not entry.is_dir:
                yield prefix + entry.name, entry
            elif prefix.count("/") < MAX_DEPTH:
                stack.append(f"{prefix}{entry.name}/")


def check_text(path: str, nbytes: int) -> int:
    """The size of a small text file, if it can be one.

    Raises:
        StorageError: It is larger than 1 MiB.
    """
    if nbytes > MAX_TEXT_BYTES:
        raise StorageError(path, f"is {nbytes} bytes long, too large for a text file", "is it damaged?")
    return nbytes


def decode_text(path: str, data: bytes) -> str:
    """A small file's content.

    Raises:
        StorageError: It is not text.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(path, "is not text", "is it damaged? pass --tag to choose a checkpoint") from error


class PartWriter(Protocol):
    """Writes parts of one file in any process. It can be pickled."""

    def write(self, start: int, data: memoryview) -> Any:
        """Write the part that begins at byte ``start``; a repeated call does no harm.

        Returns:
            A result for ``Writer.accept``.

        Raises:
            StorageError: The part cannot be written.
        """


class Writer(Protocol):
    """One file that is written in parts. Threads may share it. No reader sees the file before ``commit``."""

    path: str
    """Path or URL of the file."""
    part_bytes: int
    """Size of every part but the last, in bytes; a multiple of 64."""

    def has(self, start: int, nbytes: int) -> bool:
        """Whether an earlier process has written the part that begins at byte ``start``."""

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """

    def fail(self, error: BaseException) -> None:
        """Wake threads that wait for an earlier part, and raise ``error`` in them."""

    def part_writer(self) -> PartWriter:
        """An object that writes parts in other processes.

        Raises:
            StorageError: Only one process can write this file.
        """

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Record what ``PartWriter.write`` returned for a part."""

    def commit(self) -> None:
        """Show the complete file to readers.

        Raises:
            ExistsError: The file must be new, and another one has its name.
            StorageError: The storage fails.
        """

    def discard(self) -> None:
        """Remove all parts."""


class WritableStorage(Storage, Protocol):
    """A storage that files are written to. A call returns when its effect is durable."""

    parts_at_once: int
    """Parts of one file that are worth writing at the same time."""
    retries: Tally
    """Counts the requests of this storage that were repeated."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents.

        Raises:
            StorageError: It cannot be created.
        """

    def free_bytes(self, path: str) -> int | None:
        """Bytes that can still be written below a directory; None if the storage does not tell."""

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write a small file, or replace it, in one step: readers see the old bytes or the new ones.

        Args:
            path: The file.
            *parts: Its bytes.
            mode: Its permissions before the umask, on storages that have permissions.

        Raises:
            StorageError: It cannot be written.
        """

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small file only if no other writer was faster.

        Args:
            path: The file.
            *parts: Its bytes.
            over: ``Entry.version`` of the file to replace; None if no file may be there.
            mode: As for ``put``.

        Returns:
            False if another file, or another version, is there; nothing was written then.

        Raises:
            StorageError: It cannot be written.
        """

    def writer(self, path: str, nbytes: int, *, new: bool = False) -> Writer:
        """Begin to write a file of known size in parts.

        Args:
            path: The file; its directory exists.
            nbytes: Its size in bytes.
            new: Whether ``Writer.commit`` must not replace a file.

        Raises:
            ExistsError: The file must be new, and one is there already.
            StorageError: It cannot be created.
        """

    def sync(self, path: str) -> None:
        """Make the names that ``Writer.commit`` has put into a directory durable.

        Raises:
            StorageError: The storage fails.
        """

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; missing ones are ignored.

        Raises:
            StorageError: One cannot be deleted.
        """

    def rename(self, path: str, to: str) -> bool:
        """Rename a directory in one step; False if this storage cannot.

        Raises:
            StorageError: The rename failed.
        """

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all files below it; after a crash readers refuse what is left of it.

        Raises:
            StorageError: A file cannot be removed.
        """

    def abandon(self, path: str) -> None:
        """Discard the uploads that killed processes have left below a directory."""
