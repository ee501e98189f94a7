"""Checkpoint -> plan of a directory of ``torch.distributed.checkpoint``.

Each tensor is one chunk, a ``torch.save`` file within a file; any number of ranks reads the parts it needs. The layout
sets the names and the nesting of the entries, which differ between the loaders of frameworks.

Source: torch 2.13, distributed/checkpoint/filesystem.py (``FileSystemWriter``), metadata.py, default_planner.py and
state_dict.py (``get_state_dict``, ``_flatten_optim_state_dict``); Accelerate 1.15, utils/fsdp_utils.py; torchtitan 0.3,
components/checkpoint.py.
"""

from __future__ import annotations

import posixpath
import struct
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import DTYPES
from ckpttool.errors import PlanError
from ckpttool.formats.chunk_index import StoredChunk, StoredEntry
from ckpttool.formats.dcp import ACCELERATE_MODEL, ACCELERATE_OPTIMIZER, LIGHTNING_STATE, METADATA
from ckpttool.formats.universal import STEP
from ckpttool.model import MASTER, MODULE, TensorFloat, TensorInteger
from ckpttool.plan import COPY, CopyPlan, TargetFile
from ckpttool.plan.builder import CopyBuilder
from ckpttool.targets.torch import TorchFileBuilder, as_in_torch, copy_embedded, group_options, plain_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckpttool.formats.chunk_index import Path
    from ckpttool.model import Checkpoint, Parameter, State
    from ckpttool.plan import ConsistencyChecks
    from ckpttool.targets.weights import WeightSelection

MAX_FILE_BYTES = 5_000_000_000
"""Maximum file size, unless a single tensor is larger."""
ALIGNMENT = 64
"""Alignment of archives in a file, in bytes, so that tensors are aligned too."""

LIGHTNING_VERSION = "pytorch-lightning_version"
"""Key of each client state of Lightning."""

_ARCHIVE = "archive"
_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """Names and nesting of the entries."""

    model: tuple[str, ...]
    """Keys before the name of a weight."""
    optimizer: tuple[str, ...]
    """Keys of the optimizer's state dict; each optimizer has its own if the last one has a place for its number."""
    flat: bool = False
    """Whether the optimizer's state dict has flat keys, with the hyper-parameters of each parameter."""
    client: tuple[str, ...] = ()
    """Keys before the names of numbers and texts of the client state; empty to leave them out."""
    directories: tuple[str, str] = ("", "")
    """Directories of the model and of the optimizer, each a distributed checkpoint."""
    stem: str = "__0"
    """Begin of the names of files with tensors; the default is torch's of rank 0."""
    metadata: str = METADATA
    """Name of the file with the metadata."""
    state: str = ""
    """File of ``torch.save`` with the client state; "" without one."""

    @property
    def numbered(self) -> bool:
        """Whether the state dicts of several optimizers have a key each, with a number."""
        return "{}" in self.optimizer[-1]

    def of_optimizer(self, number: int) -> DcpLayout:
        """Return the layout with the keys of one optimizer."""
        return replace(self, optimizer=tuple(key.format(number) for key in self.optimizer))

    def of_state(self, name: str, key: str) -> Path:
        """Return the path of the state of a parameter."""
        return (*self.optimizer, f"state.{name}.{key}") if self.flat else (*self.optimizer, "state", name, key)

    def of_option(self, group: int, listed: Sequence[str], key: str) -> list[Path]:
        """Return the paths of an option of a group, which flat keys repeat for each of its parameters."""
        if self.flat:
            return [(*self.optimizer, f"param_groups.{name}.{key}") for name in listed]
        return [(*self.optimizer, "param_groups", group, key)]


LAYOUTS = {
    "nested": DcpLayout(("model",), ("optim",)),
    "flat": DcpLayout(("model",), ("optim",), flat=True),
    "accelerate": DcpLayout(("model",), ("optimizer",), directories=(ACCELERATE_MODEL, ACCELERATE_OPTIMIZER)),
    "torchtitan": DcpLayout((), ("optimizer",), flat=True),
    "app": DcpLayout(("app", "model"), ("app", "optim"), client=("app",)),
    "lightning": DcpLayout(("state_dict",), ("optimizer_{}",), state=LIGHTNING_STATE),
}
"""Layouts by name. "nested" is what ``dcp.save({"model": ..., "optim": ...})`` writes for ``get_state_dict``,
and "app" what ``dcp.save({"app": AppState(...)})`` of torch's tutorial and of Ray's FSDP2 template writes; the latter
has an epoch beside model and optimizer. Lightning does not load its layout without its own client state."""


