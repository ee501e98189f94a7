"""The index that tells which of several files holds a tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.plan import COPY, TargetFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.targets.weights import Weight, WeightSelection


def index_file(
    name: str,
    names: Sequence[str],
    shards: Sequence[Sequence[Weight]],
    selection: WeightSelection,
    *,
    aliases: bool = False,
) -> TargetFile:
    """The JSON index of sharded weights.

    Source: huggingface_hub, serialization/_base.py (``StateDictSplit``) and transformers, utils/hub.py.

    Args:
        name: Its file name.
        names: Names of the shards.
        shards: Their tensors.
        selection: All that is written.
        aliases: Whether tied names are in the files as well.
    """
    where = {w.name: file for file, shard in zip(names, shards, strict=True) for w in shard}
    if aliases:
        where |= {alias: where[stored] for alias, stored in selection.aliases.items()}
    total = sum(w.nbytes for w in selection.weights)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
    data = text.encode()
    return TargetFile(name, len(data), ((0, data),), np.zeros(0, dtype=COPY))
