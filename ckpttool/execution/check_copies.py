"""Makes the comparisons of a plan: does the layout that was read hold?"""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.casts import CAST_ELEMENTS, cast, same_values
from ckpttool.dtypes import SHORT_NAMES, itemsize, numpy_dtype
from ckpttool.errors import LayoutError
from ckpttool.execution.sources import Scratch, Sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.errors import CkptError
    from ckpttool.plan import ConsistencyChecks
    from ckpttool.units import Advance

REMOTE_BYTES = 1 << 23
"""Bytes that are asked for at once where reading is remote."""


def failed_proofs(
    proofs: ConsistencyChecks, *, advance: Advance, sources: Sources | None = None
) -> Iterator[CkptError]:
    """Make every comparison and yield an error for each parameter that fails one."""
    opened = sources or Sources(proofs.sources)
    failed: set[int] = set()
    try:
        compare = _compare_distant if opened.remote else _compare
        for row, same in compare(proofs, opened, failed, advance):
            name = int(row["name"])
            if same or name in failed:
                continue
            failed.add(name)
            master, copy = (SHORT_NAMES.get(d, d) for d in proofs.casts[int(row["cast"])])
            yield LayoutError(
                proofs.sources[int(row["copy_source"])].path,
                f"the {copy} copy of {proofs.names[name]} is not what its {master} master in "
                f"{os.path.basename(proofs.sources[int(row['source'])].path)} says",
                "two saves are mixed (restore it from a copy), or the model was changed after the optimizer's last "
                "step (then consolidate --weights module writes the model's own copies)",
            )
    finally:
        if sources is None:
            opened.close()


_Piece = tuple[Any, tuple[int, int, int], tuple[int, int, int]]
"""A row, and for some of its elements (file, start, end) of the masters and of the copies."""


def _pieces(proofs: ConsistencyChecks, failed: set[int]) -> Iterator[_Piece]:
    for row in proofs.rows:
        master, copy = (itemsize(dtype) for dtype in proofs.casts[int(row["cast"])])
        start, copy_start, numel = int(row["start"]), int(row["copy_start"]), int(row["numel"])
        for first in range(0, numel, CAST_ELEMENTS):
            if int(row["name"]) in failed:
                break
            last = min(first + CAST_ELEMENTS, numel)
            ours = (int(row["source"]), start + first * master, start + last * master)
            yield row, ours, (int(row["copy_source"]), copy_start + first * copy, copy_start + last * copy)


def _compare(
    proofs: ConsistencyChecks, sources: Sources, failed: set[int], advance: Advance
) -> Iterator[tuple[Any, bool]]:
    sides = Scratch(), Scratch()
    for row, *spans in _pieces(proofs, failed):
        ours, theirs = (
            scratch.read_bytes(sources.raw(file), start, end - start)
            for scratch, (file, start, end) in zip(sides, spans, strict=True)
        )
        yield row, _same(proofs, row, ours, theirs)
        advance(len(ours) + len(theirs))


def _compare_distant(
    proofs: ConsistencyChecks, sources: Sources, failed: set[int], advance: Advance
) -> Iterator[tuple[Any, bool]]:
    """The same with many pieces at once: they are small, and each costs a round trip."""
    batch: list[_Piece] = []
    nbytes = 0
    for piece in chain(_pieces(proofs, failed), [None]):
        if piece is not None:
            batch.append(piece)
            nbytes += sum(end - start for _, start, end in piece[1:])
        if batch and (piece is None or nbytes >= REMOTE_BYTES):
            data = sources.fetch([span for _, *spans in batch for span in spans], hashed=False)
            for number, (row, *_) in enumerate(batch):
                yield row, _same(proofs, row, data[2 * number], data[2 * number + 1])
            advance(nbytes)
            batch, nbytes = [], 0


def _same(proofs: ConsistencyChecks, row: Any, ours: memoryview, theirs: memoryview) -> bool:
    master, copy = proofs.casts[int(row["cast"])]
    values: NDArray[Any] = np.frombuffer(ours, dtype=numpy_dtype(master))
    held: NDArray[Any] = np.frombuffer(theirs, dtype=numpy_dtype(copy))
    return bool(same_values(cast(values, copy), held).all())
