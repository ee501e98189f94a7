"""A checkpoint of ``torch.distributed.checkpoint`` -> Checkpoint.

Source: torch 2.13, distributed/checkpoint/metadata.py, filesystem.py (``FileSystemWriter``) and default_planner.py
(``planner_data`` of flattened state dicts).
"""

from __future__ import annotations

import itertools
import math
import posixpath
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckpttool.budget import CHUNKS, note_file, spend
from ckpttool.checksums import ChunkRecords
from ckpttool.commit import has_manifest
from ckpttool.containers.torch_file import SimilarFiles, read_torch_file
from ckpttool.containers.torch_zip import MAGIC, parse
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.containers.values import Opaque, TensorRef
from ckpttool.dtypes import BY_TORCH_NAME, DTYPES, itemsize, parse_number
from ckpttool.errors import ChecksumError, CkptError, LayoutError, TruncatedError
from ckpttool.formats.chunk_index import CHUNK_INDEX, StoredChunk, read_chunk_index
from ckpttool.formats.fields import MAX_DIMENSIONS, RESTORE, WHOLE, Fields, shape_of
from ckpttool.formats.state_dict import StateDict, recorded_step
from ckpttool.formats.strided import boxes_of, merge_slices
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.thin import embedded_in, read_state
from ckpttool.formats.weights import class_of
from ckpttool.messages import brief
from ckpttool.model import (
    Checkpoint,
    CheckpointFile,
    Parameter,
    ScalarState,
    State,
    Topology,
    tensor_number,
)
from ckpttool.model.names import full_names
from ckpttool.model.places import Contiguous, Runs
from ckpttool.ranges import ByteRange
from ckpttool.storage import RangeReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckpttool.checksums import Record
    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.formats.chunk_index import StoredEntry
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.formats.state_dict import Kinds
    from ckpttool.storage import Reader, Storage