@dataclass(frozen=True, slots=True, eq=False)
class _TensorEntry:
    """One entry of the checkpoint, written as an archive of its own."""

    path: Path
    """Keys of the entry in the state dict."""
    file: TargetFile
    """The archive."""
    dtype: str | None
    """Of a tensor; None for an object."""
    shape: tuple[int, ...]
    """Of a tensor."""

    @property
    def fqn(self) -> str:
        """Name of the entry in the flattened state dict."""
        return ".".join(map(str, self.path))


def plan_dcp(
    checkpoint: Checkpoint,
    *,
    layout: str = "nested",
    max_file_bytes: int = MAX_FILE_BYTES,
    consistency: ConsistencyChecks | None = None,
) -> CopyPlan:
    """Plan ``.metadata`` and the files that it describes.

    Trained parameters come from their masters, as FSDP keeps them; frozen parameters and buffers as they are. A step is
    a tensor, as torch's optimizers have it.

    Args:
        checkpoint: The source.
        layout: Key of LAYOUTS.
        max_file_bytes: Maximum file size in bytes, unless a single tensor is larger.
        consistency: Consistency checks to make before the first write.

    Raises:
        PlanError: The checkpoint contains no tensors, or two entries of one name, or not the client state of the
            layout.
    """
    builder, names = CopyBuilder(checkpoint), LAYOUTS[layout].of_optimizer(0)
    state = []
    if names.state:
        if LIGHTNING_VERSION not in checkpoint.client_state:
            problem = f"has no {LIGHTNING_VERSION} in its client state, and Lightning loads no other checkpoint"
            raise PlanError(checkpoint.location, problem, "choose another layout, and load it with ckpttool.load")
        file = TorchFileBuilder(names.state, builder)
        state = [file.build({k: copy_embedded(file, checkpoint, v) for k, v in checkpoint.client_state.items()})]
    files = _files(checkpoint, _entries(checkpoint, builder, names), names, max_file_bytes)
    return CopyPlan(builder.sources, builder.casts, (*state, *files), consistency)


def plan_dcp_weights(checkpoint: Checkpoint, selection: WeightSelection, layout: DcpLayout) -> CopyPlan:
    """Plan a distributed checkpoint of some weights.

    Args:
        checkpoint: The source.
        selection: The weights.
        layout: Names of the entries and of the files.

    Raises:
        PlanError: Two entries have one name.
    """
    builder = CopyBuilder(checkpoint)
    entries = (
        ("model", w.name, _tensor(builder, (*layout.model, w.name), w.state, w.dtype)) for w in selection.weights
    )
    files = _files(checkpoint, entries, layout, MAX_FILE_BYTES)
    return CopyPlan(builder.sources, builder.casts, tuple(files))


def _files(
    checkpoint: Checkpoint, entries: Iterable[tuple[str, str, _TensorEntry]], names: DcpLayout, max_file_bytes: int
) -> list[TargetFile]:
    """Return the files of entries as ``_entries`` yields them.

    Raises:
        PlanError: Two entries have one name, or none is given.
    """
    parts: dict[str, list[_TensorEntry]] = {}
    weights: dict[str, _TensorEntry] = {}
    for kind, name, entry in entries:
        parts.setdefault(names.directories[kind != "model"], []).append(entry)
        if kind == "model":
            weights[name] = entry
    if not parts:
        raise PlanError(checkpoint.location, "holds no tensors", "choose another checkpoint")
    files: list[TargetFile] = []
    for directory, of_part in parts.items():
        # torch writes a tied tensor once for each name; here both names refer to the same bytes.
        own = directory == names.directories[0]
        ties = [
            (alias, weights[n])
            for alias, n in checkpoint.aliases.items()
            if own and n in weights and alias not in weights
        ]
        tied = [(entry, replace(entry, path=(*names.model, alias))) for alias, entry in ties]
        files += _directory(checkpoint, directory, of_part, tied, names, max_file_bytes)
    return files


