"""Files as a rank is about to write them: where their bytes lie in memory, and their checksums."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ckpttool.checksums import Checksums, chunk_bytes, combine, crc32, cuts, of_pieces
from ckpttool.containers import torch_zip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


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


class OutgoingFile(Protocol):
    """A file to write."""

    name: str
    """Relative to the checkpoint's directory, with "/" between directories."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def seal(self) -> Checksums:
        """Compute the checksums; from now on ``parts`` can be asked for all bytes."""

    def bulk(self) -> Iterator[tuple[int, Payload]]:
        """(first byte, bytes) of what is large and known before ``seal``."""

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """(first byte, bytes) of everything else; known after it."""


@dataclass(slots=True)
class PlainFile:
    """A file that is one run of bytes."""

    name: str
    payload: Payload

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.payload.nbytes

    def seal(self) -> Checksums:
        """The checksums of its bytes."""
        size = chunk_bytes(self.nbytes)
        return of_pieces(
            self.nbytes,
            ((a, b - a, crc32(self.payload.read(a, b))) for a, b in cuts(0, self.nbytes, size)),
        )

    def bulk(self) -> Iterator[tuple[int, Payload]]:
        """All of it."""
        yield 0, self.payload

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """Nothing."""
        return iter(())


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

    def __post_init__(self) -> None:
        self._built = self._build({})

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._built.nbytes

    def _build(self, crcs: Mapping[str, int]) -> torch_zip.BuiltArchive:
        sizes = {key: payload.nbytes for key, payload in self.payloads.items()}
        prefix = posixpath.splitext(posixpath.basename(self.name))[0]
        return torch_zip.build(self.pickled, sizes, prefix=prefix, path=self.name, crc32=crcs)

    def seal(self) -> Checksums:
        """The checksums of its bytes; the archive's own are recorded as well."""
        size = chunk_bytes(self.nbytes)
        pieces: list[tuple[int, int, int]] = []
        crcs: dict[str, int] = {}
        for key, payload in self.payloads.items():
            where, whole = self._built.payloads[key], 0
            for a, b in cuts(where.start, where.end, size):
                crc = crc32(payload.read(a - where.start, b - where.start))
                whole = combine(whole, crc, b - a)
                pieces.append((a, b - a, crc))
            crcs[key] = whole
        self._built = self._build(crcs)
        for start, data in self._built.literals:
            view = memoryview(data)
            for a, b in cuts(start, start + len(data), size):
                pieces.append((a, b - a, crc32(view[a - start : b - start])))
        return of_pieces(self.nbytes, sorted(pieces))

    def bulk(self) -> Iterator[tuple[int, Payload]]:
        """The storages."""
        for key, payload in self.payloads.items():
            yield self._built.payloads[key].start, payload

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """What the archive has around them."""
        return iter(self._built.literals)


def pieces(file: OutgoingFile) -> list[tuple[int, int, Callable[[int, int], memoryview]]]:
    """All bytes of a sealed file: (first byte, one past the last, reads a range counted from the first), in order."""
    found = [(start, start + p.nbytes, p.read) for start, p in file.bulk() if p.nbytes]
    found += [(start, start + len(data), Held(data).read) for start, data in file.rest() if data]
    return sorted(found, key=lambda piece: piece[0])
