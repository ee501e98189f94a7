"""The files of one rank in a save: their bytes and checksums, from memory, and how they are written."""

from __future__ import annotations

import contextlib
import posixpath
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

from ckpttool.checksums import chunk_bytes, combine, crc32, cuts, of_pieces
from ckpttool.commit.marks import TAKEN, TakenError
from ckpttool.concurrency import in_threads
from ckpttool.containers import torch_zip
from ckpttool.errors import CkptError
from ckpttool.storage import ExistsError
from ckpttool.storage.streams import write_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.storage import WritableStorage


ALIGNMENT = 64
"""Alignment in bytes of the archives in a file."""
READ_BYTES = 1 << 23
"""Bytes of one read of a payload."""
SMALL_BYTES = 1 << 20
"""Archives in one file up to this size are joined, and their bytes hashed together: each step of a thread, and each
combination of checksums, takes as long as some 50 kB."""
SMALL_PICKLE_BYTES = 1 << 10
"""Largest pickle of an archive whose layout is kept for equal ones."""

Hashed = tuple[int, int, int]
"""First byte in the file, size in bytes and CRC-32 of a piece inside one chunk."""


class Payload(Protocol):
    """Bytes in the memory of the host or of a device."""

    nbytes: int
    """Size in bytes."""

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end), valid until the next call of the same thread."""


class HostPayload:
    """Bytes in the memory of the host.

    Args:
        data: The bytes.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data)
        self.nbytes = self._view.nbytes

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end)."""
        return self._view[start:end]


class Mapper(Protocol):
    """``map``, or the ``map`` of an executor, which computes results in advance."""

    def __call__(
        self, function: Callable[[tuple[int, Payload]], list[Hashed]], values: Iterable[tuple[int, Payload]], /
    ) -> Iterator[list[Hashed]]:
        """Yield the result of the function for each value, in order."""


@dataclass(slots=True)
class OutgoingFile(ABC):
    """A file of one rank."""

    name: str
    """Path relative to the checkpoint's directory, with "/" between directories."""
    _hashed: list[Hashed] = field(init=False, default_factory=list)
    _directory: tuple[int, int] | None = field(init=False, default=None)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def checksums(self) -> Checksums:
        """Checksums of the file; known when ``stream`` has ended."""
        return of_pieces(self.nbytes, self._hashed, self._directory)

    @abstractmethod
    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the file, in order; each buffer is valid until the next one is requested.

        Args:
            mapped: Maps the checksum function over the payloads.
        """


class PlainFile(OutgoingFile):
    """A file with payloads one after another."""

    def __init__(self, name: str, *payloads: Payload) -> None:
        super().__init__(name)
        self._payloads = payloads

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(payload.nbytes for payload in self._payloads)

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the file, in order, while another thread of ``mapped`` may hash them."""
        starts = accumulate((payload.nbytes for payload in self._payloads), initial=0)
        hashed = mapped(partial(_hash, chunk_bytes(self.nbytes)), [*zip(starts, self._payloads, strict=False)])
        self._hashed = []
        for payload in self._payloads:
            yield from _pieces(payload)
            self._hashed += next(hashed)