METADATA = ".metadata"
"""The file with the metadata of a checkpoint."""
SHARD = ".distcp"
"""Suffix of the files with tensors."""
THIN_METADATA = "ckpttool_thin.metadata"
"""The metadata of a thin checkpoint; METADATA has the same content, once the old files are removed."""
ACCELERATE_MODEL, ACCELERATE_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Directories of Accelerate's and the Trainer's distributed checkpoints."""
LIGHTNING_STATE = "meta.pt"
"""File of Lightning with the state beside the tensors, which it writes last."""
HEAD_BYTES, TAIL_BYTES = 1 << 11, 1 << 12
"""Bytes of the pickle at the start of a chunk, and of the ZIP directory at its end."""

ChunkKey = tuple[str, "tuple[int, ...] | None"]
"""Name of a tensor and offset of the chunk in it; the offset is None for an object."""


class _FilePart(RangeReader):
    """Reads a part of a file as a file; the owner of the file closes it."""

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


class Shards:
    """The open files of one checkpoint.

    Args:
        storage: Their storage.
        directory: The checkpoint.
        chunks: Position of each chunk and object.
        files: The files read before; the files of this directory are added.
    """

    def __init__(
        self, storage: Storage, directory: str, chunks: dict[ChunkKey, StoredChunk], files: list[CheckpointFile]
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._within = posixpath.dirname(files[-1].name)
        self._chunks = chunks
        self._files = files
        self._opened: dict[str, tuple[int, Reader]] = {}
        """Index and reader of each open file, by name."""
        self._records: dict[int, list[tuple[str, int, Sequence[Record]]]] = {}
        """Chunks of each file with their records, by its index."""
        self._similar = SimilarFiles()
        """Reads chunks: the chunks of one shape and type are alike."""
        if storage.remote:
            self._prefetch()

    def close(self) -> None:
        """Close all files, and add the checksums that their archives record."""
        for index, reader in self._opened.values():
            self._files[index] = replace(self._files[index], records=ChunkRecords(self._records.get(index, ())))
            reader.close()

    def _open(self, chunk: StoredChunk) -> tuple[int, Reader]:
        """Return the file of a chunk: its index, and a reader."""
        if chunk.file not in self._opened:
            path = posixpath.join(self._directory, chunk.file)
            if not self._storage.exists(path):
                raise LayoutError(path, f"is missing, but {METADATA} lists it", RESTORE)
            reader = self._storage.open(path, ahead=True)
            self._opened[chunk.file] = len(self._files), reader
            name = posixpath.join(self._within, chunk.file)
            file = CheckpointFile(name, reader.nbytes, "shard", None, reader.version, container="dcp")
            self._files.append(file)
        index, reader = self._opened[chunk.file]
        if chunk.start + chunk.nbytes > reader.nbytes:
            raise LayoutError(reader.path, f"has {reader.nbytes:,} bytes, fewer than {METADATA} says", RESTORE)
        return index, reader

    def _part(self, chunk: StoredChunk) -> tuple[int, _FilePart]:
        """Return the index of the file of a chunk, and a reader of its archive."""
        index, reader = self._open(chunk)
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
        parts: list[_Block] = []
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
            parts.append(_Block(offsets, sizes, self._chunk(chunk, fqn, sizes)))
        if not parts:
            return merge_slices([], shape, _recorded_dtype(entry))
        if len({part.state.dtype for part in parts}) > 1:
            raise entry.error(fqn, "has chunks of several types")
        return _joined(parts, shape)

    def indexed(self, entry: StoredEntry) -> State:
        """Locate a tensor from the chunks that the index lists.

        Raises:
            LayoutError: A file is missing or too short, or a chunk does not fit the tensor.
        """
        path = posixpath.join(self._directory, CHUNK_INDEX)
        spend(CHUNKS, len(entry.chunks), path)
        dtype, shape = str(entry.dtype), entry.shape
        if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS:
            raise LayoutError(path, f"describes no tensor for {brief(entry.fqn, 200)}", RESTORE)
        parts = []
        for chunk in entry.chunks:
            numel = math.prod(chunk.sizes)
            inside = all(o + n <= whole for o, n, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True))
            if not inside or not chunk.first or chunk.first + numel * itemsize(dtype) > chunk.nbytes:
                raise LayoutError(path, f"has a chunk of {brief(entry.fqn, 200)} that does not fit it", RESTORE)
            if numel:
                index, _ = self._open(chunk)
                place = Contiguous(numel, index, chunk.start + chunk.first)
                parts.append(_Block(chunk.offsets, chunk.sizes, State(chunk.sizes, dtype, place)))
        return _joined(parts, shape) if parts else merge_slices([], shape, dtype)

    def _chunk(self, chunk: StoredChunk, fqn: str, sizes: tuple[int, ...]) -> State:
        index, part = self._part(chunk)
        try:
            torch = self._similar.read(part)
        except CkptError as error:
            raise _damaged(fqn, chunk, part, error) from error
        if isinstance(torch.root, Opaque):
            self._note(index, chunk, fqn, torch.records)
            raise UnknownTensorError(part.path, f"holds {brief(fqn, 200)} as a {class_of(torch.root)}", WHOLE)
        if not isinstance(torch.root, TensorRef) or torch.root.shape != sizes:
            raise LayoutError(part.path, f"holds no chunk of {fqn} at byte {chunk.start:,}", RESTORE)
        self._note(index, chunk, fqn, torch.records)
        return whole_tensor(torch, index, torch.root, chunk.start)

    def _note(self, index: int, chunk: StoredChunk, fqn: str, records: Sequence[Record]) -> None:
        """Add the records of a chunk's archive to the records of its file."""
        self._records.setdefault(index, []).append((fqn, chunk.start, records))

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
        index, part = self._part(chunk)
        if part.read(0, min(chunk.nbytes, len(MAGIC))) != MAGIC:
            return None
        try:
            if chunk.nbytes > limit:
                self._note(index, chunk, fqn, parse(part))
                return None
            torch = read_torch_file(part)
            self._note(index, chunk, fqn, torch.records)
            return _without_tensors(torch.root, torch, part)
        except (ChecksumError, TruncatedError) as error:
            raise _damaged(fqn, chunk, part, error) from error
        except CkptError:
            return None


class _Block(NamedTuple):
    """A block of a tensor."""

    offsets: tuple[int, ...]
    """Index of its first element in each dimension."""
    sizes: tuple[int, ...]
    """Its shape."""
    state: State
    """Its elements."""


