"""Build copy rows (COPY) from states of a checkpoint to target files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.plan import COPY, Gather, merge_copies
from ckpttool.plan.copy_checks import source_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint, State


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A range of a state's elements, and its place in a target file."""

    state: State
    """The state."""
    dtype: str
    """Type to write."""
    target: int
    """First byte in the target file."""
    first: int = 0
    """First element."""
    numel: int | None = None
    """Number of elements; None for all from ``first``."""


class CopyBuilder:
    """Builds the copies of a plan whose sources are the files of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.sources = source_files(checkpoint)
        self._casts: dict[tuple[str, str], int] = {}

    @property
    def casts(self) -> tuple[tuple[str, str], ...]:
        """(source dtype, target dtype) pairs used so far."""
        return tuple(self._casts)

    def copies(self, pieces: Iterable[Placement]) -> tuple[NDArray[np.void], tuple[Gather, ...]]:
        """Return the copy rows of one target file, and the gathers for states that rows cannot express."""
        tables = []
        gathers = []
        for piece in pieces:
            numel = piece.state.numel - piece.first if piece.numel is None else piece.numel
            if numel == 0:
                continue
            if not piece.state.plain:
                gathers.append(Gather(piece.state, piece.dtype, piece.target, piece.first, numel))
                continue
            rows = piece.state.extents
            source, target = itemsize(piece.state.dtype), itemsize(piece.dtype)
            begin = np.maximum(rows["start"], piece.first)
            end = np.minimum(rows["start"] + rows["numel"], piece.first + numel)
            held = begin < end
            rows, begin, end = rows[held], begin[held], end[held]
            table = np.zeros(len(rows), dtype=COPY)
            table["source"], table["numel"] = rows["file"], end - begin
            table["start"] = rows["offset"] + (begin - rows["start"]) * np.uint64(source)
            table["target"] = piece.target + (begin - np.uint64(piece.first)) * np.uint64(target)
            pair = piece.state.dtype, piece.dtype
            table["cast"] = self._casts.setdefault(pair, len(self._casts))
            tables.append(table)
        everything = np.concatenate(tables) if tables else np.zeros(0, dtype=COPY)
        everything = everything[np.argsort(everything["target"], kind="stable")]
        return merge_copies(everything, self.casts), tuple(gathers)
