"""Plan the index of sharded weights: the file of each tensor."""

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
    """Return the JSON index of sharded weights.

    Source: huggingface_hub, serialization/_base.py (``StateDictSplit``) and transformers, utils/hub.py.

    Args:
        name: Its file name.
        names: Names of the shards.
        shards: Their tensors.
        selection: The tensors to write.
        aliases: Whether the files hold tied names too.
    """
    where = {w.name: file for file, shard in zip(names, shards, strict=True) for w in shard}
    if aliases:
        where |= {alias: where[stored] for alias, stored in selection.aliases.items()}
    total = sum(w.nbytes for w in selection.weights)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
    data = text.encode()
    return TargetFile(name, len(data), ((0, data),), np.zeros(0, dtype=COPY))