def _joined(blocks: Sequence[_Block], shape: tuple[int, ...]) -> State:
    """Return the state of a tensor from its blocks."""
    if len(blocks) == 1 and blocks[0].sizes == shape:
        return blocks[0].state
    if shape and all(block.sizes[1:] == shape[1:] and type(block.state.place) is Contiguous for block in blocks):
        inner = math.prod(shape[1:])
        ordered = sorted(blocks, key=lambda block: block.offsets)
        places = ((block.offsets[0] * inner, cast("Contiguous", block.state.place)) for block in ordered)
        runs = ((start, place.numel, place.file, place.offset) for start, place in places)
        return State(shape, blocks[0].state.dtype, Runs(math.prod(shape), runs))
    return merge_slices([(block.state, boxes_of(block.offsets, block.sizes, shape)) for block in blocks], shape)


class UnknownTensorError(LayoutError):
    """A tensor is an object of a class that is not a plain tensor, such as a quantised one."""


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
        result[index.get("fqn", str), where] = StoredChunk((), (), file, start, nbytes)
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


def _without_tensors(value: Any, torch: TorchFile, part: _FilePart) -> Any:
    """Replace the 0-dim tensors in an object by numbers: torch accepts tensors for betas, for example."""
    if isinstance(value, TensorRef) and value.shape == ():
        where = torch.locate(value)
        data = part.read(where.start, where.end)
        return tensor_number(ScalarState(parse_number(data, value.dtype), value.dtype))
    if type(value) is dict:
        return {key: _without_tensors(v, torch, part) for key, v in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_without_tensors(v, torch, part) for v in value)
    return value


MAX_METADATA_BYTES = 1 << 30
"""Maximum size of ``.metadata`` in bytes."""
MAX_MEMORY_BYTES = 1 << 35
"""Most bytes of memory that reading ``.metadata`` may take."""
MAX_OBJECT_BYTES = 1 << 16
"""Maximum size in bytes of an object to read."""
MAX_NAMES_BYTES = 1 << 26
"""Maximum size in bytes of the names of a parameter group."""
APP = "app"
"""Key of the state of the program in torch's tutorial and in Ray's template, with the model, the optimizer and more."""
CONTAINERS = frozenset({APP, "model", "module", "state_dict"})
"""Keys of a module's state dict; they are not part of its names."""


def read_dcp(
    storage: Storage, location: Location, _report: Report, kinds: Kinds | None = None, name: str = METADATA
) -> Checkpoint:
    """Read the layout of a distributed checkpoint, without tensor bytes.

    Args:
        storage: Its storage.
        location: Its directory.
        kinds: The buffers, the frozen parameters and the groups; None if they are unknown.
        name: Name of the file with the metadata.

    Raises:
        CkptError: The checkpoint is damaged, or has an unsupported form.
    """
    path = posixpath.join(location.directory, "metadata.json")
    if storage.exists(path) and "sharded_backend" in storage.read_text(path):
        problem = "is the distributed checkpoint of Megatron Core (torch_dist), which stacks layers and splits names"
        raise LayoutError(location.directory, problem, "convert it with Megatron-LM's tools/checkpoint/convert.py")
    found = _read(storage, location, [""], kinds, name)
    lightning = kinds is None and storage.exists(posixpath.join(location.directory, LIGHTNING_STATE))
    return _with_state_of_lightning(storage, found) if lightning else found


def _with_state_of_lightning(storage: Storage, found: Checkpoint) -> Checkpoint:
    """Add the state that Lightning saves beside the tensors: loops, callbacks, schedulers, epoch, step.

    Source: lightning 2.6, pytorch/strategies/model_parallel.py (``save_checkpoint``).
    """
    torch, file = read_state(storage, found.location, LIGHTNING_STATE)
    step = torch.root.get("global_step")
    return replace(
        found,
        step=step if type(step) is int else found.step,
        client_state={**found.client_state, **torch.root},
        embedded=embedded_in(torch, len(found.files)),
        files=(*found.files, file),
    )


