"""The tensors of a safetensors file as states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpttool.model import State
from ckpttool.model.places import Contiguous

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.containers.safetensors import Tensor
    from ckpttool.ranges import ByteRange


def states_in(entries: Mapping[str, tuple[Tensor, ByteRange]], file: int) -> dict[str, State]:
    """Return the states of a file by name.

    Args:
        entries: Each tensor, and where it lies.
        file: Index of the file in its checkpoint.
    """
    return {
        name: State(tensor.shape, tensor.dtype, Contiguous(math.prod(tensor.shape), file, where.start))
        for name, (tensor, where) in entries.items()
    }
