"""Shards of ``torch.distributed.checkpoint``: files that hold a ``torch.save`` file for each chunk and object.

Source: torch 2.13, distributed/checkpoint/metadata.py and filesystem.py (``FileSystemWriter``).
"""

from __future__ import annotations

import itertools
import math
import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.budget import CHUNKS, spend
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.containers.torch_zip import MAGIC, parse
from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.dtypes import BY_TORCH_NAME, itemsize, parse_number
from ckpttool.errors import ChecksumError, CkptError, LayoutError, TruncatedError
from ckpttool.formats.fields import MAX_DIMENSIONS, Fields, shape_of
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.strided import Box, merge_slices
from ckpttool.formats.torch_tensors import whole_tensor
from ckpttool.messages import brief
from ckpttool.model import CheckpointFile, ScalarState, State, tensor_number
from ckpttool.model.places import Table
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpttool.checksums import Record
    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.storage import Reader, Storage

METADATA = ".metadata"
"""The file with the metadata of a checkpoint."""
HEAD_BYTES, TAIL_BYTES = 1 << 11, 1 << 12
"""Bytes of the pickle at the start of a chunk, and of the ZIP directory at its end."""

ChunkKey = tuple[str, "tuple[int, ...] | None"]
"""Name of a tensor and offset of the chunk in it; the offset is None for an object."""


class _FilePart:
    """Reads a part of a file as a file."""

    def __init__(self, reader: Reader, start: int, nbytes: int) -> None:
        self.path = reader.path
        self.nbytes = nbytes
        self.version = reader.version
        self.remote = reader.remote
        self._reader = reader
        self._start = start

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of the part."""
        return self._reader.read(self._start + start, self._start + end)

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range."""
        return self._reader.read_many([ByteRange(self._start + r.start, self._start + r.end) for r in ranges])

    def close(self) -> None:
        """Do nothing: the owner of the file closes it."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Position of a stored chunk of a tensor, or of an object."""

    file: str
    """The shard."""
    start: int
    """First byte."""
    nbytes: int
    """Size in bytes."""


