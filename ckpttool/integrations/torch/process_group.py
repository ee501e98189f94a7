"""Agreement between the ranks of the training's process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ckpttool.errors import PlanError
from ckpttool.saving.coordination import Alone, Ranks


def ranks_of_process_group(purpose: str) -> Ranks:
    """Return the ranks of the training's process group, for one purpose common to all ranks.

    They agree through the store of the process group, under separate keys: the training's communicators are not used,
    so that its collectives cannot be mixed up. The n-th call for a purpose on one rank agrees with the n-th call on the
    others. The store counts the calls, so that a new process group starts at zero.

    Args:
        purpose: The same on all ranks.

    Raises:
        PlanError: A process group of several ranks has no store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        problem = "has a process group without a store: its ranks cannot agree"
        raise PlanError("torch.distributed", problem, "start it with the nccl or gloo backend")
    keys = dist.PrefixStore("ckpttool", store)
    number = keys.add(f"{purpose}/calls/{dist.get_rank()}", 1)
    return Ranks(dist.get_rank(), dist.get_world_size(), keys, f"{purpose} {number}")


def own_group() -> Any:
    """Return a gloo process group for small host tensors, for any backend of the training; None for one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")


def any_of(group: Any, value: bool) -> bool:
    """Return whether a value is true on any rank of a group."""
    if group is None:
        return value
    counted = torch.tensor([int(value)])
    dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=group)
    return bool(counted.item())
