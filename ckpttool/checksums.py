"""Compute CRC-32 checksums of a file in chunks, so that readers can check a range without reading the rest."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from isal import isal_zlib

from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Checksums",
    "Record",
    "Records",
    "chunk_bytes",
    "chunk_records",
    "combine",
    "crc32",
    "cuts",
    "of_bytes",
    "of_pieces",
]

MIN_CHUNK_BYTES = 1 << 20
"""Least size of a chunk, in bytes."""
MAX_CHUNKS = 1 << 10
"""Most chunks of a file."""
_POLYNOMIAL = 0xEDB88320


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return zlib's CRC-32, seven times as fast as zlib.

    isal leaves the upper halves of the vector registers set. Then SSE code, as in many loops of numpy and ml_dtypes,
    takes up to four times as long, until AVX code clears them: any small reduction of numpy does.
    """
    found: int = isal_zlib.crc32(data, value)
    if len(data) >= SETTLED_BYTES and "numpy" in sys.modules:
        _small_array().max()
    return found


@cache
def _small_array() -> NDArray[np.float32]:
    import numpy as np

    return np.zeros(64, dtype=np.float32)


SETTLED_BYTES = 1 << 14
"""Least bytes of a checksum after which the registers are cleared: less data takes no longer than the call."""


class Checksums(NamedTuple):
    """CRC-32 of each chunk of a file, in order."""

    nbytes: int
    """Size of the file in bytes."""
    chunk_bytes: int
    """Size of each chunk but the last, in bytes."""
    crcs: tuple[int, ...]
    """CRC-32 of each chunk; empty for an empty file."""
    directory: tuple[int, int] | None = None
    """Offset of a ZIP archive's central directory, and the CRC-32 of all bytes from there on; None for other files.

    The directory has the CRC-32 of every record: with this one checksum readers can check a few kilobytes of a large
    file.
    """


class Record(NamedTuple):
    """A range of a file with a recorded CRC-32: a record of an archive, or a chunk in a manifest."""

    name: str
    """Full name, prefix included: "archive/data/0"."""
    where: ByteRange
    """Range of its payload in the file."""
    crc32: int
    """CRC-32 of the payload; 0 over a payload that is not empty means "not recorded"."""

    @property
    def crc_recorded(self) -> bool:
        """Whether a checksum was recorded (torch writes 0 if configured not to compute it)."""
        return self.crc32 != 0 or self.where.nbytes == 0


class Records(Sequence[Record]):
    """The records of an archive, packed: checkpoints of large models have millions, too many for an object each.

    Args:
        names: Name of each record.
        places: First byte of each payload, the byte after its last, and its CRC-32.
    """

    __slots__ = ("_places", "names")

    def __init__(self, names: Sequence[str], places: Iterable[tuple[int, int, int]]) -> None:
        self.names = names
        self._places = b"".join(starmap(_PLACE.pack, places))

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        start, end, crc = _PLACE.unpack_from(self._places, _PLACE.size * range(len(self))[index])
        return Record(self.names[index], ByteRange(start, end), crc)

    def __iter__(self) -> Iterator[Record]:
        for name, (start, end, crc) in zip(self.names, _PLACE.iter_unpack(self._places), strict=True):
            yield Record(name, ByteRange(start, end), crc)

    def sizes(self) -> list[int]:
        """Return the bytes of each payload."""
        return [end - start for start, end, _ in _PLACE.iter_unpack(self._places)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # compared by value


class ChunkRecords(Sequence[Record]):
    """The records of the archives within one file, with the name of the chunk before each name.

    Args:
        chunks: Name of each chunk, its first byte in the file, and the records of its archive.
    """

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Iterable[tuple[str, int, Sequence[Record]]] = ()) -> None:
        self._chunks = tuple(chunks)

    def __len__(self) -> int:
        return sum(len(records) for _, _, records in self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Record]:
        for chunk, first, records in self._chunks:
            for name, where, crc in records:
                yield Record(f"{chunk}: {name}", ByteRange(first + where.start, first + where.end), crc)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # compared by value


_PLACE = struct.Struct("<3q")


def chunk_records(sums: Checksums) -> tuple[Record, ...]:
    """Return the chunks of a file as records."""
    chunks = zip(cuts(0, sums.nbytes, sums.chunk_bytes), sums.crcs, strict=True)
    return tuple(Record(f"chunk {n}", ByteRange(*where), crc) for n, (where, crc) in enumerate(chunks))


def chunk_bytes(nbytes: int, least: int | None = None) -> int:
    """Return the chunk size for a file of ``nbytes`` bytes: a power of two, in bytes, not below ``least``."""
    size = MIN_CHUNK_BYTES if least is None else least
    while size * MAX_CHUNKS < nbytes:
        size *= 2
    return size


def cuts(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Split the range [start, end) of a file at the boundaries of chunks of ``size`` bytes."""
    while start < end:
        following = min(end, (start // size + 1) * size)
        yield start, following
        start = following


def combine(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two concatenated byte strings from the CRC-32 of each.

    Source: zlib 1.3, crc32.c (``crc32_combine_op``).

    Args:
        first: CRC-32 of the first string.
        second: CRC-32 of the second string.
        nbytes: Length of the second string in bytes.
    """
    return _product(_power(nbytes), first) ^ second if nbytes else first


def of_pieces(
    nbytes: int, pieces: Iterable[tuple[int, int, int]], directory: tuple[int, int] | None = None
) -> Checksums:
    """Combine the checksums of a file's pieces to the file's checksums.

    Args:
        nbytes: Size of the file in bytes.
        pieces: (first byte, size in bytes, CRC-32) in order; they cover the file, and none crosses a chunk boundary.
        directory: As in ``Checksums``.
    """
    size = chunk_bytes(nbytes)
    crcs = [0] * -(-nbytes // size)
    for start, length, crc in pieces:
        crcs[start // size] = combine(crcs[start // size], crc, length)
    return Checksums(nbytes, size, tuple(crcs), directory)


def of_bytes(data: bytes, least: int | None = None) -> Checksums:
    """Compute the checksums of a small file, in chunks of at least ``least`` bytes, a power of two."""
    size = chunk_bytes(len(data), least)
    view = memoryview(data)
    return Checksums(len(data), size, tuple(crc32(view[a:b]) for a, b in cuts(0, len(data), size)))


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """Return x to the power 8 * nbytes, modulo the polynomial of CRC-32."""
    result, factor, bits = 1 << 31, _X8, nbytes
    while bits:
        if bits & 1:
            result = _product(factor, result)
        factor = _product(factor, factor)
        bits >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Multiply two polynomials modulo the polynomial of CRC-32; bits reflected."""
    result, bit = 0, 1 << 31
    while a:
        if a & bit:
            result ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return result


_X8 = 1 << 23
"""x to the power 8, bits reflected."""
