"""Checkpoint -> plan of files that ``torch.load`` reads, with ``weights_only=True`` and ``mmap=True`` as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import OrderedDict, StorageRef, TensorRef
from ckpttool.dtypes import DTYPES
from ckpttool.plan import CopyPlan, TargetFile
from ckpttool.targets.index import index_file
from ckpttool.targets.weights import CopyBuilder, Weight, WeightSelection, shard_names, split_into_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.plan import Proofs

INDEX = "pytorch_model.bin.index.json"
"""Name of the index over several files."""


def plan_torch(
    checkpoint: Checkpoint, selection: WeightSelection, *, max_shard_bytes: int, proofs: Proofs | None
) -> CopyPlan:
    """Plan ``pytorch_model.bin``, or shards and ``pytorch_model.bin.index.json``.

    Each file is a state dict. Tied names are in it, sharing one storage, as ``torch.save`` writes them.
    """
    builder = CopyBuilder(checkpoint)
    shards = split_into_shards(selection.weights, max_shard_bytes)
    names = shard_names("pytorch_model", "bin", len(shards))
    files = [_file(builder, name, shard, selection) for name, shard in zip(names, shards, strict=True)]
    if len(files) > 1:
        files.append(index_file(INDEX, names, shards, selection, aliases=True))
    return CopyPlan(builder.sources, builder.casts, tuple(files), proofs)


def _file(builder: CopyBuilder, name: str, shard: Sequence[Weight], selection: WeightSelection) -> TargetFile:
    root: OrderedDict = OrderedDict()
    sizes: dict[str, int] = {}
    for number, weight in enumerate(shard):
        root[weight.name] = _reference(str(number), weight)
        sizes[str(number)] = weight.nbytes
    for alias, stored in selection.aliases.items():
        if stored in root:
            root[alias] = root[stored]
    built = torch_zip.build(pickle(root, path=name), sizes, prefix=name.rpartition(".")[0], path=name)
    copies = builder.copies([(w, built.payloads[str(i)].start) for i, w in enumerate(shard)])
    return TargetFile(name, built.nbytes, built.literals, copies)


def _reference(key: str, weight: Weight) -> TensorRef:
    storage_class = DTYPES[weight.dtype].storage
    shape = weight.state.shape
    stride = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    if storage_class is None:
        storage = StorageRef(key, "UntypedStorage", "U8", "cpu", weight.nbytes)
    else:
        storage = StorageRef(key, storage_class, weight.dtype, "cpu", weight.state.numel)
    return TensorRef(storage, weight.dtype, 0, shape, tuple(reversed(stride)))
