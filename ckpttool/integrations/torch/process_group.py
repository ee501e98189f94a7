"""The ranks of the process group that a train loop has started."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ckpttool.errors import PlanError
from ckpttool.saving.coordination import Alone, Ranks


def ranks_of_process_group(name: str) -> Ranks:
    """Who takes part in what the train loop does.

    They meet in the store that the process group was started with, on keys of their own: no communicator of the
    training is used, and none of its collectives can be mixed up.

    Args:
        name: The same on all ranks, and used once.

    Raises:
        PlanError: A process group of several ranks has no store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        problem = "the process group has no store that its ranks could meet in"
        raise PlanError("torch.distributed", problem, "start it with the nccl or gloo backend")
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.PrefixStore("ckpttool", store), name)


def own_group() -> Any:
    """A process group for small numbers of the host's, whatever the training uses; None for a run of one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")


def any_of(group: Any, value: bool) -> bool:
    """Whether it is true on any rank of a group."""
    if group is None:
        return value
    counted = torch.tensor([int(value)])
    dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=group)
    return bool(counted.item())
