"""Files as a rank is about to write them: where their bytes lie in memory, and their checksums."""

from __future__ import annotations

import hashlib
import posixpath
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ckpttool.checksums import chunk_bytes, combine, crc32, cuts, of_pieces
from ckpttool.containers import torch_zip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckpttool.checksums import Checksums

READ_BYTES = 1 << 23
"""Bytes of a payload that are asked for at a time."""

Hashed = tuple[int, int, int]
"""First byte in the file, bytes, CRC-32; none reaches from one chunk into the next."""


class Payload(Protocol):
    """Bytes that lie somewhere in memory, perhaps not in the host's."""

    nbytes: int
    """How many."""

    def read(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), valid until the next call."""


class Held:
    """Bytes in the host's memory.

    Args:
        data: The bytes; what owns them lives as long.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._view = memoryview(data)
        self.nbytes = self._view.nbytes

    def read(self, start: int, end: int) -> memoryview:
        """The bytes [start, end)."""
        return self._view[start:end]


class Mapper(Protocol):
    """What ``map`` does, or an executor's ``map``, which runs ahead of what is asked for."""

    def __call__(
        self, function: Callable[[tuple[int, Payload]], list[Hashed]], values: Iterable[tuple[int, Payload]], /
    ) -> Iterator[list[Hashed]]:
        """What the function makes of each value, in order."""


class OutgoingFile(Protocol):
    """A file to write."""

    @property
    def name(self) -> str:
        """Relative to the checkpoint's directory, with "/" between directories."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def checksums(self) -> Checksums:
        """Of its bytes; known when ``stream`` has ended."""

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """All its bytes, in order; what is yielded is valid until the next is asked for.

        Args:
            mapped: How the checksums are computed.
        """


@dataclass(slots=True)
class PlainFile:
    """A file that is one run of bytes."""

    name: str
    payload: Payload
    _hashed: list[Hashed] = field(init=False, default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.payload.nbytes

    @property
    def checksums(self) -> Checksums:
        """Of its bytes; known when ``stream`` has ended."""
        return of_pieces(self.nbytes, self._hashed)

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """All its bytes, in order."""
        hashed = mapped(partial(_hash, chunk_bytes(self.nbytes)), [(0, self.payload)])
        yield from _pieces(self.payload)
        (self._hashed,) = hashed


@dataclass(slots=True)
class TorchFile:
    """A file that ``torch.load`` reads.

    Each byte is hashed once: for the CRC-32 that the archive records of each storage, and for those of the chunks.
    """

    name: str
    pickled: bytes
    """``data.pkl``."""
    payloads: Mapping[str, Payload]
    """The storages by key, in order."""
    _built: torch_zip.BuiltArchive = field(init=False)
    _hashed: list[Hashed] = field(init=False, default_factory=list)
    _directory: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._built = self._build({})

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._built.nbytes

    @property
    def checksums(self) -> Checksums:
        """Of its bytes; known when ``stream`` has ended."""
        return of_pieces(self.nbytes, self._hashed, self._directory)

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """All its bytes, in order. Before each storage stands its checksum: it is waited for."""
        where, size = self._built.payloads, chunk_bytes(self.nbytes)
        hashed = mapped(partial(_hash, size), [(where[key].start, p) for key, p in self.payloads.items()])
        keys = {where[key].start: key for key in self.payloads}
        crcs: dict[str, int] = {}
        self._hashed = []
        *literals, (end, _) = self._built.literals
        for start, literal in literals:
            key = keys.get(start + len(literal))  # no other literal ends where a storage begins
            if key is None:
                yield self._taken(start, literal, size)
                continue
            of_payload = next(hashed)
            crcs[key] = _combined(of_payload)
            yield self._taken(start, torch_zip.with_crc32(literal, crcs[key]), size)
            yield from _pieces(self.payloads[key])
            self._hashed += of_payload
        directory = self._build(crcs).literals[-1][1]
        self._directory = end, crc32(directory)
        yield self._taken(end, directory, size)

    def _taken(self, start: int, literal: bytes, size: int) -> bytes:
        self._hashed += _hash(size, (start, Held(literal)))
        return literal

    def _build(self, crcs: Mapping[str, int]) -> torch_zip.BuiltArchive:
        sizes = {key: payload.nbytes for key, payload in self.payloads.items()}
        prefix = posixpath.splitext(posixpath.basename(self.name))[0]
        return torch_zip.build(self.pickled, sizes, prefix=prefix, path=self.name, crc32=crcs)


@dataclass(slots=True)
class HashedFile:
    """A file to write, of which the SHA-256 of each chunk is computed on the way."""

    inner: OutgoingFile
    """The file."""
    _digests: tuple[bytes, ...] = ()

    @property
    def name(self) -> str:
        """As its."""
        return self.inner.name

    @property
    def nbytes(self) -> int:
        """As its."""
        return self.inner.nbytes

    @property
    def checksums(self) -> Checksums:
        """Of its bytes; known when ``stream`` has ended."""
        return replace(self.inner.checksums, sha256=self._digests)

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """All its bytes, in order."""
        size, at, current = chunk_bytes(self.nbytes), 0, hashlib.sha256()
        digests: list[bytes] = []
        for data in self.inner.stream(mapped):
            view = memoryview(data)
            for start, end in cuts(at, at + len(view), size):
                current.update(view[start - at : end - at])
                if end % size == 0:
                    digests.append(current.digest())
                    current = hashlib.sha256()
            at += len(view)
            yield data
        if at % size:
            digests.append(current.digest())
        self._digests = tuple(digests)


def _hash(size: int, placed: tuple[int, Payload]) -> list[Hashed]:
    """Checksums of bytes that begin somewhere in a file, cut where its chunks begin."""
    first, payload = placed
    return [(a, b - a, crc32(payload.read(a - first, b - first))) for a, b in cuts(first, first + payload.nbytes, size)]


def _combined(hashed: Iterable[Hashed]) -> int:
    """CRC-32 of all that follow one another."""
    whole = 0
    for _, nbytes, crc in hashed:
        whole = combine(whole, crc, nbytes)
    return whole


def _pieces(payload: Payload) -> Iterator[memoryview]:
    for start in range(0, payload.nbytes, READ_BYTES):
        yield payload.read(start, min(payload.nbytes, start + READ_BYTES))