def _directory(
    checkpoint: Checkpoint,
    directory: str,
    entries: list[_TensorEntry],
    tied: Iterable[tuple[_TensorEntry, _TensorEntry]],
    names: DcpLayout,
    max_file_bytes: int,
) -> Iterator[TargetFile]:
    """Yield the files of one distributed checkpoint.

    Args:
        checkpoint: The source.
        directory: Where they are, below the output.
        entries: Its entries.
        tied: Entries with the bytes of another one: the other, and the entry.
        names: Names of the files.
        max_file_bytes: As for ``plan_dcp``.

    Raises:
        PlanError: Two entries have one name.
    """
    stored: dict[str, StoredEntry] = {}
    shard: list[tuple[int, TargetFile]] = []
    number = size = 0
    for entry in entries:
        if entry.fqn in stored:
            problem = f"has two entries of the name {entry.fqn:.200}"
            raise PlanError(checkpoint.location, problem, "convert it to zero or to universal")
        if shard and size + entry.file.nbytes > max_file_bytes:
            yield _shard(posixpath.join(directory, _shard_name(names, number)), shard)
            number, shard, size = number + 1, [], 0
        start = -(-size // ALIGNMENT) * ALIGNMENT
        chunk = StoredChunk((0,) * len(entry.shape), entry.shape, _shard_name(names, number), start, entry.file.nbytes)
        stored[entry.fqn] = StoredEntry(entry.path, entry.dtype, entry.shape, [chunk])
        shard.append((start, entry.file))
        size = start + entry.file.nbytes
    yield _shard(posixpath.join(directory, _shard_name(names, number)), shard)
    for entry, alias in tied:
        stored.setdefault(alias.fqn, stored[entry.fqn]._replace(path=alias.path))
    yield plain_file(posixpath.join(directory, names.metadata), metadata(stored.values()))


# ------------------------------------------------------------------------------------------------- entries


def _entries(checkpoint: Checkpoint, builder: CopyBuilder, names: DcpLayout) -> Iterator[tuple[str, str, _TensorEntry]]:
    """Yield "model" or "optimizer", the parameter or buffer ("" for none), and the entry."""
    for parameter in checkpoint.parameters:
        state = checkpoint.weights(parameter)
        yield "model", parameter.name, _tensor(builder, (*names.model, parameter.name), state, state.dtype)
    for buffer in checkpoint.buffers:
        yield "model", buffer.name, _tensor(builder, (*names.model, buffer.name), buffer.state, buffer.state.dtype)
    for parameter in checkpoint.parameters:
        for entry in _states(checkpoint, builder, parameter, names):
            yield "optimizer", parameter.name, entry
    for g, group in enumerate(checkpoint.groups):
        options = group_options(checkpoint, g)
        listed = list(group.listed or group.parameters)
        if not names.flat:
            options["params"] = listed
        if not names.flat or group.named:  # flat keys repeat the whole list for each parameter
            options["param_names"] = listed  # an optimizer made from named_parameters() asks for it
        for name in listed if names.flat else ("",):
            for key, value in options.items():
                (path,) = names.of_option(g, [name], key)
                if isinstance(value, TensorFloat | TensorInteger):
                    yield "optimizer", name, _scalar_entry(builder, path, value, value.dtype)
                else:
                    yield "optimizer", name, _object(builder, path, value)
    for key, value in client_state_of(checkpoint.client_state, names).items():
        yield "client", key, _object(builder, (*names.client, key), value)


def client_state_of(client_state: Mapping[str, Any], layout: DcpLayout) -> dict[str, Any]:
    """Return the numbers and texts of a client state, which are entries of the layout."""
    own = {*layout.model[-1:], *layout.optimizer[-1:]}
    found = {k: v for k, v in client_state.items() if k not in own and type(v) in {bool, int, float, str}}
    return found if layout.client else {}


def _states(
    checkpoint: Checkpoint, builder: CopyBuilder, parameter: Parameter, names: DcpLayout
) -> Iterator[_TensorEntry]:
    path = partial(names.of_state, parameter.name)
    for key, state in parameter.tensors.items():
        if key not in {MASTER, MODULE, STEP}:
            yield _tensor(builder, path(key), state, state.dtype)
    for key, scalar in checkpoint.numbers(parameter).items():
        if key in parameter.states and key != STEP:
            continue
        held = as_in_torch(key, scalar)
        if held.dtype is None:
            yield _object(builder, path(key), held.value)
        else:
            yield _scalar_entry(builder, path(key), held.value, held.dtype, held.shape)


def _tensor(builder: CopyBuilder, path: Path, state: State, dtype: str) -> _TensorEntry:
    file = TorchFileBuilder(_ARCHIVE, builder)
    return _TensorEntry(path, file.build(file.whole(state, dtype)), dtype, state.shape)


def _scalar_entry(
    builder: CopyBuilder, path: Path, value: float | int | bool, dtype: str, shape: tuple[int, ...] = ()
) -> _TensorEntry:
    """Return the entry of a scalar tensor."""
    file = TorchFileBuilder(_ARCHIVE, builder)
    return _TensorEntry(path, file.build(file.number(value, dtype, shape)), dtype, shape)


def _object(builder: CopyBuilder, path: Path, value: Any) -> _TensorEntry:
    file = TorchFileBuilder(_ARCHIVE, builder)
    return _TensorEntry(path, file.build(file.hyperparameters(value)), None, ())


# ------------------------------------------------------------------------------------------------- files


def _shard_name(names: DcpLayout, number: int) -> str:
    return f"{names.stem}_{number}.distcp"


def _shard(name: str, parts: Iterable[tuple[int, TargetFile]]) -> TargetFile:
    """Concatenate archives into one file."""
    literals: list[tuple[int, bytes]] = []
    zeros: list[tuple[int, int]] = []
    copies = [np.zeros(0, dtype=COPY)]
    gathers = []
    end = 0
    for start, part in parts:
        if start > end:
            zeros.append((end, start - end))
        literals += [(start + offset, data) for offset, data in part.literals]
        zeros += [(start + offset, nbytes) for offset, nbytes in part.zeros]
        gathers += [replace(gather, target=start + gather.target) for gather in part.gathers]
        moved = part.copies.copy()
        moved["target"] += np.uint64(start)
        copies.append(moved)
        end = start + part.nbytes
    return TargetFile(name, end, tuple(literals), np.concatenate(copies), tuple(gathers), tuple(zeros))


# ------------------------------------------------------------------------------------------------- metadata


def metadata(entries: Iterable[StoredEntry]) -> bytes:
    """Return the content of the metadata of a distributed checkpoint, a pickled ``Metadata`` object."""
    entries = list(entries)
    out = _Pickle()
    out.begin("Metadata")
    out.text("state_dict_metadata")
    out.put(_DICT)
    for entry in entries:
        out.text(entry.fqn)
        _describe(out, entry)
    out.put(_SET)
    out.text("planner_data")
    out.put(_DICT)
    for entry in entries:
        out.text(entry.fqn)
        out.put(b"(")
        for part in entry.path:
            out.text(part) if isinstance(part, str) else out.integer(part)
        out.put(b"t")
    out.put(_SET)
    out.text("storage_data")
    out.put(_DICT)
    for entry in entries:
        for number, chunk in enumerate(entry.chunks):
            _locate(out, entry, number, chunk)
    out.put(_SET)
    out.text("storage_meta")
    out.put(b"N")
    out.text("version")
    out.text("1.0.0")
    out.end()
    return out.content()


def _describe(out: _Pickle, entry: StoredEntry) -> None:
    """Write the type, the shape and the chunks of an entry."""
    if entry.dtype is None:
        out.begin("BytesStorageMetadata")
        out.end()
        return
    out.begin("TensorStorageMetadata")
    out.text("properties")
    if not out.again(("properties", entry.dtype)):
        out.first(("properties", entry.dtype), _properties(entry.dtype))
    out.text("size")
    out.size(entry.shape)
    out.text("chunks")
    out.put(b"](")
    for chunk in entry.chunks:
        out.begin("ChunkStorageMetadata")
        out.text("offsets")
        out.size(chunk.offsets)
        out.text("sizes")
        out.size(chunk.sizes)
        out.end()
    out.put(b"e")
    out.end()


def _locate(out: _Pickle, entry: StoredEntry, number: int, chunk: StoredChunk) -> None:
    """Write the index of a chunk, and its place in a file."""
    out.begin("MetadataIndex")
    out.text("fqn")
    out.text(entry.fqn)
    out.text("offset")
    out.put(b"N") if entry.dtype is None else out.size(chunk.offsets)
    out.text("index")
    out.put(b"N") if entry.dtype is None else out.integer(number)
    out.end()
    out.begin("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    out.text("relative_path")
    out.text(chunk.file)
    out.text("offset")
    out.integer(chunk.start)
    out.text("length")
    out.integer(chunk.nbytes)
    out.end()


def _properties(dtype: str) -> bytes:
    """Return the opcodes of ``TensorProperties``, which pickles itself as a tuple."""
    of_dtype = f"ctorch\n{DTYPES[dtype].torch}\n".encode()
    layout = b"ctorch.serialization\n_get_layout\nX\x0d\0\0\0torch.strided\x85R"
    memory_format = f"c{_METADATA}\n_MEM_FORMAT_ENCODING\n".encode() + b"K\0\x85R"
    made = f"c{_METADATA}\nTensorProperties\n".encode() + b")\x81"
    return made + b"(" + of_dtype + layout + b"\x89" + memory_format + b"\x89tb"


FLUSHED = 1 << 16
"""Opcodes that are joined at once."""
_DICT, _SET = b"}(", b"u"
"""Opcodes before and after the items of a dict."""


class _Pickle:
    """Writes a pickle of torch's dataclasses: each class, text and shape once, and references to it after that."""

    def __init__(self) -> None:
        self._written = bytearray(b"\x80\x02")
        self._parts: list[bytes] = []
        """Opcodes that are not yet written."""
        self._known: dict[Any, bytes] = {}
        """The opcodes that push a value again."""

    def content(self) -> bytes:
        """Return the whole pickle."""
        self._flush()
        return bytes(self._written + b".")

    def put(self, opcodes: bytes) -> None:
        """Write opcodes."""
        self._parts.append(opcodes)

    def again(self, key: Any) -> bool:
        """Push a value by its number in the memo, if it has one."""
        known = self._known.get(key)
        if known is not None:
            self._parts.append(known)
        return known is not None

    def first(self, key: Any, opcodes: bytes) -> None:
        """Push a value by its opcodes, and keep it in the memo."""
        number = struct.pack("<I", len(self._known))
        self._known[key] = b"j" + number
        self._parts.append(opcodes + b"r" + number)

    def begin(self, name: str, module: str = _METADATA) -> None:
        """Begin an instance of a class; its attributes follow, then ``end``."""
        if not self.again((module, name)):
            self.first((module, name), f"c{module}\n{name}\n".encode())
        self._parts.append(b")\x81}(")

    def end(self) -> None:
        """End an instance."""
        self._parts.append(b"ub")
        if len(self._parts) > FLUSHED:
            self._flush()

    def _flush(self) -> None:
        self._written += b"".join(self._parts)
        self._parts.clear()

    def text(self, value: str) -> None:
        """Push a text."""
        if not self.again(value):
            data = value.encode("utf-8", "surrogatepass")
            self.first(value, b"X" + struct.pack("<I", len(data)) + data)

    def size(self, shape: tuple[int, ...]) -> None:
        """Push a ``torch.Size``."""
        if self.again(shape):
            return
        if not self.again(("torch", "Size")):
            self.first(("torch", "Size"), b"ctorch\nSize\n")
        self._parts.append(b"(")
        for number in shape:
            self.integer(number)
        self.first(shape, b"t\x85R")

    def integer(self, value: int) -> None:
        """Push a number."""
        if 0 <= value < 256:
            self._parts.append(b"K" + bytes((value,)))
        elif 0 <= value < 1 << 31:
            self._parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._parts.append(b"\x8a" + bytes((len(data),)) + data)
