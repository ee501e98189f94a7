"""How many bytes a plan moves from which source to which target, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from ckpttool.plan import CopyPlan


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes that a plan reads from one file for another."""

    source: str
    """Path or URL of the file that is read."""
    target: str
    """Name of the file that is written."""
    nbytes: int
    """Bytes of tensors, in the type of the source."""


def moves_of(plan: CopyPlan) -> tuple[Move, ...]:
    """Return the bytes from each source to each target, comparisons left out."""
    widths = np.array([itemsize(source) for source, _ in plan.casts] or [0], dtype=np.int64)
    found = []
    for file in plan.files:
        held = np.zeros(len(plan.sources), dtype=np.int64)
        nbytes = file.copies["numel"].astype(np.int64) * widths[file.copies["cast"]]
        np.add.at(held, file.copies["source"].astype(np.int64), nbytes)
        for gather in file.gathers:
            for state in gather.state.stored:
                rows, share = state.extents, gather.numel / max(1, state.numel)
                read = (rows["numel"] * rows["runs"]).astype(np.int64) * itemsize(state.dtype) * share
                np.add.at(held, rows["file"].astype(np.int64), read.astype(np.int64))
        found += [Move(plan.sources[i].path, file.name, int(held[i])) for i in np.flatnonzero(held)]
    return tuple(found)