@dataclass(slots=True)
class ArchiveFile(OutgoingFile):
    """A file for ``torch.load``.

    Each byte is hashed only once; the CRC-32 of each storage in the archive and of each chunk are combined from the
    same pieces.
    """

    pickled: bytes
    """Content of ``data.pkl``."""
    payloads: Mapping[str, Payload]
    """Payloads of the storages by key, in order."""
    _built: torch_zip.BuiltArchive = field(init=False)

    def __post_init__(self) -> None:
        sizes = {key: payload.nbytes for key, payload in self.payloads.items()}
        prefix = posixpath.splitext(posixpath.basename(self.name))[0]
        if len(self.pickled) <= SMALL_PICKLE_BYTES:
            self._built = _small_archive(self.pickled, tuple(sizes.items()), prefix, self.name)
        else:
            self._built = torch_zip.build(self.pickled, sizes, prefix=prefix, path=self.name)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._built.nbytes

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the file, in order; wait for each storage's checksum, which precedes its bytes."""
        size = chunk_bytes(self.nbytes)
        self._hashed = []
        yield from self.stream_at(0, size, mapped(partial(_hash, size), self.placed(0)), self._hashed)

    def placed(self, at: int) -> list[tuple[int, Payload]]:
        """Return the payloads, each with the byte at which it begins, of an archive that begins at byte ``at``."""
        return [(at + self._built.payloads[key].start, payload) for key, payload in self.payloads.items()]

    def stream_at(
        self, at: int, size: int, hashed: Iterator[list[Hashed]], found: list[Hashed]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of an archive within a file.

        Args:
            at: The byte of the file at which it begins.
            size: Bytes of the file's chunks.
            hashed: Yields the checksums of each payload.
            found: Gets the checksums of all bytes.
        """
        built = self._built
        crcs: dict[str, int] = {}
        for n, ((key, payload), of_payload) in enumerate(zip(self.payloads.items(), hashed, strict=False)):
            crcs[key] = _combined(of_payload)
            data = built.literal(n, {key: crcs[key]})
            found += _hash(size, (at + built.literals[n][0], HostPayload(data)))
            yield data
            yield from _pieces(payload)
            found += of_payload
        start, data = built.literals[-1][0], built.literal(-1, crcs)
        self._directory = built.directory, crc32(memoryview(data)[built.directory - start :])
        found += _hash(size, (at + start, HostPayload(data)))
        yield data

    def whole(self) -> bytes:
        """Return all bytes of a small archive."""
        contents = {key: bytes(payload.read(0, payload.nbytes)) for key, payload in self.payloads.items()}
        crcs = {key: crc32(content) for key, content in contents.items()}
        before = (self._built.literal(n, {key: crcs[key]}) for n, key in enumerate(contents))
        parts = chain.from_iterable(zip(before, contents.values(), strict=True))
        return b"".join([*parts, self._built.literal(-1, crcs)])


@lru_cache(maxsize=1024)
def _small_archive(
    pickled: bytes, sizes: tuple[tuple[str, int], ...], prefix: str, path: str
) -> torch_zip.BuiltArchive:
    """Lay out an archive; many of a model are equal but for the bytes of their storages."""
    return torch_zip.build(pickled, dict(sizes), prefix=prefix, path=path)


@dataclass(slots=True)
class Archives(OutgoingFile):
    """Archives for ``torch.load`` in one file, as ``torch.distributed.checkpoint`` writes them."""

    archives: Sequence[ArchiveFile]
    starts: Sequence[int] = field(init=False)
    """First byte of each archive; a multiple of ALIGNMENT, so that tensors are aligned too."""
    nbytes: int = field(init=False)
    """Size in bytes."""

    def __post_init__(self) -> None:
        ends = [*accumulate((aligned(archive.nbytes) for archive in self.archives), initial=0)]
        self.starts = ends[:-1]
        self.nbytes = self.starts[-1] + self.archives[-1].nbytes if self.archives else 0

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the file, in order."""
        size, end = chunk_bytes(self.nbytes), 0
        placed = [*zip(self.archives, self.starts, strict=True)]
        hashed = mapped(
            partial(_hash, size),
            [one for archive, at in placed if archive.nbytes > SMALL_BYTES for one in archive.placed(at)],
        )
        self._hashed = []
        joined = bytearray()
        for archive, at in placed:
            joined += bytes(at - end)
            small = archive.nbytes <= SMALL_BYTES
            if small:
                joined += archive.whole()
            if joined and (not small or len(joined) > SMALL_BYTES or archive is self.archives[-1]):
                first = (at + archive.nbytes if small else at) - len(joined)
                self._hashed += _hash(size, (first, HostPayload(memoryview(joined))))
                yield bytes(joined)
                joined.clear()
            if not small:
                yield from archive.stream_at(at, size, hashed, self._hashed)
            end = at + archive.nbytes


def aligned(nbytes: int) -> int:
    """Return a size with padding to the alignment of the archives in a file."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _hash(size: int, placed: tuple[int, Payload]) -> list[Hashed]:
    """Compute the checksums of a payload at an offset in a file, split at chunk boundaries."""
    first, payload = placed
    return [(a, b - a, crc32(payload.read(a - first, b - first))) for a, b in cuts(first, first + payload.nbytes, size)]


def _combined(hashed: Iterable[Hashed]) -> int:
    """Combine the CRC-32 of consecutive pieces."""
    whole = 0
    for _, nbytes, crc in hashed:
        whole = combine(whole, crc, nbytes)
    return whole


def _pieces(payload: Payload) -> Iterator[memoryview]:
    for start in range(0, payload.nbytes, READ_BYTES):
        yield payload.read(start, min(payload.nbytes, start + READ_BYTES))


ALREADY = "exists already: another process saves the same checkpoint"


def write_files(
    storage: WritableStorage,
    directory: str,
    files: Sequence[OutgoingFile],
    check: Callable[[], None],
    proceed: Callable[[], None] = lambda: None,
) -> list[Checksums]:
    """Write new files; return their checksums, in order.

    Args:
        storage: Storage of the checkpoint.
        directory: Directory of the checkpoint.
        files: The files of this rank.
        check: Called right before the commit of each file; raises an error if another save has taken the directory.
        proceed: Called before each block; raises an error to stop.

    Raises:
        TakenError: Another process has written one of the files.
        StorageError: A file cannot be written.
    """
    paths = [posixpath.join(directory, file.name) for file in files]
    directories = {directory, *map(posixpath.dirname, paths)}
    for one in directories - {directory}:
        storage.make_directory(one)
    with ThreadPoolExecutor(1, thread_name_prefix="ckpttool-hash") as pool:
        write = partial(_write_file, storage, pool, check, proceed)
        tasks = (partial(write, *one) for one in zip(paths, files, strict=True))
        for _ in in_threads(tasks, jobs=2 if storage.remote else 1):  # a small file is a wait for answers
            pass
    for one in directories:
        storage.sync(one)
    return [file.checksums for file in files]


def _write_file(
    storage: WritableStorage,
    pool: ThreadPoolExecutor,
    check: Callable[[], None],
    proceed: Callable[[], None],
    path: str,
    file: OutgoingFile,
) -> None:
    def blocks() -> Iterator[bytes | memoryview]:
        for block in file.stream(pool.map):
            proceed()
            yield block

    try:
        writer = storage.writer(path, file.nbytes, new=True)
        try:
            write_stream(writer, blocks(), at_once=storage.parts_at_once)
            check()
            writer.commit()
        except BaseException:
            with contextlib.suppress(CkptError):
                writer.discard()
            raise
    except ExistsError as error:
        raise TakenError(path, ALREADY, TAKEN) from error


def put_new(storage: WritableStorage, path: str, data: bytes) -> None:
    """Write a new small file.

    Raises:
        TakenError: Another process has written the file.
        StorageError: The file cannot be written.
    """
    if not storage.put_new(path, data):
        raise TakenError(path, ALREADY, TAKEN)
