"""Whole tensors one behind another, in a file that is not to be written but read from: a slice of it for each rank."""

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
class Packed:
    """One tensor in the file."""

    name: str
    """As it was asked for."""
    dtype: str
    """safetensors' spelling."""
    start: int
    """First byte; a multiple of ALIGNMENT."""
    nbytes: int
    """Bytes, without the padding behind them."""


def plan_packed(checkpoint: Checkpoint, tensors: Mapping[str, State]) -> tuple[CopyPlan, list[Packed]]:
    """Plan a file of whole tensors, each in its own type.

    Returns:
        A plan of one file, and where each tensor lies in it.
    """
    packed, pieces, zeros, at = [], [], [], 0
    for name, state in tensors.items():
        nbytes = state.numel * itemsize(state.dtype)
        packed.append(Packed(name, state.dtype, at, nbytes))
        pieces.append(Placement(state, state.dtype, at))
        end = -(-(at + nbytes) // ALIGNMENT) * ALIGNMENT
        zeros.append((at + nbytes, end - at - nbytes))
        at = end
    builder = CopyBuilder(checkpoint)
    copies, gathers = builder.copies(pieces)
    file = TargetFile("replicas", at, (), copies, gathers, tuple(zeros))
    return CopyPlan(builder.sources, builder.casts, (file,)), packed