def read_dcp_pair(
    storage: Storage, location: Location, _report: Report, kinds: Kinds | None = None, name: str = METADATA
) -> Checkpoint:
    """Read a model and its optimizer that Accelerate has saved as two distributed checkpoints.

    Source: Accelerate 1.15, utils/fsdp_utils.py (``save_fsdp_model``, ``save_fsdp_optimizer``).

    Raises:
        CkptError: One of them is damaged or has an unsupported form, or they are of different models.
    """
    names = {entry.name for entry in storage.listing(location.directory) if entry.is_dir}
    of_model = (ACCELERATE_MODEL,)
    parts = of_model if name == THIN_METADATA else (*of_model, ACCELERATE_OPTIMIZER)
    return _read(storage, location, [part for part in parts if part in names], kinds, name)


def _read(storage: Storage, location: Location, parts: Sequence[str], kinds: Kinds | None, name: str) -> Checkpoint:
    """Read one state dict from the distributed checkpoints in some directories below a location."""
    entries = StateDict(step=recorded_step(storage, location.directory))
    if kinds is not None:
        entries.buffers, entries.frozen, entries.grouped = kinds[:3]
    files: list[CheckpointFile] = []
    ranks = 1
    for part in parts:
        directory = posixpath.join(location.directory, part) if part else location.directory
        path = posixpath.join(directory, name)
        if not storage.exists(path):
            raise LayoutError(path, "is missing: the save was interrupted", RESTORE)
        content, file = _read_metadata(storage, path)
        files.append(replace(file, name=posixpath.join(part, name)))
        first = len(files)
        recorded = kinds is not None and has_manifest(storage, location.directory)  # which has the checksums
        index = read_chunk_index(storage, directory, content) if recorded else None
        if index is None:
            metadata = fields_of(path, _unpickled(path, content))
            shards = Shards(storage, directory, stored_chunks(path, metadata), files)
            described = _described(path, metadata, shards)
        else:
            listed = list(index)
            objects: dict[ChunkKey, StoredChunk] = {
                (e.fqn, None): c for e in listed if e.dtype is None for c in e.chunks
            }
            shards = Shards(storage, directory, objects, files)
            described = _indexed(listed, shards)
        try:
            _read_entries(described, shards, entries)
        finally:
            shards.close()
        ranks = max(ranks, len(files) - first)
    own = full_names(entries.states, entries.weights) if kinds is None else {n: live for live, n in kinds.names.items()}
    entries.weights = {own.get(name, name): state for name, state in entries.weights.items()}
    if not entries.contained:  # the model's tensors have no common key
        entries.beside = {name: True for name, nested in entries.beside.items() if nested}
    if len(entries.beside) == len(entries.weights):  # under another key than a model's: they look alike
        entries.beside = {}
    path = posixpath.join(location.directory, files[-1].name)
    if kinds is not None and any(own.get("params") is None for own in entries.groups.values()):
        raise LayoutError(path, "has a parameter group whose names cannot be read", RESTORE)
    if entries.unread:
        _leave_out(entries, location)
    if entries.states and not entries.weights:
        problem = "holds the states of an optimizer without its model"
        raise LayoutError(location.directory, problem, f"pass {posixpath.dirname(location.directory)}")
    unknown = sorted(entries.states.keys() - entries.weights.keys())
    if unknown and all(name.isdecimal() for name in unknown):
        entries.left_out = (
            f"{METADATA} numbers the optimizer's parameters: save what get_state_dict returns, with names"
        )
        entries.remarks = (f"the optimizer's states are left out: {entries.left_out}",)
        entries.states, entries.numbers, entries.groups = {}, {}, {}
    elif unknown and entries.weights and not entries.flattened:
        problem = f"holds optimizer states of {brief(unknown[0], 200)}, but the model has no such parameter"
        raise LayoutError(path, problem, "two saves of different models are mixed: restore it from a copy")
    made = entries.to_checkpoint(storage, location, "dcp", path, Topology(data_parallel=ranks), tuple(files))
    return made if kinds is not None else replace(made, remarks=(*made.remarks, *_possible_ties(made)))


