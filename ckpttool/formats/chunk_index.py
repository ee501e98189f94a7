"""The index of a save of a torch run: the place of each chunk of its distributed checkpoint.

``.metadata`` is a pickle, which takes a second to read for some 20,000 chunks, and the values of a chunk begin
somewhere in its archive. CHUNK_INDEX has all places in a form that is read at once: JSON, a newline and numbers of 8
bytes, which are compressed with zlib. It counts beside the ``.metadata`` that it was written with alone.
"""

from __future__ import annotations

import json
import posixpath
import sys
import zlib
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checksums import crc32
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ckpttool.storage import Storage

CHUNK_INDEX = "ckpttool_chunks.bin"
"""Name of the index, beside ``.metadata``."""
VERSION = 1
"""Version of its content; readers ignore others."""
MAX_BYTES = 1 << 30
"""Most bytes of its content."""

Path = tuple[str | int, ...]
"""Keys of a value in the nested state dict."""


class StoredChunk(NamedTuple):
    """A part of a tensor, or an object, stored as an archive in a file."""

    offsets: tuple[int, ...]
    """Index of its first element in each dimension."""
    sizes: tuple[int, ...]
    """Its shape."""
    file: str
    """Name of the file, in the directory of the metadata."""
    start: int
    """First byte of the archive."""
    nbytes: int
    """Its size in bytes."""
    first: int = 0
    """The byte of the archive at which the values begin; 0 for an object."""


class StoredEntry(NamedTuple):
    """One entry of a distributed checkpoint."""

    path: Path
    """Keys of the entry in the state dict."""
    dtype: str | None
    """Of a tensor, safetensors' spelling; None for an object."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    chunks: Collection[StoredChunk]
    """Its parts; of an object, its archive."""

    @property
    def fqn(self) -> str:
        """Name of the entry in the flattened state dict."""
        return ".".join(map(str, self.path))


def chunk_index(entries: Iterable[StoredEntry], metadata: bytes) -> bytes:
    """Return the content of the index beside some metadata."""
    files: dict[str, int] = {}
    rows, numbers = [], array("q")
    for entry in entries:
        rows.append([list(entry.path), entry.dtype, list(entry.shape), len(entry.chunks)])
        for chunk in entry.chunks:
            file = files.setdefault(chunk.file, len(files))
            numbers.extend((file, chunk.start, chunk.nbytes, chunk.first, *chunk.offsets, *chunk.sizes))
    header = {"version": VERSION, "metadata": _identity(metadata), "files": list(files), "entries": rows}
    if sys.byteorder == "big":
        numbers.byteswap()
    return zlib.compress(json.dumps(header).encode() + b"\n" + numbers.tobytes(), 1)


def read_chunk_index(storage: Storage, directory: str, metadata: bytes) -> Iterator[StoredEntry] | None:
    """Read the entries of the index.

    Args:
        storage: The storage of the checkpoint.
        directory: The directory of ``.metadata``.
        metadata: The content of ``.metadata``.

    Returns:
        The entries; None without an index, or beside other metadata.

    Raises:
        LayoutError: The index is damaged.
    """
    path = posixpath.join(directory, CHUNK_INDEX)
    if not storage.exists(path):
        return None
    with storage.open(path) as reader:
        packed = reader.read(0, reader.nbytes)
    try:
        inflate = zlib.decompressobj()
        text, _, binary = inflate.decompress(packed, MAX_BYTES).partition(b"\n")
        header = json.loads(text)
        if header["version"] != VERSION or header["metadata"] != _identity(metadata):
            return None
        numbers = array("q", binary)
        rows, files = header["entries"], header["files"]
        sound = inflate.eof and all(map(_is_row, rows)) and all(map(_is_file, files))
        whole = sound and sum(map(_numbers_of, rows)) == len(numbers)
    except (zlib.error, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise LayoutError(path, "is damaged", RESTORE) from error
    if sys.byteorder == "big":
        numbers.byteswap()
    if not whole or min(numbers, default=0) < 0:
        raise LayoutError(path, "is damaged", RESTORE)
    return _entries(path, rows, files, numbers)


def _is_row(row: Any) -> bool:
    """Return whether JSON data describes an entry: keys, type, shape and number of chunks."""
    keys, dtype, shape, count = row
    numbers = [*shape, count]
    return (
        isinstance(keys, list)
        and all(isinstance(key, str | int) for key in keys)
        and (dtype is None or isinstance(dtype, str))
        and all(type(number) is int and number >= 0 for number in numbers)
        and (dtype is not None or count == 1)
    )


def _is_file(name: Any) -> bool:
    """Return whether JSON data is the name of a file in the directory itself."""
    return isinstance(name, str) and name not in {"", ".", ".."} and "/" not in name and "\0" not in name


def _numbers_of(row: Sequence[Any]) -> int:
    """Return how many numbers the chunks of an entry have."""
    _, dtype, shape, count = row
    return int(count) * (4 + (0 if dtype is None else 2 * len(shape)))


def _entries(path: str, rows: Sequence[Any], files: Sequence[str], numbers: Sequence[int]) -> Iterator[StoredEntry]:
    at = 0
    for keys, dtype, shape, count in rows:
        dimensions = 0 if dtype is None else len(shape)
        width = 4 + 2 * dimensions
        chunks = []
        for start in range(at, at + count * width, width):
            file, begin, nbytes, first, *box = numbers[start : start + width]
            if file >= len(files):
                raise LayoutError(path, "is damaged", RESTORE)
            name = files[file]
            chunks.append(StoredChunk(tuple(box[:dimensions]), tuple(box[dimensions:]), name, begin, nbytes, first))
        at += count * width
        yield StoredEntry(tuple(keys), dtype, tuple(shape), chunks)


def _identity(metadata: bytes) -> list[int]:
    """Return the size and the CRC-32 of metadata."""
    return [len(metadata), crc32(metadata)]