class Shards:
    """The open files of one checkpoint.

    Args:
        storage: Their storage.
        directory: The checkpoint.
        chunks: Position of each chunk and object.
        metadata: The file of the metadata.
    """

    def __init__(
        self, storage: Storage, directory: str, chunks: dict[ChunkKey, StoredChunk], metadata: CheckpointFile
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._chunks = chunks
        self._files = [metadata]
        self._opened: dict[str, tuple[int, Reader]] = {}
        """Index and reader of each open file, by name."""
        self._records: dict[int, list[Record]] = {}
        """Records with checksums of each file, by its index."""
        if storage.remote:
            self._prefetch()

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """Return the opened files, with their checksums."""
        return tuple(replace(file, records=tuple(self._records.get(n, ()))) for n, file in enumerate(self._files))

    def close(self) -> None:
        """Close all files."""
        for _, reader in self._opened.values():
            reader.close()

    def _open(self, chunk: StoredChunk) -> tuple[int, _FilePart]:
        if chunk.file not in self._opened:
            reader = self._storage.open(posixpath.join(self._directory, chunk.file), ahead=True)
            self._opened[chunk.file] = len(self._files), reader
            file = CheckpointFile(chunk.file, reader.nbytes, "shard", None, reader.version, container="dcp")
            self._files.append(file)
        index, reader = self._opened[chunk.file]
        if chunk.start + chunk.nbytes > reader.nbytes:
            raise LayoutError(reader.path, f"has {reader.nbytes:,} bytes, fewer than {METADATA} says", RESTORE)
        return index, _FilePart(reader, chunk.start, chunk.nbytes)

    def _prefetch(self) -> None:
        """Read both ends of all chunks at once: they hold the structure."""
        ends: dict[str, list[ByteRange]] = {}
        for chunk in self._chunks.values():
            self._open(chunk)
            last = chunk.start + chunk.nbytes
            ranges = ends.setdefault(chunk.file, [])
            ranges.append(ByteRange(chunk.start, min(chunk.start + HEAD_BYTES, last)))
            ranges.append(ByteRange(max(chunk.start, last - TAIL_BYTES), last))
        for file, ranges in ends.items():
            self._opened[file][1].read_ahead(ranges)

    def tensor(self, fqn: str, entry: Fields) -> State:
        """Locate a tensor from its chunks: each is a box of the tensor, stored as a ``torch.save`` file within a file.

        Args:
            fqn: Its fully qualified name.
            entry: Its description in the metadata.

        Raises:
            LayoutError: The chunks do not fit the tensor, or hold no tensor.
        """
        shape = shape_of(entry.get("size", object))
        if shape is None:
            raise entry.error(fqn, "has no shape")
        chunks = entry.get("chunks", list)
        spend(CHUNKS, len(chunks), entry.path)
        parts: list[tuple[State, list[Box]]] = []
        seen: set[tuple[int, ...]] = set()
        for value in chunks:
            offsets, sizes = _chunk_box(fqn, entry, fields_of(entry.path, value), shape)
            if math.prod(sizes) == 0:
                continue
            chunk = self._chunks.get((fqn, offsets))
            if chunk is None:
                raise entry.error(fqn, f"has a chunk at {offsets} without stored bytes")
            if offsets in seen:
                raise entry.error(fqn, f"has two chunks at {offsets}")
            seen.add(offsets)
            parts.append((self._chunk(chunk, fqn, sizes), _boxes(offsets, sizes, shape)))
        if not parts:
            return merge_slices([], shape, _recorded_dtype(entry))
        if len({state.dtype for state, _ in parts}) > 1:
            raise entry.error(fqn, "has chunks of several types")
        return merge_slices(parts, shape)

    def _chunk(self, chunk: StoredChunk, fqn: str, sizes: tuple[int, ...]) -> State:
        index, part = self._open(chunk)
        try:
            torch = read_torch_file(part)
        except CkptError as error:
            raise _damaged(fqn, chunk, part, error) from error
        if not isinstance(torch.root, TensorRef) or torch.root.shape != sizes:
            raise LayoutError(part.path, f"holds no chunk of {fqn} at byte {chunk.start:,}", RESTORE)
        state = whole_tensor(torch, index, torch.root)
        rows = state.extents.copy()
        rows["offset"] += chunk.start
        self._note(index, chunk, fqn, torch.records)
        return State(state.shape, state.dtype, Table(rows))

    def _note(self, index: int, chunk: StoredChunk, fqn: str, records: Iterable[Record]) -> None:
        """Add the records of a chunk's archive to those of its file."""
        self._records.setdefault(index, []).extend(
            r._replace(name=f"{fqn}: {r.name}", where=ByteRange(chunk.start + r.where.start, chunk.start + r.where.end))
            for r in records
        )

    def number(self, state: State) -> ScalarState | None:
        """Return the value of a tensor of one element; None for any other tensor."""
        if state.numel != 1:
            return None
        row = state.extents[0]
        reader = next(reader for index, reader in self._opened.values() if index == int(row["file"]))
        start = int(row["offset"])
        data = reader.read(start, start + itemsize(state.dtype))
        return ScalarState(parse_number(data, state.dtype), state.dtype, state.shape)

    def object(self, fqn: str, limit: int) -> Any:
        """Return an object; None if it has more than ``limit`` bytes, or is not plain data.

        Raises:
            LayoutError: Its archive is damaged.
        """
        chunk = self._chunks.get((fqn, None))
        if chunk is None:
            return None
        index, part = self._open(chunk)
        if part.read(0, min(chunk.nbytes, len(MAGIC))) != MAGIC:
            return None
        try:
            if chunk.nbytes > limit:
                self._note(index, chunk, fqn, parse(part).values())
                return None
            torch = read_torch_file(part)
            self._note(index, chunk, fqn, torch.records)
            return _plain(torch.root, torch, part)
        except (ChecksumError, TruncatedError) as error:
            raise _damaged(fqn, chunk, part, error) from error
        except CkptError:
            return None


def _damaged(fqn: str, chunk: StoredChunk, part: _FilePart, error: CkptError) -> LayoutError:
    return LayoutError(part.path, f"{fqn} at byte {chunk.start:,}: {error.problem}", error.hint)


def fields_of(path: str, value: object) -> Fields:
    """Return the attributes of one of torch's dataclasses.

    Raises:
        LayoutError: The value is not a dataclass.
    """
    state = (value.state or {}) if isinstance(value, Opaque) else value
    if not isinstance(state, dict):
        raise LayoutError(path, "is not the metadata of torch.distributed.checkpoint", RESTORE)
    return Fields(path, "", state)


def stored_chunks(path: str, metadata: Fields) -> dict[ChunkKey, StoredChunk]:
    """Read the position of each chunk and object from the metadata.

    Raises:
        LayoutError: A chunk was saved through an extension, or a file name points outside the directory.
    """
    result: dict[ChunkKey, StoredChunk] = {}
    for key, value in metadata.get("storage_data", dict).items():
        index, info = fields_of(path, key), fields_of(path, value)
        if info.values.get("transform_descriptors"):
            problem = f"{brief(index.values.get('fqn'), 200)} was saved through extensions (perhaps compressed)"
            raise LayoutError(path, problem, "load and save it once without them")
        offset = index.values.get("offset")
        where = None if offset is None else shape_of(offset)
        file = info.get("relative_path", str)
        start, nbytes = info.get("offset", int), info.get("length", int)
        if "/" in file or "\0" in file or file in {"", ".", ".."} or start < 0 or nbytes < 0:
            raise LayoutError(path, f"places {brief(index.values.get('fqn'), 200)} in {brief(file, 200)}", RESTORE)
        result[index.get("fqn", str), where] = StoredChunk(file, start, nbytes)
    return result


def _chunk_box(
    fqn: str, entry: Fields, chunk: Fields, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first index and the size of a chunk, in each dimension of its tensor."""
    offsets, sizes = shape_of(chunk.get("offsets", object)), shape_of(chunk.get("sizes", object))
    if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape) <= MAX_DIMENSIONS:
        raise entry.error(fqn, "has a chunk that does not fit it")
    if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
        raise entry.error(fqn, f"has a chunk of {sizes} at {offsets}, beyond its shape {shape}")
    return offsets, sizes


def _recorded_dtype(entry: Fields) -> str:
    """Return the dtype of a tensor without elements, which has no chunks."""
    known = getattr(entry.values.get("properties"), "state", None)
    name = getattr(known[0], "name", "float32") if isinstance(known, tuple) and known else "float32"
    return BY_TORCH_NAME[name].name if name in BY_TORCH_NAME else "F32"


def _boxes(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[Box]:
    """Return a chunk as boxes of the whole tensor: one box if one dimension is cut, else one for each outer index."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    last = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    if not shape:
        return [Box(0, 0, 1, 1, 1, 1)]
    numel = sizes[last] * strides[last]
    outer = sizes[:last]
    runs, rows = (outer[-1], outer[:-1]) if outer else (1, ())
    pitch = strides[last - 1] if outer else numel
    result = []
    for i, index in enumerate(itertools.product(*map(range, rows))):
        at = sum(
            (o + k) * s for o, k, s in zip(offsets, (*index, *[0] * (len(shape) - len(index))), strides, strict=True)
        )
        result.append(Box(i * runs * numel, at, runs, numel, numel, pitch))
    return result


def _plain(value: Any, torch: TorchFile, part: _FilePart) -> Any:
    """Replace the 0-dim tensors in an object by numbers: torch accepts tensors for betas, for example."""
    if isinstance(value, TensorRef) and value.shape == ():
        where = torch.locate(value)
        data = part.read(where.start, where.end)
        return tensor_number(ScalarState(parse_number(data, value.dtype), value.dtype))
    if type(value) is dict:
        return {key: _plain(v, torch, part) for key, v in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_plain(v, torch, part) for v in value)
    return value
