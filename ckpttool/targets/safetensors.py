"""Checkpoint -> plan of safetensors files, named as Hugging Face's libraries name them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpttool.containers import safetensors
from ckpttool.errors import PlanError
from ckpttool.messages import brief
from ckpttool.plan import CopyPlan, TargetFile
from ckpttool.plan.builder import CopyBuilder, Placement
from ckpttool.targets.weights import Weight, WeightSelection, index_file, shard_names, split_into_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.plan import ConsistencyChecks

INDEX = "model.safetensors.index.json"
"""Name of the index over several files."""


def plan_safetensors(
    checkpoint: Checkpoint,
    selection: WeightSelection,
    *,
    max_shard_bytes: int,
    consistency: ConsistencyChecks | None,
    stem: str = "model",
) -> CopyPlan:
    """Plan ``model.safetensors``, or shards and ``model.safetensors.index.json``, as ``safetensors_files``."""
    builder = CopyBuilder(checkpoint)
    files = safetensors_files(checkpoint, builder, selection, max_shard_bytes=max_shard_bytes, stem=stem)
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


def safetensors_files(
    checkpoint: Checkpoint,
    builder: CopyBuilder,
    selection: WeightSelection,
    *,
    max_shard_bytes: int,
    stem: str = "model",
    metadata: Mapping[str, str] = MappingProxyType({}),
    first: Mapping[str, str] = MappingProxyType({}),
) -> list[TargetFile]:
    """Plan the files of some tensors: ``STEM.safetensors``, or shards and ``STEM.safetensors.index.json``.

    A tied tensor is stored once, under its owner's name, as ``save_pretrained`` does; the header's metadata lists the
    other names, as ``safetensors.torch.save_model`` does.

    Source: transformers 5, modeling_utils.py (``save_pretrained``); huggingface_hub, serialization/_base.py.

    Args:
        checkpoint: The source.
        builder: Builds the copies of the plan.
        selection: The tensors.
        max_shard_bytes: Maximum bytes of tensors in a shard, unless a single tensor is larger.
        stem: Prefix of the file names.
        metadata: Further metadata of every file.
        first: Further metadata of the first file.

    Raises:
        PlanError: A tensor has a name that the format cannot hold, or the header of a file is too large.
    """
    check_names(checkpoint.location, [*(w.name for w in selection.weights), *selection.aliases])
    taken = {"format", *metadata, *first} & set(selection.aliases)
    if taken:
        problem = f"a tied tensor is named {min(taken)}, which the header of safetensors uses for something else"
        raise PlanError(checkpoint.location, problem, "give it another name with rename", ("rename",))
    shards = split_into_shards(selection.weights, max_shard_bytes)
    names = shard_names(stem, "safetensors", len(shards))
    files = []
    for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
        more = {**metadata, **(first if number == 0 else {})}
        files.append(safetensors_file(builder, name, shard, selection, more))
        if len(files[-1].literals[0][1]) > safetensors.MAX_HEADER_BYTES:
            problem = f"gives {name} a header of more than {safetensors.MAX_HEADER_BYTES:,} bytes"
            raise PlanError(checkpoint.location, problem, "choose a smaller max_shard_size", ("max_shard_size",))
    if len(files) > 1:
        files.append(index_file(f"{stem}.safetensors.index.json", names, shards, selection))
    return files


def check_names(location: str, names: Iterable[str]) -> None:
    """Refuse names that the format cannot hold.

    Args:
        location: The source, for errors.
        names: Names of tensors.

    Raises:
        PlanError: There is one.
    """
    for name in names:
        if name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
            problem = f"a tensor is named {brief(name, 200)}"
            raise PlanError(location, problem, "leave it out with exclude: safetensors cannot hold it", ("exclude",))


def safetensors_file(
    builder: CopyBuilder, name: str, shard: Sequence[Weight], selection: WeightSelection, more: Mapping[str, str]
) -> TargetFile:
    """Plan one file.

    Args:
        builder: Builds the copies of the plan.
        name: Name of the file.
        shard: Its tensors.
        selection: Holds their tied names.
        more: Further metadata.
    """
    tensors = [safetensors.Tensor(w.name, w.dtype, w.state.shape) for w in shard]
    here = {w.name for w in shard}
    metadata = {**{a: n for a, n in selection.aliases.items() if n in here}, "format": "pt", **more}
    header, begin = safetensors.build(tensors, metadata)
    copies, gathers = builder.copies([Placement(w.state, w.dtype, begin[w.name]) for w in shard])
    return TargetFile(name, len(header) + sum(w.nbytes for w in shard), ((0, header),), copies, gathers)
