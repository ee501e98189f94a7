"""Plan a virtual file of whole, replicated tensors: each rank reads a slice of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.dtypes import itemsize
from ckpttool.plan import CopyPlan, TargetFile
from ckpttool.plan.builder import CopyBuilder, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.model import Checkpoint, State

ALIGNMENT = 64
"""Bytes: a multiple of every element's size."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor in the file."""

    name: str
    """Key of the tensor in ``tensors`` of ``plan_replicas``."""
    dtype: str
    """safetensors' spelling."""
    start: int
    """First byte; a multiple of ALIGNMENT."""
    nbytes: int
    """Size in bytes, without padding."""


def plan_replicas(checkpoint: Checkpoint, tensors: Mapping[str, State]) -> tuple[CopyPlan, list[PackedTensor]]:
    """Plan a file of whole tensors, each in its own dtype.

    Args:
        checkpoint: The source.
        tensors: The state of each tensor, by any key.

    Returns:
        A plan of one file, and the offset of each tensor in it.
    """
    packed, pieces, zeros, at = [], [], [], 0
    for name, state in tensors.items():
        nbytes = state.numel * itemsize(state.dtype)
        packed.append(PackedTensor(name, state.dtype, at, nbytes))
        pieces.append(Placement(state, state.dtype, at))
        end = -(-(at + nbytes) // ALIGNMENT) * ALIGNMENT
        zeros.append((at + nbytes, end - at - nbytes))
        at = end
    builder = CopyBuilder(checkpoint)
    copies, gathers = builder.copies(pieces)
    file = TargetFile("replicas", at, (), copies, gathers, tuple(zeros))
    return CopyPlan(builder.sources, builder.casts, (file,)), packed