def _possible_ties(checkpoint: Checkpoint) -> list[str]:
    """Return a remark on each parameter without states that has the checksums of a trained one: it may be tied to it.

    Source: torch 2.13, distributed/checkpoint (a tied tensor is written once for each name, in chunks of its own).
    """
    trained = [p for p in checkpoint.parameters if not p.frozen]
    shapes = {p.shape for p in trained}
    # One-dimensional ones are often equal by chance: all 0 or all 1.
    frozen = [p for p in checkpoint.parameters if p.frozen and p.shape in shapes and len(p.shape) > 1]
    if not frozen:
        return []
    sums = [{r.where.start: r.crc32 for r in f.records if r.crc_recorded and r.where.nbytes} for f in checkpoint.files]

    def content(parameter: Parameter) -> tuple[Any, ...]:
        rows = checkpoint.weights(parameter).extents
        places = ((int(row["file"]), int(row["offset"])) for row in rows)
        chunks = zip(rows["start"].tolist(), rows["numel"].tolist(), places, strict=True)
        return tuple((start, numel, sums[file].get(offset, (file, offset))) for start, numel, (file, offset) in chunks)

    same = {content(p): p.name for p in trained if p.shape in {one.shape for one in frozen}}
    return [
        f"{p.name} has no states and the bytes of {same[content(p)]}: it counts as frozen, or the model ties them"
        for p in frozen
        if content(p) in same
    ]


def _leave_out(entries: StateDict, location: Location) -> None:
    """Leave out the whole optimizer, because a part of it may be missing, and name the tensors that are not read.

    Raises:
        LayoutError: Nothing else is there.
    """
    more = f" and {len(entries.unread) - 1} tensors more" if len(entries.unread) > 1 else ""
    entries.left_out = f"{entries.unread[0]}, which is not a plain tensor{more}"
    if not entries.weights:
        raise LayoutError(location.directory, entries.left_out, WHOLE)
    what = "those tensors and the optimizer's states are left out"
    entries.remarks = (f"{entries.left_out}: {what}",)
    entries.states, entries.numbers, entries.groups, entries.options = {}, {}, {}, {}


def _read_metadata(storage: Storage, path: str) -> tuple[bytes, CheckpointFile]:
    directory = posixpath.dirname(path)
    for entry in storage.listing(directory):
        if not entry.is_dir:  # the limits grow with the bytes of the shards that it describes
            note_file(posixpath.join(directory, entry.name), entry.nbytes)
    with storage.open(path) as reader:
        if reader.nbytes > MAX_METADATA_BYTES:
            raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large to describe a checkpoint", RESTORE)
        file = CheckpointFile(METADATA, reader.nbytes, "metadata", None, reader.version, container="dcp")
        return reader.read(0, reader.nbytes), file


def entry_names(storage: Storage, directory: str) -> set[str]:
    """Return the names of the entries of a distributed checkpoint; empty without one.

    Raises:
        CkptError: It is damaged.
    """
    path = posixpath.join(directory, METADATA)
    if not storage.exists(path):
        return set()
    content, _ = _read_metadata(storage, path)
    index = read_chunk_index(storage, directory, content)
    if index is not None:
        return {entry.fqn for entry in index}
    return set(fields_of(path, _unpickled(path, content)).get("state_dict_metadata", dict))


def _unpickled(path: str, content: bytes) -> Any:
    try:
        return unpickle(content, path=path, max_memory_bytes=MAX_MEMORY_BYTES).value
    except Truncated:
        raise LayoutError(path, "ends too early", RESTORE) from None


class _Entry(NamedTuple):
    """An entry of the state dict."""

    fqn: str
    """Its name in the flattened state dict."""
    keys: tuple[Any, ...]
    """Its keys in the nested state dict."""
    locate: Callable[[], State] | None
    """Returns the places of a tensor; None for an object."""


def _described(path: str, metadata: Fields, shards: Shards) -> Iterator[_Entry]:
    """Yield the entries that the metadata describes."""
    if "planner_data" not in metadata:
        raise LayoutError(path, "is not the metadata of torch.distributed.checkpoint: planner_data is missing", RESTORE)
    paths = metadata.values["planner_data"]
    paths = paths if isinstance(paths, dict) else {}
    for fqn, value in metadata.get("state_dict_metadata", dict).items():
        if not isinstance(fqn, str):
            raise metadata.error("state_dict_metadata", f"names a tensor {brief(fqn, 80)}")
        keys = paths.get(fqn)
        fields = fields_of(path, value)
        locate = partial(shards.tensor, fqn, fields) if "chunks" in fields else None
        yield _Entry(fqn, tuple(keys if keys and isinstance(keys, tuple | list) else (fqn,)), locate)


