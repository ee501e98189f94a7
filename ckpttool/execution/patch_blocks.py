"""Check the indices of a delta, and find which of them lie in which block of their tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckpttool.errors import LayoutError
from ckpttool.execution.state_reader import StateReader
from ckpttool.model.formulas import PATCH_BLOCK, Patch

if TYPE_CHECKING:
    from ckpttool.execution.sources import Sources
    from ckpttool.model import State


def patch_of(sources: Sources, path: str, name: str, pair: tuple[State, State], numel: int) -> Patch:
    """Return the patch of one tensor.

    Args:
        sources: The open delta.
        path: Its path, for errors.
        name: The tensor.
        pair: The states of its indices and values.
        numel: Elements of the tensor.

    Raises:
        LayoutError: The indices do not ascend, or lie outside the tensor.
        StorageError: Reading failed.
    """
    indices, values = pair
    counts = np.zeros(-(-numel // PATCH_BLOCK), dtype=np.int64)
    before = -1
    for _, found in StateReader(sources).chunks(indices):
        if int(found[0]) <= before or int(found[-1]) >= numel or not (found[1:] > found[:-1]).all():
            problem = f"the indices of {name} do not ascend, or lie outside its {numel:,} elements"
            raise LayoutError(path, problem, "make the delta again, or copy it again")
        before = int(found[-1])
        low, high = int(found[0]) // PATCH_BLOCK, before // PATCH_BLOCK + 1
        counts[low:high] += np.bincount(found // PATCH_BLOCK - low, minlength=high - low)
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return Patch(indices, values, starts)
