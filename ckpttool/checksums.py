"""CRC-32 of a file in chunks, so that any range of it can be checked without reading the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32  # zlib's, and seven times as fast

from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Checksums", "Record", "chunk_bytes", "chunk_records", "combine", "crc32", "cuts", "of_bytes", "of_pieces"]

MIN_CHUNK_BYTES = 1 << 20
"""Chunks are no shorter than this,"""
MAX_CHUNKS = 1 << 10
"""and a file has no more of them."""
_POLYNOMIAL = 0xEDB88320


@dataclass(frozen=True, slots=True)
class Checksums:
    """CRC-32 of each chunk of a file, in order; where it is to be signed, SHA-256 too."""

    nbytes: int
    """Size of the file."""
    chunk_bytes: int
    """Size of each chunk but the last."""
    crcs: tuple[int, ...]
    """One of each chunk; none of an empty file."""
    directory: tuple[int, int] | None = None
    """Of a ZIP archive, the first byte of its directory, and the CRC-32 of all bytes from there on.

    The directory has the CRC-32 of every record: with this one checksum a few kilobytes of a large file can be read and
    compared with what was saved.
    """
    sha256: tuple[bytes, ...] = ()
    """SHA-256 of each chunk, 32 bytes each; none where nobody asked for it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A range of a file whose CRC-32 is known: a record of an archive, or a chunk that a manifest has."""

    name: str
    """Full name, prefix included: "archive/data/0"."""
    where: ByteRange
    """Its payload, counted from the start of the file."""
    crc32: int
    """CRC-32 of the payload; 0 over a payload that is not empty means "not recorded"."""

    @property
    def crc_recorded(self) -> bool:
        """Whether a checksum was recorded (torch leaves 0 when told not to compute it)."""
        return self.crc32 != 0 or self.where.nbytes == 0


def chunk_records(sums: Checksums) -> tuple[Record, ...]:
    """The chunks of a file as records."""
    chunks = zip(cuts(0, sums.nbytes, sums.chunk_bytes), sums.crcs, strict=True)
    return tuple(Record(f"chunk {n}", ByteRange(*where), crc) for n, (where, crc) in enumerate(chunks))


def chunk_bytes(nbytes: int) -> int:
    """How large the chunks of a file are: a power of two."""
    size = MIN_CHUNK_BYTES
    while size * MAX_CHUNKS < nbytes:
        size *= 2
    return size


def cuts(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """The range [start, end) of a file, cut where chunks begin."""
    while start < end:
        following = min(end, (start // size + 1) * size)
        yield start, following
        start = following


def combine(first: int, second: int, nbytes: int) -> int:
    """CRC-32 of bytes followed by others, from the CRC-32 of each.

    Source: zlib 1.3, crc32.c (``crc32_combine_op``).

    Args:
        first: Of those before.
        second: Of those behind.
        nbytes: How many lie behind.
    """
    return _product(_power(nbytes), first) ^ second if nbytes else first


def of_pieces(
    nbytes: int, pieces: Iterable[tuple[int, int, int]], directory: tuple[int, int] | None = None
) -> Checksums:
    """Checksums of a file from those of its pieces.

    Args:
        nbytes: Size of the file.
        pieces: (first byte, bytes, CRC-32), which cover it in order; none reaches from one chunk into the next.
        directory: As in ``Checksums``.
    """
    size = chunk_bytes(nbytes)
    crcs = [0] * -(-nbytes // size)
    for start, length, crc in pieces:
        crcs[start // size] = combine(crcs[start // size], crc, length)
    return Checksums(nbytes, size, tuple(crcs), directory)


def of_bytes(data: bytes) -> Checksums:
    """Checksums of a small file."""
    size = chunk_bytes(len(data))
    view = memoryview(data)
    return Checksums(len(data), size, tuple(crc32(view[a:b]) for a, b in cuts(0, len(data), size)))


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """The power 8 * nbytes of x, modulo CRC-32's polynomial."""
    result, factor, bits = 1 << 31, _X8, nbytes
    while bits:
        if bits & 1:
            result = _product(factor, result)
        factor = _product(factor, factor)
        bits >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Of two polynomials, modulo CRC-32's; bits reflected."""
    result, bit = 0, 1 << 31
    while a:
        if a & bit:
            result ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return result


_X8 = 1 << 23
"""x to the power of 8."""
