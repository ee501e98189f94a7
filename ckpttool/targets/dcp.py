"""Checkpoint -> plan of a directory of ``torch.distributed.checkpoint``.

It has the content that ``dcp.save({"model": ..., "optim": ...})`` writes for ``get_state_dict``: weights under
``model.NAME``, the optimizer's states under ``optim.state.NAME.STATE``, its groups under ``optim.param_groups``. Each
tensor is one chunk, a ``torch.save`` file within a file; any number of ranks reads the parts it needs.

Source: torch 2.13, distributed/checkpoint/filesystem.py (``FileSystemWriter``), metadata.py, default_planner.py and
state_dict.py (``get_state_dict``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import Opaque, Size, TorchDType
from ckpttool.dtypes import DTYPES, castable
from ckpttool.errors import PlanError
from ckpttool.formats.dcp import METADATA
from ckpttool.formats.universal import STEP
from ckpttool.model import MASTER, MODULE, TensorFloat, TensorInteger
from ckpttool.plan import COPY, CopyPlan, TargetFile
from ckpttool.plan.builder import CopyBuilder
from ckpttool.targets.torch import TorchFileBuilder, plain_file, without_tensors
from ckpttool.targets.universal import scalar_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpttool.model import Checkpoint, Parameter, State
    from ckpttool.plan import ConsistencyChecks

MAX_FILE_BYTES = 5_000_000_000
"""Maximum file size, unless a single tensor is larger."""
ALIGNMENT = 64
"""Alignment of archives in a file, in bytes, so that tensors are aligned too."""

_ARCHIVE = "archive"
_METADATA = "torch.distributed.checkpoint.metadata"
_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_ADAM_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Group keys of torch's AdamW that DeepSpeed's Adam lacks; without them ``dcp.load`` reports missing keys."""

