"""Checkpoint -> plan of ``torch.load`` files; ``weights_only=True`` and ``mmap=True`` work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.containers.values import OrderedDict
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.targets.index import index_file
from ckpttool.targets.torch_file import TorchFileBuilder
from ckpttool.targets.weights import Weight, WeightSelection, shard_names, split_into_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.plan import ConsistencyChecks, TargetFile

INDEX = "pytorch_model.bin.index.json"
"""Name of the index over several files."""


def plan_torch(
    checkpoint: Checkpoint, selection: WeightSelection, *, max_shard_bytes: int, consistency: ConsistencyChecks | None
) -> CopyPlan:
    """Plan ``pytorch_model.bin``, or shards and ``pytorch_model.bin.index.json``.

    Each file is a state dict. Tied names share one storage, as ``torch.save`` writes them.
    """
    builder = CopyBuilder(checkpoint)
    shards = split_into_shards(selection.weights, max_shard_bytes)
    names = shard_names("pytorch_model", "bin", len(shards))
    files = [_file(builder, name, shard, selection) for name, shard in zip(names, shards, strict=True)]
    if len(files) > 1:
        files.append(index_file(INDEX, names, shards, selection, aliases=True))
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


def _file(builder: CopyBuilder, name: str, shard: Sequence[Weight], selection: WeightSelection) -> TargetFile:
    file = TorchFileBuilder(name, builder)
    root: OrderedDict = OrderedDict()
    for weight in shard:
        root[weight.name] = file.whole(weight.state, weight.dtype)
    for alias, stored in selection.aliases.items():
        if stored in root:
            root[alias] = root[stored]
    return file.build(root)