def _indexed(listed: Iterable[StoredEntry], shards: Shards) -> Iterator[_Entry]:
    """Yield the entries of the index."""
    for entry in listed:
        yield _Entry(entry.fqn, entry.path, None if entry.dtype is None else partial(shards.indexed, entry))


def _read_entries(described: Iterable[_Entry], shards: Shards, result: StateDict) -> None:
    """Read every entry of the state dict, and sort the entries by part."""
    counted: dict[str, tuple[str, str, ScalarState]] = {}
    of_app: dict[str, str] = {}
    for fqn, where, locate in described:
        keys, flat = _unflatten(tuple(map(str, where)))
        result.flattened |= flat
        if locate is not None:
            try:
                _add_tensor(result, fqn, keys, locate(), shards, flat=flat)
            except UnknownTensorError as error:
                result.unread.append(f"{posixpath.basename(error.path)} {error.problem}")
            continue
        read = shards.object(fqn, MAX_NAMES_BYTES if keys[-1] == "params" else MAX_OBJECT_BYTES)
        if len(keys) >= 3 and keys[-3] == "param_groups":
            (result.options if flat else result.groups).setdefault(_group_key(keys, flat=flat), {})[keys[-1]] = read
        else:
            result.objects[fqn] = read
            if keys[0] == APP and len(keys) > 1:
                of_app[fqn] = fqn.removeprefix(f"{APP}.")
            if len(keys) >= 3 and keys[-3] == "state" and isinstance(read, bool | int | float):
                counted[fqn] = keys[-2], keys[-1], ScalarState(read, None)
    for fqn, (name, key, number) in counted.items():
        if name in result.weights:  # else it is of a scheduler, or of the user
            result.numbers.setdefault(name, {})[key] = number
            del result.objects[fqn]
    for fqn, name in of_app.items():  # beside the model, as in the template of torch
        if fqn in result.objects and name not in result.objects:
            result.objects[name] = result.objects.pop(fqn)


def _add_tensor(
    entries: StateDict, fqn: str, keys: tuple[str, ...], state: State, shards: Shards, *, flat: bool
) -> None:
    """Add one tensor to the part of the state dict that its keys name."""
    part = keys[-3] if len(keys) >= 3 else ""
    if part == "state":
        entries.states.setdefault(keys[-2], {})[keys[-1]] = state
        if state.shape in {(), (1,)} and (number := shards.number(state)) is not None:
            entries.numbers.setdefault(keys[-2], {})[keys[-1]] = number
    elif part == "param_groups":
        number = shards.number(state)
        options = (entries.options if flat else entries.groups).setdefault(_group_key(keys, flat=flat), {})
        options[keys[-1]] = None if number is None else tensor_number(number)
    else:
        named = list(itertools.dropwhile(CONTAINERS.__contains__, keys)) or [fqn]
        entries.weights[".".join(named)] = state
        within = {*keys[: len(keys) - len(named)]} - {"app"}
        entries.contained |= bool(within)
        if len(named) > 1 or not within:  # the names of a model's state dict are whole keys
            entries.beside[".".join(named)] = len(named) > 1
        if not state.shape and len(named) > 1 and (number := shards.number(state)) is not None:
            entries.other_numbers[".".join(named)] = number.value


def _group_key(keys: tuple[str, ...], *, flat: bool) -> str:
    """Return the key of a parameter group: optimizers under different keys have groups of one number."""
    return keys[-2] if flat else ".".join((*keys[:-3], keys[-2]))


def _unflatten(where: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """Return the keys of an entry in the nested state dict, and whether its optimizer part was one flat key.

    torchtitan saves optimizers with flat keys: ``optimizer`` then ``state.NAME.exp_avg`` or ``param_groups.NAME.lr``.

    Source: torch 2.13, distributed/checkpoint/state_dict.py (``_flatten_optim_state_dict``).
    """
    *outer, last = where
    kind, _, rest = last.partition(".")
    name, _, key = rest.rpartition(".")
    if kind in {"state", "param_groups"} and name and outer and outer[-1] not in CONTAINERS:
        return (*outer, kind, name, key), True
    return where, False