Path = tuple[str | int, ...]
"""Keys of a value in the nested state dict."""


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
    checkpoint: Checkpoint, *, max_file_bytes: int = MAX_FILE_BYTES, consistency: ConsistencyChecks | None = None
) -> CopyPlan:
    """Plan ``.metadata`` and the files that it describes.

    Trained parameters come from their masters, as FSDP keeps them; frozen parameters and buffers as they are. A step is
    a tensor, as torch's optimizers have it.

    Args:
        checkpoint: The source.
        max_file_bytes: Maximum file size in bytes, unless a single tensor is larger.
        consistency: Consistency checks to make before the first write.

    Raises:
        PlanError: The checkpoint contains no tensors, or two entries of one name.
    """
    builder = CopyBuilder(checkpoint)
    entries: list[_TensorEntry] = []
    files: list[TargetFile] = []
    where: dict[str, tuple[str, int, int]] = {}
    shard: list[tuple[int, TargetFile]] = []
    size = 0
    for entry in _entries(checkpoint, builder):
        if entry.fqn in where:
            problem = f"has two entries of the name {entry.fqn:.200}"
            raise PlanError(checkpoint.location, problem, "convert it to zero or to universal")
        if shard and size + entry.file.nbytes > max_file_bytes:
            files.append(_shard(len(files), shard))
            shard, size = [], 0
        start = -(-size // ALIGNMENT) * ALIGNMENT
        where[entry.fqn] = _shard_name(len(files)), start, entry.file.nbytes
        shard.append((start, entry.file))
        size = start + entry.file.nbytes
        entries.append(entry)
    if not entries:
        raise PlanError(checkpoint.location, "holds no tensors", "choose another checkpoint")
    files.append(_shard(len(files), shard))
    weights = {entry.path[1]: entry for entry in entries if entry.path[0] == "model"}
    for alias, stored in checkpoint.aliases.items():
        # torch writes a tied tensor once for each name; here both names refer to the same bytes.
        if stored in weights and f"model.{alias}" not in where:
            tied = replace(weights[stored], path=("model", alias))
            where[tied.fqn] = where[weights[stored].fqn]
            entries.append(tied)
    files.append(plain_file(METADATA, pickle(_metadata(entries, where), path=METADATA)))
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


# ------------------------------------------------------------------------------------------------- entries


def _entries(checkpoint: Checkpoint, builder: CopyBuilder) -> Iterator[_TensorEntry]:
    for parameter in checkpoint.parameters:
        state = checkpoint.weights(parameter)
        dtype = "F32" if MASTER in parameter.states and castable(state.dtype, "F32") else state.dtype
        yield _tensor(builder, ("model", parameter.name), state, dtype)
    for buffer in checkpoint.buffers:
        yield _tensor(builder, ("model", buffer.name), buffer.state, buffer.state.dtype)
    for parameter in checkpoint.parameters:
        yield from _states(checkpoint, builder, parameter)
    for g, group in enumerate(checkpoint.groups):
        options = without_tensors(dict(group.hyperparameters))
        known = {key for p in checkpoint.parameters if p.group == g for key in p.states}
        if known >= _ADAM and "betas" in options:
            options = {**_ADAM_OPTIONS, **options}
        for key, value in {**options, "params": list(group.parameters)}.items():
            if isinstance(value, TensorFloat | TensorInteger):
                yield _scalar_entry(builder, ("optim", "param_groups", g, key), value, value.dtype)
            else:
                yield _object(builder, ("optim", "param_groups", g, key), value)


def _states(checkpoint: Checkpoint, builder: CopyBuilder, parameter: Parameter) -> Iterator[_TensorEntry]:
    path = ("optim", "state", parameter.name)
    for key, state in parameter.states.items():
        if key not in {MASTER, MODULE, STEP}:
            yield _tensor(builder, (*path, key), state, state.dtype)
    if parameter.group is None or not 0 <= parameter.group < len(checkpoint.groups):
        return
    for key, scalar in checkpoint.groups[parameter.group].scalars.items():
        if key in parameter.states and key != STEP:
            continue
        yield _scalar_entry(builder, (*path, key), scalar.value, scalar.dtype or "F32", scalar.shape)


def _tensor(builder: CopyBuilder, path: Path, state: State, dtype: str) -> _TensorEntry:
    file = TorchFileBuilder(_ARCHIVE, builder)
    return _TensorEntry(path, file.build(file.whole(state, dtype)), dtype, state.shape)


def _scalar_entry(
    builder: CopyBuilder, path: Path, value: float | int | bool, dtype: str, shape: tuple[int, ...] = ()
) -> _TensorEntry:
    """Return the entry of a scalar tensor."""
    file = TorchFileBuilder(_ARCHIVE, builder)
    return _TensorEntry(path, file.build(file.scalar(scalar_bytes(value, dtype), dtype, shape)), dtype, shape)


def _object(builder: CopyBuilder, path: Path, value: Any) -> _TensorEntry:
    file = TorchFileBuilder(_ARCHIVE, builder)
    return _TensorEntry(path, file.build(file.hyperparameters(value)), None, ())


# ------------------------------------------------------------------------------------------------- files


def _shard_name(number: int) -> str:
    """Return torch's file name of rank 0."""
    return f"__0_{number}.distcp"


def _shard(number: int, parts: Iterable[tuple[int, TargetFile]]) -> TargetFile:
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
    return TargetFile(_shard_name(number), end, tuple(literals), np.concatenate(copies), tuple(gathers), tuple(zeros))


# ------------------------------------------------------------------------------------------------- metadata


def _metadata(entries: Iterable[_TensorEntry], where: dict[str, tuple[str, int, int]]) -> Opaque:
    """Return a pickled ``Metadata`` object."""
    described: dict[str, Opaque] = {}
    paths: dict[str, Path] = {}
    stored: dict[Opaque, Opaque] = {}
    properties: dict[str, Opaque] = {}
    for entry in entries:
        fqn = entry.fqn
        paths[fqn] = entry.path
        file, start, nbytes = where[fqn]
        info = _made(
            "torch.distributed.checkpoint.filesystem", "_StorageInfo", relative_path=file, offset=start, length=nbytes
        )
        if entry.dtype is None:
            described[fqn] = _made(_METADATA, "BytesStorageMetadata")
            stored[_made(_METADATA, "MetadataIndex", fqn=fqn, offset=None, index=None)] = info
            continue
        origin = Size(0 for _ in entry.shape)
        size = Size(entry.shape)
        if entry.dtype not in properties:
            properties[entry.dtype] = _properties(entry.dtype)
        chunk = _made(_METADATA, "ChunkStorageMetadata", offsets=origin, sizes=size)
        described[fqn] = _made(
            _METADATA, "TensorStorageMetadata", properties=properties[entry.dtype], size=size, chunks=[chunk]
        )
        stored[_made(_METADATA, "MetadataIndex", fqn=fqn, offset=origin, index=0)] = info
    return _made(
        _METADATA,
        "Metadata",
        state_dict_metadata=described,
        planner_data=paths,
        storage_data=stored,
        storage_meta=None,
        version="1.0.0",
    )


def _made(module: str, name: str, **attributes: Any) -> Opaque:
    """Return an instance of a dataclass."""
    value = Opaque(module, name, "new")
    value.stated, value.state = bool(attributes), attributes
    return value


def _properties(dtype: str) -> Opaque:
    """Return ``TensorProperties``, which pickles itself as a tuple."""
    layout = Opaque("torch.serialization", "_get_layout", "call", ("torch.strided",))
    memory_format = Opaque(_METADATA, "_MEM_FORMAT_ENCODING", "call", (0,))
    value = Opaque(_METADATA, "TensorProperties", "new")
    value.stated, value.state = True, (TorchDType(DTYPES[dtype].torch), layout, False, memory_format, False)
    return value
